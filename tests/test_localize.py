import dataclasses

import pytest
import torch
from helpers import LOCALIZERS, contrast_pairs, localizers
from test_components import kinds, zeroed

from locus import hooks
from locus.components import Components, site
from locus.cost import passes
from locus.localize import (
    METHODS,
    ActivationPatching,
    Activations,
    AttributionPatching,
    Knockout,
    Random,
    attribution,
    localize,
)
from locus.localize.interventions import activations, hook_names, targets
from locus.metrics import log_probability, logit_difference


def some(components, n=4):
    """A few components spread over the model."""
    chosen = torch.linspace(0, len(components) - 1, min(n, len(components))).long().unique()
    return Components(tuple(components[i] for i in chosen), components.sizes[chosen], components.model)


def metric_of(model, tokens, pairs, metric=logit_difference):
    with torch.no_grad():
        logits = model.logits(tokens, pairs.attention_mask)
    read = pairs.read[:, :, None].expand(-1, -1, logits.shape[-1])
    return metric(logits.gather(1, read), targets(pairs))


def replaced(model, base, pairs, component, replacement):
    """The obviously right twin of every intervention: one hooked forward pass for one component."""

    def put(name):
        def edit(act):
            shape = act.shape
            act = act.clone().reshape(replacement[name].shape)
            if component.index is None:
                return replacement[name].reshape(shape)
            if component.kind in ("head", "kv"):
                act[:, :, component.index] = replacement[name][:, :, component.index]
            else:
                act[..., component.index] = replacement[name][..., component.index]
            return act.reshape(shape)

        return edit

    with hooks.edits(model, [(name, put(name)) for name in hook_names(component)]):
        return metric_of(model, base, pairs)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_interventions_equal_one_hooked_pass_each(any_model, padding):
    pairs = contrast_pairs(padding=padding)
    clean, corrupted = metric_of(any_model, pairs.clean, pairs), metric_of(any_model, pairs.corrupted, pairs)
    for kind in kinds(any_model):
        components = some(any_model.components(kind))
        from_clean = activations(any_model, pairs.clean, pairs.attention_mask, components)
        from_corrupted = activations(any_model, pairs.corrupted, pairs.attention_mask, components)
        zeros = {name: torch.zeros_like(act) for name, act in from_clean.items()}
        expected = {
            "denoising": lambda c, f=from_clean: replaced(any_model, pairs.corrupted, pairs, c, f) - corrupted,
            "noising": lambda c, f=from_corrupted: clean - replaced(any_model, pairs.clean, pairs, c, f),
            "zero": lambda c, f=zeros: clean - replaced(any_model, pairs.clean, pairs, c, f),
        }
        methods = {
            "denoising": ActivationPatching("denoising", max_tokens=40),
            "noising": ActivationPatching("noising"),
            "zero": Knockout("zero", max_tokens=1),
        }
        for name, method in methods.items():
            values = method.score(any_model, pairs, components, logit_difference, False)
            slow = torch.stack([expected[name](c) for c in components], dim=1)
            assert (values - slow).abs().max() < 1e-9, (kind, name)


def test_attribution_is_the_slope_of_patching(any_model):
    """c(u) = d/dε of the metric when u moves by ε (clean - corrupted), by central differences."""
    pairs = contrast_pairs(padding="left")
    for kind in ("head", "kv", "neuron", "mlp", "attn"):
        if kind not in kinds(any_model):
            continue
        components = some(any_model.components(kind))
        values = AttributionPatching().score(any_model, pairs, components, logit_difference, False)
        source = activations(any_model, pairs.clean, pairs.attention_mask, components)
        here = activations(any_model, pairs.corrupted, pairs.attention_mask, components)
        for i, component in enumerate(components):
            at = []
            # Softmax is taken in float32, so the step must not be too small; nor so large that a router switches.
            for eps in (1e-3, -1e-3):
                moved = {n: here[n] + eps * (source[n] - here[n]) for n in hook_names(component)}
                at.append(replaced(any_model, pairs.corrupted, pairs, component, moved))
            slope = (at[0] - at[1]) / 2e-3
            assert torch.allclose(values[:, i], slope, rtol=2e-2, atol=1e-3), component


