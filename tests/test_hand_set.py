"""Networks whose weights are set by hand, so that every effect is known, and a trained one whose heads are found."""

import dataclasses
import functools

import pytest
import torch
import transformers as hf
from helpers import tokenizer
from test_localize import metric_of

from locus import hooks
from locus.edges import edges
from locus.facts import ContrastPairs, Fact
from locus.localize import (
    ActivationPatching,
    AtPStar,
    AttributionPatching,
    IntegratedGradients,
    Knockout,
    PathPatching,
    localize,
    localize_edges,
)
from locus.localize.attribution import gradients_at
from locus.metrics import logit_difference
from locus.models import wrap

FEATURES, HEADS, WORDS = 12, 2, 97
ANSWER, DISTRACTOR = 5, 6


class Network:
    """A GPT-2 of zeros, to write into. Feature i of the residual stream is the direction e_2i - e_2i+1.

    Norms have an epsilon and a weight so large that they are the identity, up to 1e-12; directions have mean 0, so
    centring does nothing either. The logit of the answer is feature 0, that of the distractor 0.
    """

    def __init__(self, layers):
        config = hf.GPT2Config(
            vocab_size=WORDS,
            n_embd=2 * FEATURES,
            n_layer=layers,
            n_head=HEADS,
            n_positions=8,
            activation_function="relu",
            layer_norm_epsilon=1e14,
            tie_word_embeddings=False,
        )
        self.hf_model = hf.GPT2LMHeadModel(config).double().eval()
        self.width = FEATURES // HEADS * 2  # of a head
        for name, p in self.hf_model.named_parameters():
            p.data.fill_(1e7 if ".ln_" in name and "weight" in name else 0)
        self.blocks, self.used = self.hf_model.transformer.h, [[0] * HEADS for _ in range(layers)]
        self.hf_model.lm_head.weight.data[ANSWER] = self.direction(0) / 2

    def direction(self, feature):
        out = torch.zeros(2 * FEATURES, dtype=torch.float64)
        out[2 * feature], out[2 * feature + 1] = 1, -1
        return out

    def embed(self, word, features):
        self.hf_model.transformer.wte.weight.data[word] = sum(x * self.direction(f) for f, x in features.items())

    def look(self, layer, head, query, key, strength=1.0):
        """Adds strength · (feature `query` of the reader) · (feature `key` of the read) to a head's scores."""
        at = self.used[layer][head]
        self.used[layer][head] += 1
        weight = self.blocks[layer].attn.c_attn.weight.data
        weight[:, head * self.width + at] = self.direction(query) / 2 * strength * self.width**0.5
        weight[:, 2 * FEATURES + head * self.width + at] = self.direction(key) / 2

    def carry(self, layer, head, source, target, scale=1.0):
        """The head writes the mean of feature `source` where it looks to feature `target`."""
        attn = self.blocks[layer].attn
        attn.c_attn.weight.data[:, 4 * FEATURES + head * self.width] += self.direction(source) / 2
        attn.c_proj.weight.data[head * self.width] += scale * self.direction(target)

    def neuron(self, layer, unit, source, target, bias=0.0, scale=1.0):
        """feature `target` += scale · relu(feature `source` + bias)."""
        mlp = self.blocks[layer].mlp
        mlp.c_fc.weight.data[:, unit], mlp.c_fc.bias.data[unit] = self.direction(source) / 2, bias
        mlp.c_proj.weight.data[unit] = scale * self.direction(target)

    def finish(self):
        return wrap(self.hf_model, tokenizer(), "by hand")


def pairs_of(clean, corrupted):
    clean, corrupted = torch.tensor(clean), torch.tensor(corrupted)
    n, length = clean.shape
    one = torch.ones(n, 1, dtype=torch.long)
    return ContrastPairs(
        clean=clean,
        corrupted=corrupted,
        attention_mask=torch.ones(n, length, dtype=torch.bool),
        read=(length - 1) * one,
        answer=ANSWER * one,
        distractor=DISTRACTOR * one,
        read_mask=one.bool(),
        subject=clean != corrupted,
        facts=tuple(Fact(f"w{i}", "by hand", f"w{i} w50", "w60") for i in range(n)),
    )


def score(method, model, pairs, kind):
    values = method.score(model, pairs, model.components(kind), logit_difference, False)[0].tolist()
    return dict(zip(map(str, model.components(kind)), values, strict=True))


