"""Causal tracing and attention knockout against loops of whole passes, and against plain Hugging Face models."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import ARCHITECTURES, contrast_pairs
from test_localize import metric_of, some

from locus import hooks
from locus.localize import AttentionKnockout, CausalTracing, attention_curve, causal_trace, localize
from locus.localize.attention import edges
from locus.localize.tracing import SITES, last_subject
from locus.metrics import Targets, logit_difference, probability

SLOW = CausalTracing(noise=3.0, samples=2, window=2, seed=4)


def two_token_subjects(padding):
    """Subjects of two tokens, of one in the second fact."""
    pairs = contrast_pairs(padding=padding)
    subject = pairs.subject | pairs.subject.roll(1, 1)
    subject[1] = pairs.subject[1]
    return dataclasses.replace(pairs, subject=subject)


def draws(embedded, subject, method):
    """The noise of each sample for one prompt, as in the code of ROME: only the subject's tokens have some."""
    drawn = np.random.RandomState(method.seed).randn(method.samples, int(subject.sum()), embedded.shape[-1])
    out = torch.zeros(method.samples, *embedded.shape, dtype=embedded.dtype)
    out[:, subject] = torch.as_tensor(drawn)
    return out


def test_batches_do_not_change_traces(llama):
    pairs, mlps = two_token_subjects("right"), llama.components("mlp")
    whole, parts = (
        dataclasses.replace(SLOW, max_tokens=most).score(llama, pairs, mlps, probability, False) for most in (9999, 14)
    )
    assert (whole - parts).abs().max() < 1e-9


