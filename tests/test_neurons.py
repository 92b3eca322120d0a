import pytest
import torch
import transformers as hf
from helpers import _GROUPED, ARCHITECTURES, _random, contrast_pairs, tokenizer
from test_localize import metric_of

from locus import hooks
from locus.components import Component, Components
from locus.cost import passes
from locus.localize import ActivationPatching, Knockout
from locus.metrics import logit_difference
from locus.models import wrap
from locus.sweeps import ablated

DENSE = [name for name in ARCHITECTURES if name not in ("mixtral", "olmoe")]
OUTPUT = ("mlp.c_proj", "mlp.dense_4h_to_h", "mlp.down_proj")  # what Hugging Face calls the neurons' output


def chosen(model, *places):
    return Components(
        tuple(Component(layer, "neuron", index) for layer, index in places),
        torch.ones(len(places), dtype=torch.long),
        model.fingerprint,
    )


SOME = ((0, 0), (0, 7), (1, 3), (1, 40), (2, 5), (2, 47))


def loop(run_model, outputs, pairs, neurons, ablation="zero", positions="all"):
    """The obviously right twin: one unpadded prompt a forward pass, and torch's hooks on the output matrices."""
    real = [mask.nonzero().flatten() for mask in pairs.attention_mask]

    def run(i, layer=None, edit=None):
        handle = outputs[layer].register_forward_pre_hook(lambda _, args: edit(args[0])) if edit else None
        with torch.no_grad():
            logits = run_model(pairs.clean[i][real[i]][None])[0]
        if handle:
            handle.remove()
        read = pairs.read[i][pairs.read_mask[i]] - real[i][0]
        return (
            (logits[read].gather(1, pairs.answer[i][pairs.read_mask[i], None]))
            - logits[read].gather(1, pairs.distractor[i][pairs.read_mask[i], None])
        ).mean()

    post = torch.zeros(len(outputs), *pairs.clean.shape, outputs[0].weight.numel() // 32)
    post = post.double()
    for layer in range(len(outputs)):
        for i in range(len(pairs)):

            def keep(x, layer=layer, i=i):
                post[layer, i, real[i]] = x[0]

            run(i, layer, keep)
    values = torch.zeros(len(pairs), len(neurons), dtype=torch.float64)
    for c, neuron in enumerate(neurons):
        new = ablated(post[neuron.layer], pairs.attention_mask, ablation)
        for i in range(len(pairs)):
            subject = pairs.subject[i].nonzero().flatten()
            at = {"all": real[i], "subject": subject, "last subject": subject[-1:], "last": pairs.read[i, :1]}[
                positions
            ]

            def put(x, neuron=neuron, new=new, i=i, at=at):
                x = x.clone()
                x[0, at - real[i][0], neuron.index] = new[i, at, neuron.index]
                return (x,)

            values[i, c] = run(i) - run(i, neuron.layer, put)
    return values


def own(model):
    return model.logits, [block.mlp.out.original_component for block in model.bridge.blocks]


def hugging_face(name):
    hf_model = ARCHITECTURES[name]().double()
    outputs = [m for n, m in hf_model.named_modules() if n.endswith(OUTPUT)]
    return lambda tokens: hf_model(tokens, use_cache=False).logits, outputs


@pytest.mark.parametrize(
    ("any_model", "padding", "positions"),
    [(name, padding, at) for name in DENSE for padding, at in ((None, "last"), ("left", "subject"), ("right", "all"))],
    indirect=["any_model"],
)
def test_knockouts_equal_a_loop_of_hooked_forwards(any_model, padding, positions, monkeypatch):
    pairs, neurons = contrast_pairs(padding=padding), chosen(any_model, *SOME)
    expected = loop(*own(any_model), pairs, neurons, positions=positions)
    with passes(any_model, 6) as cost:
        found = Knockout(positions=positions).score(any_model, pairs, neurons, logit_difference, False)
    assert (found - expected).abs().max() < 1e-9 and expected.abs().max() > 1e-3
    # Two passes for the run itself, one prompt's for the check, and two neurons' through layer 1 and two through 2.
    assert cost.forward <= 3 + 3 + 1 + 3 * (2 * 2 + 2 * 1) / 3 + 1e-6
    theirs = loop(*hugging_face(any_model.name), pairs, neurons, positions=positions)
    assert (found - theirs).abs().max() < max(1e-9, 10 * any_model.parity)  # which computes some parts in float32
    monkeypatch.setattr(any_model, "packed", False)
    whole = Knockout(positions=positions, max_tokens=1).score(any_model, pairs, neurons, logit_difference, False)
    assert (whole - expected).abs().max() < 1e-9


@pytest.mark.parametrize(("ablation", "positions"), [("mean", "all"), ("resample", "last subject")])
@pytest.mark.parametrize("any_model", ["llama", "gemma2"], indirect=True)
def test_other_ablations_equal_the_loop(any_model, ablation, positions):
    pairs, neurons = contrast_pairs(), chosen(any_model, *SOME)
    method = Knockout(ablation, positions=positions, max_tokens=20)
    found = method.score(any_model, pairs, neurons, logit_difference, False)
    assert (found - loop(*own(any_model), pairs, neurons, ablation, positions)).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["head", "mlp", "value", "neuron"])