def exact_inputs(model, pairs, layer, head, base, source):
    """Queries and keys of a head from the other run, one position at a time: the sum of the changes of the metric."""
    total, before = 0.0, metric_of(model, base, pairs)
    for name in (f"blocks.{layer}.attn.hook_{n}" for n in "qk"):
        here, other = (hooks.states(model, t, pairs.attention_mask, [name])[name] for t in (base, source))
        for position in range(base.shape[1]):
            new = here.clone()
            new[:, position, head] = other[:, position, head]
            with hooks.edits(model, [(name, lambda _, new=new: new)]):
                total = total + metric_of(model, base, pairs) - before
    return total


def plain_inputs(model, pairs, layer, head):
    """Attribution patching of the same queries and keys."""
    names = [f"blocks.{layer}.attn.hook_{n}" for n in "qk"]
    slopes, here = gradients_at(model, pairs.corrupted, pairs, names, logit_difference)
    other = hooks.states(model, pairs.clean, pairs.attention_mask, names)
    return sum(((other[n] - here[n]) * slopes[n])[:, :, head].sum((1, 2)) for n in names)


A, B, CLEAN, CORRUPTED = 10, 11, 20, 21
VALUE, IS_A, IS_B, WANTS_A, WANTS_B, MIDDLE, OTHER = 1, 2, 3, 4, 5, 6, 7


def chooser(network, layer, head, wants=(WANTS_A, WANTS_B), strength=200.0):
    """The head looks at the word A or at the word B, as the reader wants; its pattern is one-hot."""
    network.embed(A, {IS_A: 1, VALUE: 3})
    network.embed(B, {IS_B: 1, VALUE: 0.5})
    network.look(layer, head, wants[0], IS_A, strength)
    network.look(layer, head, wants[1], IS_B, strength)


def test_saturated_attention_hides_queries_from_the_gradient_and_not_from_atp_star():
    """Layer 0 brings to the end what is wanted; the head of layer 1 looks there and carries 3 from A or 0.5 from B."""
    network = Network(2)
    network.embed(CLEAN, {MIDDLE: 1})
    network.embed(CORRUPTED, {OTHER: 1})
    # The last word looks at all four alike, so a fourth of what is wanted arrives.
    network.carry(0, 0, MIDDLE, WANTS_A, 4.0)
    network.carry(0, 1, OTHER, WANTS_B, 4.0)
    chooser(network, 1, 1)
    network.carry(1, 1, VALUE, 0)
    model, pairs = network.finish(), pairs_of([[A, B, CLEAN, 30]], [[A, B, CORRUPTED, 30]])
    assert metric_of(model, pairs.clean, pairs).item() == pytest.approx(3)
    assert metric_of(model, pairs.corrupted, pairs).item() == pytest.approx(0.5)
    exact = exact_inputs(model, pairs, 1, 1, pairs.corrupted, pairs.clean)
    assert exact.item() == pytest.approx(2.5, abs=1e-6)
    assert plain_inputs(model, pairs, 1, 1).abs().item() < 1e-6
    star = score(AtPStar(), model, pairs, "head")
    assert star["L1H1"] == pytest.approx(2.5, abs=1e-6) and star["L1H0"] == pytest.approx(0, abs=1e-9)
    assert score(AtPStar(direction="noising"), model, pairs, "head")["L1H1"] == pytest.approx(2.5, abs=1e-6)
    # Below, the gradient of what layer 0 writes is lost too; exact patching sees that both heads of it are needed.
    both = AttributionPatching().score(model, pairs, model.components("attn"), logit_difference, False)[0, 0]
    assert abs(float(both)) < 1e-6
    assert score(ActivationPatching(), model, pairs, "attn")["L0ATTN"] == pytest.approx(2.5, abs=1e-6)