def window(layer, size, n_layers):
    return range(max(0, layer - size // 2), min(n_layers, layer - (-size // 2)))


def restored(model, pairs, method, names, at):
    """The obviously right twin: for each sample one noised pass of all facts, with one position of some hooks clean."""
    mask = pairs.attention_mask
    clean = hooks.states(model, pairs.clean, mask, ["hook_embed", *names])
    embedded = clean.pop("hook_embed")
    size = method.noise * torch.cat([e[s] for e, s in zip(embedded, pairs.subject, strict=True)]).flatten().std()
    noise = size * torch.stack([draws(e, s, method) for e, s in zip(embedded, pairs.subject, strict=True)], dim=1)

    def put(name):
        def edit(act):
            act = act.clone()
            for fact, position in enumerate(at):
                act[fact, position] = clean[name][fact, position]
            return act

        return edit

    found = []
    for sample in noise:
        edits = [("hook_embed", lambda act, sample=sample: act + sample), *((name, put(name)) for name in names)]
        with hooks.edits(model, edits):
            found.append(metric_of(model, pairs.clean, pairs, probability))
    return torch.stack(found).mean(0)


def test_causal_tracing_equals_a_loop_of_noised_passes(any_model):
    pairs, nowhere = two_token_subjects("left"), [[]] * 3
    noised = restored(any_model, pairs, SLOW, [], nowhere)
    assert (metric_of(any_model, pairs.clean, pairs, probability) - noised).abs().max() > 1e-4
    components = some(any_model.components("mlp") + any_model.components("attn"), 3)
    values = SLOW.score(any_model, pairs, components, probability, False)
    last = [max(s.nonzero().flatten().tolist()) for s in pairs.subject]
    assert last_subject(pairs).tolist() == last
    for c, component in enumerate(components):
        names = [f"blocks.{i}.{SITES[component.kind]}" for i in window(component.layer, 2, 3)]
        expected = restored(any_model, pairs, SLOW, names, last) - noised
        assert (values[:, c] - expected).abs().max() < 1e-7, component


class Plain:
    """A Hugging Face llama of the same weights, in which plain torch hooks trace one prompt without padding."""

    def __init__(self, pairs, method, kind):
        self.model = ARCHITECTURES["llama"]().double()
        layers = self.model.model.layers
        self.modules = {"resid": list(layers), "mlp": [x.mlp for x in layers], "attn": [x.self_attn for x in layers]}
        self.pairs, self.method, self.modules = pairs, method, self.modules[kind]
        embedding = self.model.model.embed_tokens.weight.detach()
        self.size = method.noise * embedding[pairs.clean[pairs.subject]].std()

    @torch.no_grad()
    def run(self, fact, edits=()):
        """The metric, and what the modules gave out; edits: module → function of its output."""
        pairs, where = self.pairs, self.pairs.attention_mask[fact].nonzero().flatten()
        given = {}

        def hook(module, args, output):
            whole = output[0] if isinstance(output, tuple) else output
            new = dict(edits).get(module, lambda x: x)(whole)
            given[module] = new
            return (new, *output[1:]) if isinstance(output, tuple) else new

        some = [*self.modules, self.model.model.embed_tokens]
        handles = [module.register_forward_hook(hook) for module in some]
        logits = self.model(pairs.clean[fact, where][None]).logits[:, pairs.read[fact] - where[0]]
        for handle in handles:
            handle.remove()
        row = slice(fact, fact + 1)
        answers = Targets(pairs.answer[row], pairs.distractor[row], pairs.read_mask[row])
        return float(probability(logits, answers)), given

    def trace(self, fact, size):
        """m of the clean and of the noised run, and the effects [layer, pos], NaN at padding."""
        pairs, embed = self.pairs, self.model.model.embed_tokens
        where = pairs.attention_mask[fact].nonzero().flatten()
        clean, states = self.run(fact)
        effect = torch.full((len(self.modules), pairs.clean.shape[1]), torch.nan, dtype=torch.float64)
        noise = self.size * draws(states[embed][0], pairs.subject[fact, where], self.method)
        noised = np.mean([self.run(fact, [(embed, lambda x, n=n: x + n)])[0] for n in noise])
        for layer in range(len(self.modules)):
            for t, position in enumerate(where.tolist()):

                def put(module, t=t):
                    def edit(out):
                        out = out.clone()
                        out[:, t] = states[module][:, t]
                        return out

                    return edit

                held = [(self.modules[i], put(self.modules[i])) for i in window(layer, size, len(self.modules))]
                runs = [self.run(fact, [(embed, lambda x, n=n: x + n), *held])[0] for n in noise]
                effect[layer, position] = np.mean(runs) - noised
        return clean, noised, effect


@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_the_whole_trace_equals_plain_hooks_on_hugging_face(llama, kind):
    pairs = two_token_subjects("left")
    found = causal_trace(llama, pairs, SLOW, kind=kind, progress=False)
    plain = Plain(pairs, SLOW, kind)
    for fact in range(3):
        clean, noised, effect = plain.trace(fact, 1 if kind == "resid" else 2)
        assert float(found.clean[fact]) == pytest.approx(clean, abs=1e-8)
        assert float(found.corrupted[fact]) == pytest.approx(noised, abs=1e-8)
        assert torch.allclose(found.effect[fact], effect, atol=1e-7, rtol=0, equal_nan=True)
        assert effect.nan_to_num().abs().max() > 1e-4
        if kind == "resid" and not pairs.read_mask[fact, 1]:
            # The last state at the position that is read is all that the answer depends on.
            assert effect[-1, pairs.read[fact, 0]] == pytest.approx(clean - noised)


def test_a_trace_is_averaged_by_role(llama):
    pairs = two_token_subjects("left")
    found = causal_trace(llama, pairs, SLOW, progress=False)
    assert found.roles[0] == ("before", "first subject", "last subject", "first after", "further", "last")
    # The second fact is one token shorter and has a subject of one, which is then its last.
    assert found.roles[1] == ("", "before", "last subject", "first after", "further", "last")
    assert found.roles[2] == ("", "", "before", "first subject", "last subject", "last")
    frame = found.to_frame()
    assert len(frame) == 3 * (6 + 5 + 4) and not frame.effect.isna().any()
    row = frame[(frame.fact == found.facts[1]) & (frame.layer == 2) & (frame.role == "further")].iloc[0]
    assert row.token == found.tokens[1][4] and row.effect == float(found.effect[1, 2, 4])
    roles = found.by_role()
    expected = [float(found.effect[0, 1, 1]), float(found.effect[2, 1, 3])]
    assert roles.loc["first subject", 1] == pytest.approx(np.mean(expected))
    assert set(roles.index) == {"before", "first subject", "last subject", "first after", "further", "last"}


def test_the_noise_of_a_fact_does_not_depend_on_the_others(llama):
    """But for its size, which is that of all subjects together."""
    pairs = two_token_subjects(None)
    whole = causal_trace(llama, pairs, SLOW, progress=False)
    again = causal_trace(llama, pairs[torch.tensor([2, 0, 1])], SLOW, progress=False)
    assert torch.allclose(whole.effect[2], again.effect[0], atol=1e-9)


def layers_of(hf_model):
    return next(m for m in hf_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)


def masked(name, pairs, blocked, layers):
    """The metric of a plain Hugging Face model whose 4D additive mask hides some edges in some layers."""
    hf_model = ARCHITECTURES[name]().double()
    hf_model.set_attn_implementation("eager")
    if hasattr(hf_model, "set_experts_implementation"):
        hf_model.set_experts_implementation("eager")  # the others have no float64
    floor = torch.finfo(torch.float32).min / 2

    def hide(layer):
        def given(argument):
            if not isinstance(argument, torch.Tensor) or argument.ndim != 4:
                return argument
            mask = argument.clamp(min=floor)
            return mask.masked_fill(blocked[:, None], floor) if layer in layers else mask

        return lambda _, args, kwargs: (tuple(map(given, args)), {name: given(x) for name, x in kwargs.items()})

    for i, layer in enumerate(layers_of(hf_model)):
        layer.register_forward_pre_hook(hide(i), with_kwargs=True)
    positions = (pairs.attention_mask.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = hf_model(
            pairs.clean, attention_mask=pairs.attention_mask.long(), position_ids=positions, use_cache=False
        ).logits
    logits = logits.gather(1, pairs.read[:, :, None].expand(-1, -1, 97))
    return logit_difference(logits, Targets(pairs.answer, pairs.distractor, pairs.read_mask))


def blocked_by_hand(pairs, source):
    n, length = pairs.clean.shape
    out = torch.zeros(n, length, length, dtype=torch.bool)
    for fact in range(n):
        for query in [
            r for r, used in zip(pairs.read[fact].tolist(), pairs.read_mask[fact].tolist(), strict=True) if used
        ]:
            for key in range(query + 1):
                mine = {
                    "subject": bool(pairs.subject[fact, key]) and key != query,
                    "other": not pairs.subject[fact, key] and key != query,
                    "last": key == query,
                }[source]
                out[fact, query, key] = mine and bool(pairs.attention_mask[fact, key])
    return out


@pytest.mark.parametrize("source", ["subject", "other", "last"])
def test_attention_knockout_equals_a_4d_mask_given_to_hugging_face(any_model, source):
    model, name, pairs = any_model, any_model.name, two_token_subjects("left")
    blocked = blocked_by_hand(pairs, source)
    assert torch.equal(edges(pairs, source), blocked)
    clean = masked(name, pairs, blocked, ())
    blocks = model.components("attn")
    for size, layer in ((1, 0), (2, 2), (9, 1)):
        values = AttentionKnockout(source, size).score(model, pairs, blocks, logit_difference, False)
        expected = clean - masked(name, pairs, blocked, window(layer, size, 3))
        assert (values[:, layer] - expected).abs().max() < 2e-5, (size, layer)
        assert values.abs().max() > 1e-3


@pytest.mark.parametrize("source", ["subject", "last"])
def test_a_head_that_is_blocked_has_its_pattern_renormalized(any_model, source):
    pairs = two_token_subjects("right")
    heads, blocked = some(any_model.components("head"), 5), blocked_by_hand(pairs, source)
    values = AttentionKnockout(source, max_tokens=60).score(any_model, pairs, heads, logit_difference, False)
    clean = metric_of(any_model, pairs.clean, pairs)
    for c, head in enumerate(heads):

        def edit(pattern, head=head):
            pattern = pattern.clone()
            mine = pattern[:, head.index].masked_fill(blocked, 0)
            pattern[:, head.index] = mine / mine.sum(-1, keepdim=True)
            return pattern

        with hooks.edits(any_model, [(f"blocks.{head.layer}.attn.hook_pattern", edit)]):
            expected = clean - metric_of(any_model, pairs.clean, pairs)
        assert (values[:, c] - expected).abs().max() < 2e-5, head


def test_the_curve_is_the_score_in_per_cent(llama):
    pairs = two_token_subjects(None)
    curve = attention_curve(llama, pairs, sources=("subject", "last"), window=2, progress=False)
    clean = metric_of(llama, pairs.clean, pairs, probability)
    assert len(curve) == 2 * 3 * 3
    for source, rows in curve.groupby("source"):
        scores = localize(
            llama, pairs, AttentionKnockout(source, 2), components="attn", metric=probability, progress=False
        ).values
        for fact in range(3):
            some = rows[rows.fact == pairs.facts[fact].prompt].sort_values("layer")
            expected = -100 * scores[fact].double() / clean[fact]
            assert some.change.to_list() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-4)


def test_bad_requests_say_the_way_out(llama):
    pairs = contrast_pairs()
    for wrong in ({"noise": 0.0}, {"samples": 0}, {"window": 0}):
        with pytest.raises(ValueError, match="noise above 0 and at least one sample and one layer"):
            CausalTracing(**wrong)
    with pytest.raises(ValueError, match="restores resid, mlp, attn, not 'head'"):
        causal_trace(llama, pairs, kind="head", progress=False)
    with pytest.raises(ValueError, match="blocks subject, other, last, not 'all'"):
        AttentionKnockout("all")
    with pytest.raises(ValueError, match="window of at least one layer, got 0"):
        AttentionKnockout(window=0)
    first = dataclasses.replace(pairs, read=torch.zeros_like(pairs.read))
    with pytest.raises(ValueError, match="attend to nothing"):
        AttentionKnockout("last").score(llama, first, llama.components("head"), logit_difference, False)