def test_one_position_at_a_time_is_an_edit_there(llama, kind):
    """All kinds: what is left of a knockout elsewhere is nothing."""
    pairs, parts = contrast_pairs(padding="left"), llama.components(kind)
    for positions, at in (("subject", pairs.subject), ("all", pairs.attention_mask)):
        found = Knockout(positions=positions).score(llama, pairs, parts, logit_difference, False)
        for c in (0, len(parts) - 1):
            part = parts[c]
            name = {"head": "attn.hook_z", "mlp": "hook_mlp_out"}.get(kind, "mlp.hook_post")

            def edit(x, part=part, at=at):
                x, index = x.clone(), slice(None) if part.index is None else part.index
                x[:, :, index] = torch.where(at[:, :, *[None] * (x[:, :, index].ndim - 2)], 0, x[:, :, index])
                return x

            values = []
            for edits in ([], [(f"blocks.{part.layer}.{name}", edit)]):
                with torch.no_grad(), hooks.edits(llama, edits), hooks.read_only(llama, pairs.read):
                    logits = llama.logits(pairs.clean, pairs.attention_mask)
                values.append(logit_difference(logits, _targets(pairs)))
            assert (found[:, c] - (values[0] - values[1])).abs().max() < 1e-9


def _targets(pairs):
    from locus.localize.interventions import targets

    return targets(pairs)


def test_patching_takes_the_short_way_too(llama):
    """Several kinds at once, and both ways of one model: each column is what it is alone."""
    pairs = contrast_pairs()
    both = llama.components("mlp") + chosen(llama, *SOME)
    together = ActivationPatching().score(llama, pairs, both, logit_difference, False)
    for part in (llama.components("mlp"), chosen(llama, *SOME)):
        alone = ActivationPatching().score(llama, pairs, part, logit_difference, False)
        assert (together[:, [both.items.index(c) for c in part]] - alone).abs().max() < 1e-12


def test_where_an_mlp_is_not_just_added_it_is_run_and_said(llama, monkeypatch, capsys):
    pairs, neurons = contrast_pairs(), chosen(llama, *SOME)
    fast = Knockout().score(llama, pairs, neurons, logit_difference, False)
    monkeypatch.setattr(llama, "name", "a model that halves what its second MLP writes")
    point = llama.bridge.hook_dict["blocks.1.mlp.hook_out"]
    handle = point.register_forward_hook(lambda module, args, x: x / 2)
    try:
        found = Knockout().score(llama, pairs, neurons, logit_difference, False)
        values = []
        for neuron in neurons:

            def off(x, neuron=neuron):
                return x * (torch.arange(x.shape[-1]) != neuron.index)

            name = f"blocks.{neuron.layer}.mlp.hook_post"
            for edits in ([], [(name, off)]):
                with torch.no_grad(), hooks.edits(llama, edits), hooks.read_only(llama, pairs.read):
                    values.append(logit_difference(llama.logits(pairs.clean), _targets(pairs)))
    finally:
        handle.remove()
    expected = torch.stack([a - b for a, b in zip(values[::2], values[1::2], strict=True)], dim=1)
    assert (found - expected).abs().max() < 1e-9 and (found - fast).abs().max() > 1e-4
    assert "its MLP is run for each" in capsys.readouterr().err


def test_positions_are_named(llama):
    with pytest.raises(ValueError, match="positions must be 'all', 'subject', 'last subject', 'last', got 'first'"):
        Knockout(positions="first")
    assert Knockout(positions="last").KINDS == Knockout.KINDS


def test_a_block_that_scales_its_mlp_is_run_whole_whatever_the_size_of_the_stream():
    """Granite adds 0.22 times its MLP's output; one enormous entry of the stream must not hide that."""
    model = _random(hf.GraniteForCausalLM, hf.GraniteConfig, **{**_GROUPED, "residual_multiplier": 0.22}).double()
    model.model.embed_tokens.weight.data[3, 5] += 3000
    granite, pairs = wrap(model, tokenizer(), "granite"), contrast_pairs()
    pairs.clean[:, 0] = pairs.corrupted[:, 0] = 3
    neurons = granite.components("neuron")
    found = Knockout(positions="last").score(granite, pairs, neurons, logit_difference, False)
    at, name = pairs.read[:, 0], "blocks.1.mlp.hook_post"
    before = metric_of(granite, pairs.clean, pairs)
    for index in (3, 20):

        def removed(act, index=index):
            act = act.clone()
            act[torch.arange(len(at)), at, index] = 0
            return act

        with hooks.edits(granite, [(name, removed)]):
            expected = before - metric_of(granite, pairs.clean, pairs)
        assert (found[:, 48 + index] - expected).abs().max() < 1e-6