def test_attribution_equals_captum(llama):
    """Against an independent implementation: captum's gradient at the MLP's hidden units × difference."""
    captum = pytest.importorskip("captum.attr")
    pairs = contrast_pairs()
    values = (
        AttributionPatching("noising")
        .score(llama, pairs, llama.components("neuron"), logit_difference, False)
        .reshape(3, 3, -1)
    )
    read = pairs.read[:, :, None].expand(-1, -1, 97)

    def forward(tokens):
        return logit_difference(llama.logits(tokens).gather(1, read), targets(pairs))

    for layer in range(3):
        gradient = captum.LayerGradientXActivation(
            forward, llama.bridge.blocks[layer].mlp.out, multiply_by_inputs=False
        ).attribute(pairs.clean, attribute_to_layer_input=True)
        name = f"blocks.{layer}.mlp.hook_post"
        found = []
        for tokens in (pairs.clean, pairs.corrupted):
            with torch.no_grad(), hooks.capture(llama, [name]) as activation:
                llama.logits(tokens)
            found.append(activation[name])
        expected = ((found[0] - found[1]) * gradient).sum(1)
        assert (values[:, layer] - expected).abs().max() < 1e-6


def test_batches_of_pairs_do_not_change_attribution(llama):
    pairs = contrast_pairs(5, padding="right")
    components = llama.components("head")
    whole = AttributionPatching().score(llama, pairs, components, logit_difference, False)
    parts = AttributionPatching(batch_size=2).score(llama, pairs, components, logit_difference, False)
    assert (whole - parts).abs().max() < 1e-9


@pytest.mark.parametrize("padding", ["left", "right"])
def test_every_way_of_attribution_gives_the_same(any_model, padding, monkeypatch):
    """Both runs in one pass, one after the other, and layer by layer."""
    pairs = contrast_pairs(padding=padding)
    for kind in ("head", "kv", "neuron", "mlp"):
        if kind not in kinds(any_model):
            continue
        components = some(any_model.components(kind), 9)
        arguments = (any_model, pairs, components, logit_difference, False)
        both = AttributionPatching("noising").score(*arguments)
        with passes(any_model, 6) as cost:
            layered = AttributionPatching("noising", recompute=True).score(*arguments)
        assert cost.backward == pytest.approx(3) and cost.forward == pytest.approx(4 * 3)
        with monkeypatch.context() as patch:
            patch.setattr(attribution, "JOINED", 0)
            apart = AttributionPatching("noising").score(*arguments)
        assert max((both - apart).abs().max(), (layered - apart).abs().max()) < 1e-9 and apart.std() > 0


def test_attribution_takes_two_passes_forward_and_one_back(llama):
    """Without gradients of parameters, and with logits where they are read only."""
    pairs, unembedded = contrast_pairs(6), []
    handle = llama.bridge.unembed.register_forward_hook(lambda _, args, logits: unembedded.append(logits.shape[1]))
    try:
        with passes(llama, 6) as cost:
            AttributionPatching().score(llama, pairs, llama.components("neuron"), logit_difference, False)
    finally:
        handle.remove()
    assert cost.forward == pytest.approx(2 * 6) and cost.backward == pytest.approx(6)
    assert sorted(unembedded) == [0, 2] and all(p.grad is None for p in llama.weights.values())


@pytest.mark.parametrize("name", LOCALIZERS)
def test_every_localizer_keeps_its_promises(llama, name):
    method, pairs = localizers()[name], contrast_pairs()
    before, asked = hooks.count(llama), [p.requires_grad for p in llama.weights.values()]
    for kind in method.KINDS:
        if kind not in kinds(llama):
            continue
        scores = localize(llama, pairs, method, components=kind, metric=log_probability, progress=False)
        again = localize(llama, pairs, method, components=kind, metric=log_probability, progress=False)
        assert scores.values.shape == (3, len(llama.components(kind)))
        assert torch.equal(scores.values, again.values)
        assert scores.values.std() > 0
        assert scores.metric == "log_probability" and scores.method == method
    assert hooks.count(llama) == before
    assert [p.requires_grad for p in llama.weights.values()] == asked
    with pytest.raises(ValueError, match="no component of kind 'expert'"):
        localize(llama, pairs, method, components="expert")
    for field in {"batch_size", "max_tokens"} & {f.name for f in dataclasses.fields(method)}:
        with pytest.raises(ValueError, match=f"{field}.*0"):
            localize(llama, pairs, dataclasses.replace(method, **{field: 0}), components=method.KINDS[0])