def test_atp_star_is_exact_where_the_metric_is_linear_in_the_pattern():
    """Queries and keys at random and large: every pattern is saturated, and the readout of the last layer is linear."""
    network, generator = Network(1), torch.Generator().manual_seed(0)
    attn = network.blocks[0].attn
    attn.c_attn.weight.data[:] = 3 * torch.randn(attn.c_attn.weight.shape, generator=generator, dtype=torch.float64)
    attn.c_proj.weight.data[:] = torch.randn(attn.c_proj.weight.shape, generator=generator, dtype=torch.float64)
    words = torch.randn(WORDS, FEATURES, generator=generator, dtype=torch.float64)
    for word, features in enumerate(words):
        network.embed(word, dict(enumerate(features)))
    model = network.finish()
    pairs = pairs_of(*torch.randint(3, WORDS, (2, 6, 7), generator=generator).tolist())
    for head in range(HEADS):
        for direction, base, source in (
            ("denoising", pairs.corrupted, pairs.clean),
            ("noising", pairs.clean, pairs.corrupted),
        ):
            sign = 1 if direction == "denoising" else -1
            exact = sign * exact_inputs(model, pairs, 0, head, base, source)
            heads = model.components("head")
            star = AtPStar(direction=direction).score(model, pairs, heads, logit_difference, False)[:, head]
            assert torch.allclose(star, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
        plain = plain_inputs(model, pairs, 0, head)
        assert ((plain - star).abs() > 0.5 * star.abs()).float().mean() > 0.5


def test_effects_that_cancel_at_first_order_are_seen_by_grad_drop():
    """A head writes f to the answer; an MLP above takes min(f, 1) away. The slope at f = 0.5 is 0; f = 3 gives 2."""
    network = Network(2)
    network.embed(CLEAN, {WANTS_A: 1})
    network.embed(CORRUPTED, {WANTS_B: 1})
    chooser(network, 0, 1)
    network.carry(0, 1, VALUE, 0)
    network.neuron(1, 0, 0, 0, scale=-1.0)
    network.neuron(1, 1, 0, 0, bias=-1.0)
    model, pairs = network.finish(), pairs_of([[A, B, CLEAN]], [[A, B, CORRUPTED]])
    assert metric_of(model, pairs.corrupted, pairs).item() == pytest.approx(0, abs=1e-9)
    assert score(ActivationPatching(), model, pairs, "head")["L0H1"] == pytest.approx(2)
    assert score(AttributionPatching(), model, pairs, "head")["L0H1"] == pytest.approx(0, abs=1e-9)
    assert score(AtPStar(), model, pairs, "head")["L0H1"] == pytest.approx(0, abs=1e-9)
    # Without layer 0 the head has no gradient, without layer 1 that of its direct path: (0 + 2.5) / (2 - 1).
    dropped = score(AtPStar(drop=True), model, pairs, "head")
    assert dropped["L0H1"] == pytest.approx(2.5, abs=1e-6) and dropped["L0H0"] == pytest.approx(0, abs=1e-9)
    # The integral is exact, up to the kinks.
    assert score(IntegratedGradients(steps=50), model, pairs, "head")["L0H1"] == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("gate", ["or", "and"])
def test_two_heads_under_a_gate_are_seen_from_one_side_only(gate):
    """Each head brings 1 if the word is the clean one; the MLP above makes min(h0 + h1, 1) or max(h0 + h1 - 1, 0)."""
    network = Network(2)
    network.embed(CLEAN, {MIDDLE: 1})
    for head in range(2):
        network.carry(0, head, MIDDLE, OTHER, 2.0)  # a half of what the two words have
    if gate == "or":
        network.neuron(1, 0, OTHER, 0)
    network.neuron(1, 1, OTHER, 0, bias=-1.0, scale=-1.0 if gate == "or" else 1.0)
    model, pairs = network.finish(), pairs_of([[CLEAN, 30]], [[CORRUPTED, 30]])
    assert metric_of(model, pairs.clean, pairs).item() == pytest.approx(1)
    assert metric_of(model, pairs.corrupted, pairs).item() == pytest.approx(0, abs=1e-9)
    all_of, none_of = pytest.approx(1), pytest.approx(0, abs=1e-9)
    enough, needed = (all_of, none_of) if gate == "or" else (none_of, all_of)
    denoised = score(ActivationPatching("denoising"), model, pairs, "head")
    noised = score(ActivationPatching("noising"), model, pairs, "head")
    removed = score(Knockout(), model, pairs, "head")
    for head in ("L0H0", "L0H1"):
        assert denoised[head] == enough and noised[head] == needed and removed[head] == needed
    # Both together are enough and needed, whichever the gate.
    for method in (ActivationPatching("denoising"), ActivationPatching("noising"), Knockout()):
        assert score(method, model, pairs, "attn")["L0ATTN"] == all_of
        assert score(method, model, pairs, "mlp") == {"L0MLP": none_of, "L1MLP": all_of}
    heads = localize(model, pairs, ActivationPatching(), components="head", progress=False)
    assert heads.values[0, :2].tolist() == [enough, enough] and not heads.values[0, 2:].any()


HALF = 8  # words of a sequence before it repeats


@functools.cache
def induction():
    """A llama without MLPs, trained to go on with sequences that it saw begin: `… a b … a` → `b`.

    The second half is the first, turned by a number of places of its own, so that no fixed distance tells the answer.
    """
    config = hf.LlamaConfig(
        vocab_size=24,
        hidden_size=48,
        intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf_model = hf.LlamaForCausalLM(config)
        for block in hf_model.model.layers:
            for p in block.mlp.parameters():
                p.data.zero_()
                p.requires_grad_(False)
        optimizer = torch.optim.AdamW((p for p in hf_model.parameters() if p.requires_grad), lr=4e-3)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
        for _ in range(1500):
            first = torch.rand(48, 24).argsort(1)[:, :HALF]
            at = (torch.arange(HALF) + torch.randint(HALF - 1, (48, 1))) % HALF
            tokens = torch.cat([first, first.gather(1, at)], dim=1)
            logits = hf_model(tokens).logits[:, HALF:-1]
            known = at[:, :-1] != HALF - 1  # what follows the last of the first half is not known
            loss = torch.nn.functional.cross_entropy(logits[known], tokens[:, HALF + 1 :][known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()
            if loss < 0.05:
                return wrap(hf_model.double().eval(), tokenizer(), "induction")
    raise AssertionError(f"the model did not learn to repeat: its loss is {loss:.2f}")


def repeats(n=32):
    """`a b … c d … a`, whose answer is b; corrupted: a and c change places where they stand first, so that it is d."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.stack([torch.randperm(24, generator=generator)[:HALF] for _ in range(n)])
    corrupted = clean.clone()
    corrupted[:, [1, 5]] = clean[:, [5, 1]]
    last = clean[:, 1:2]
    pairs = pairs_of(*(torch.cat([half, last], dim=1).tolist() for half in (clean, corrupted)))
    return dataclasses.replace(pairs, answer=clean[:, 2:3], distractor=clean[:, 6:7])


def test_the_heads_of_a_trained_induction_model_are_found():
    """Layer 1 looks from the last word to where a head of layer 0 has brought a: that head, and its edge to the key.

    Which heads these are, and how many words back they look, is read off the attention patterns.
    """
    model, pairs = induction(), repeats()
    total = float((metric_of(model, pairs.clean, pairs) - metric_of(model, pairs.corrupted, pairs)).mean())
    assert total > 8
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    below, above = (p.mean(0) for p in hooks.states(model, pairs.clean, pairs.attention_mask, names).values())
    share, place = above[:, HALF].max(1)
    carrier = int(below[:, int(place[share.argmax()]), 1].argmax())
    readers = [head for head in range(HEADS) if share[head] > 0.5]
    assert readers and below[carrier, int(place[readers[0]]), 1] > 0.3
    for method in (ActivationPatching(), ActivationPatching("noising"), IntegratedGradients(steps=40)):
        scores = localize(model, pairs, method, components="head", progress=False).mean().unflatten(0, (2, HEADS))
        assert int(scores[0].argmax()) == carrier and scores[0, carrier] > 0.8 * total, (method, scores)
        assert scores[1].argmax() in readers and scores[1].max() > 0.3 * total
    # The gradient does not go through the sharp pattern; it finds the readers, whose outputs are nearly linear.
    slopes = localize(model, pairs, AttributionPatching(), components="head", progress=False).mean()
    assert slopes[HEADS:].argmax() in readers and slopes[HEADS:].max() > 0.2 * total
    between = [str(e) for e in edges(model) if str(e.sender).startswith("L0H") and str(e.receiver).startswith("L1H")]
    assert len(between) == HEADS * HEADS * 3
    top = localize_edges(model, pairs, PathPatching(), chosen=between, progress=False).top(len(between))
    keys = {f"L0H{carrier}->L1H{reader}.k" for reader in readers}
    assert top.edge[0] in keys and top.score[0] > 0.3 * total, top
    assert (top[~top.edge.isin(keys)].score.abs() < 0.1 * total).all(), top