def test_the_list_of_methods_is_whole():
    assert {type(m) for m in localizers().values()} == set(METHODS)


def test_a_planted_fact_is_found(llama):
    """One neuron is made to carry the difference of the two prompts: patching and its estimate rank it first."""
    name = "model.layers.1.mlp.down_proj.weight"
    kept = llama.weights[name].detach().clone()
    direction = llama.weights["model.embed_tokens.weight"]
    pairs = contrast_pairs()
    try:
        # The answer's direction is written by the neuron that differs most between the prompts.
        act = activations(llama, pairs.clean, pairs.attention_mask, llama.components("neuron"))
        other = activations(llama, pairs.corrupted, pairs.attention_mask, llama.components("neuron"))
        site_name = "blocks.1.mlp.hook_post"
        rows = torch.arange(3)
        change = (act[site_name] - other[site_name])[rows, pairs.read[:, 0]]
        neuron = int(change.abs().min(0).values.argmax())
        planted = kept.clone()
        sign = change[:, neuron].mean().sign()
        planted[:, neuron] += 30 * sign * (direction[5] - direction[6]).detach()
        llama.write(name, planted)
        for method in (ActivationPatching(), AttributionPatching()):
            scores = localize(llama, pairs, method, components="neuron", progress=False)
            best = scores.components[int(scores.mean().abs().argmax())]
            assert (best.layer, best.index) == (1, neuron), method
        random = localize(llama, pairs, Random(), components="neuron", progress=False)
        best = random.components[int(random.mean().argmax())]
        assert (best.layer, best.index) != (1, neuron)
    finally:
        llama.write(name, kept)


def test_bad_requests_say_the_way_out(llama):
    pairs = contrast_pairs()
    with pytest.raises(ValueError, match="does not score components of kind 'head'"):
        localize(llama, pairs, Activations(), components="head")
    with pytest.raises(ValueError, match="the only one of"):
        localize(llama, pairs[:1], Knockout("resample"), components="head", progress=False)
    for method in (ActivationPatching, Knockout, AttributionPatching):
        with pytest.raises(ValueError, match="must be 'denoising'|must be 'zero'"):
            method("sideways")
    heads = llama.components("head")
    foreign = dataclasses.replace(heads, model="another")
    with pytest.raises(ValueError, match="belong to model another"):
        localize(llama, pairs, Random(), components=foreign)


def test_site_of_every_kind_exists(any_model):
    for kind in kinds(any_model):
        for component in (any_model.components(kind)[0], any_model.components(kind)[-1]):
            assert site(component) in any_model.bridge.hook_dict
    assert zeroed(torch.ones(1, 2, 3, 4), next(iter(any_model.components("head")))).sum() == 16


def test_resample_takes_nothing_from_padding(llama):
    padded = contrast_pairs(6, "right")
    with pytest.raises(ValueError, match="the only one of"):
        localize(llama, padded[:3], Knockout("resample"), components="head", progress=False)


def test_a_metric_that_averages_over_facts_is_refused(llama):
    for metric in (lambda logits, t: logits.mean(), lambda logits, t: 1.0):
        with pytest.raises(ValueError, match="one value for each of"):
            localize(llama, contrast_pairs(3), ActivationPatching(), metric=metric, components="mlp", progress=False)


def test_a_model_in_training_mode_and_an_empty_list_are_refused(llama):
    pairs, heads = contrast_pairs(), llama.components("head")
    nothing = Components((), torch.zeros(0, dtype=torch.long), llama.fingerprint)
    with pytest.raises(ValueError, match="no components"):
        localize(llama, pairs, AttributionPatching(), components=nothing)
    with pytest.raises(ValueError, match=r"give one, e\.g\. AttributionPatching\(\)"):
        localize(llama, pairs, AttributionPatching, components=heads)
    llama.bridge.original_model.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            localize(llama, pairs, AttributionPatching(), components=heads)
    finally:
        llama.bridge.original_model.eval()
    with torch.inference_mode(), pytest.raises(ValueError, match="no_grad"):
        localize(llama, pairs, AttributionPatching(), components=heads)
    with pytest.raises(ValueError, match="no gradient"):
        localize(
            llama, pairs, AttributionPatching(), components=heads, metric=lambda logits, _: torch.ones(len(logits))
        )
