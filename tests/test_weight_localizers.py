import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ARCHITECTURES, contrast_pairs
from small import facts as small_facts
from small import model as small_model
from test_components import kinds
from test_localize import metric_of, some
from torch import nn
from transformers.pytorch_utils import Conv1D

from locus import controlled, hooks
from locus.components import Components, owned, slices, totals
from locus.entries import ParameterMask, matrices
from locus.facts import Fact, Facts, FactSplit, encode
from locus.inject import region
from locus.localize import (
    SNIP,
    WAGLE,
    AttributionPatching,
    Fisher,
    GradientSaliency,
    Knockout,
    Magnitude,
    MemFlex,
    Wanda,
    given,
    localize,
    localize_weights,
)
from locus.localize.weights import Texts, clean_texts, fact_texts, gradient, random_labels
from locus.metrics import log_probability, logit_difference
from locus.plans import Plan, Planting
from locus.scores import Scores
from locus.unlearn import NPO, AdamW, unlearn

KEPT = Facts([Fact(f"w{i}", "relation", f"w{i} w51", f"w{i + 20} w6{i}") for i in range(5)])


def close(a, b, scale=None):
    """Equal to 2e-6 of the largest: plain Hugging Face takes softmax and rotary angles in float32."""
    return (a - b).abs().max() < 2e-6 * (b if scale is None else scale).abs().max()


def plain_metric(hf_model, tokens, mask, read, answer, keep):
    """log_probability of one fact, alone and without padding, on the plain Hugging Face model."""
    log_p = hf_model(tokens[mask][None], use_cache=False).logits[0].log_softmax(-1)
    first = int(mask.nonzero()[0])
    picked = [log_p[int(at) - first, int(token)] for at, token, ok in zip(read, answer, keep, strict=True) if ok]
    return torch.stack(picked).mean()


def plain_gradients(hf_model, texts):
    """∂/∂θ of each text's metric by Hugging Face names, one text at a time."""
    found = []
    t = texts.targets
    for row in zip(texts.tokens, texts.attention_mask, texts.read, t.answer, t.mask, strict=True):
        hf_model.zero_grad()
        plain_metric(hf_model, *row).backward()
        found.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in hf_model.named_parameters()}
        )
    return found


def summed(model, entries, components):
    """The obviously right twin of `totals`: every component's own slices."""
    return torch.stack([sum(entries[n][i].sum() for n, i in slices(model, c).items()) for c in components])


def test_scores_equal_autograd_on_the_plain_model(any_model):
    equal_to_autograd(any_model, "left")


@pytest.mark.parametrize("padding", [None, "right"])
def test_scores_equal_autograd_however_padded(llama, padding):
    equal_to_autograd(llama, padding)


def equal_to_autograd(any_model, padding):
    plain = ARCHITECTURES[any_model.name]().double()
    if any_model.name in ("mixtral", "olmoe"):
        plain.set_experts_implementation("eager")
    pairs = contrast_pairs(padding=padding)
    weights = dict(plain.named_parameters())
    each, kept = plain_gradients(plain, clean_texts(pairs)), plain_gradients(plain, fact_texts(any_model, KEPT))
    g_r = {name: -sum(g[name] for g in kept) / len(kept) for name in weights}
    expected = {
        GradientSaliency(): lambda g: {n: g[n].abs() for n in g},
        SNIP(): lambda g: {n: (weights[n] * g[n]).abs() for n in g},
        SNIP(signed=True): lambda g: {n: weights[n] * g[n] for n in g},
        Fisher(): lambda g: {n: g[n] ** 2 for n in g},
        WAGLE(KEPT, gamma=0.5): lambda g: {n: ((weights[n] - g_r[n] / 0.5) * -g[n]).abs() for n in g},
        Magnitude(): lambda g: {n: weights[n].abs() for n in g},
    }
    mean = {name: sum(g[name] for g in each) / 3 for name in weights}
    for kind in kinds(any_model):
        components = some(any_model.components(kind))
        size = torch.stack([summed(any_model, expected[SNIP()](g), components) for g in each]).detach()
        for method, of in expected.items():
            values = method.score(any_model, pairs, components, log_probability, False)
            slow = torch.stack([summed(any_model, of(g), components) for g in each]).detach()
            assert close(values, slow, size if method == SNIP(signed=True) else None), (kind, method)
        pooled = GradientSaliency(pooled=True).score(any_model, pairs, components, log_probability, False)
        slow = summed(any_model, {n: mean[n].abs() for n in mean}, components)
        assert close(pooled, slow), kind


def test_signed_snip_is_the_slope_of_shrinking_weights(any_model):
    """Σ θ ∂m/∂θ = d/dε m(θ (1 + ε) at the component's entries), by central differences."""
    pairs = contrast_pairs(padding="left")
    for kind in kinds(any_model):
        components = some(any_model.components(kind), 2)
        values = SNIP(signed=True).score(any_model, pairs, components, logit_difference, False)
        for i, component in enumerate(components):
            at = []
            for eps in (1e-3, -1e-3):
                kept = {name: any_model.stored(name) for name in slices(any_model, component)}
                try:
                    for name, index in slices(any_model, component).items():
                        moved = kept[name].clone()
                        moved[index] *= 1 + eps
                        any_model.write(name, moved)
                    at.append(metric_of(any_model, pairs.clean, pairs))
                finally:
                    for name, tensor in kept.items():
                        any_model.write(name, tensor)
            assert torch.allclose(values[:, i], (at[0] - at[1]) / 2e-3, rtol=2e-2, atol=1e-3), component


def test_wanda_equals_hooks_on_the_plain_model(any_model):
    if any_model.name in ("mixtral", "olmoe"):
        with pytest.raises(ValueError, match="read by none"):
            Wanda().score(any_model, contrast_pairs(), any_model.components("mlp"), log_probability, False)
        return
    plain, pairs = ARCHITECTURES[any_model.name]().double(), contrast_pairs(padding="left")
    found = []
    for tokens, mask in zip(pairs.clean, pairs.attention_mask, strict=True):
        entries = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}

        def keep(name, module, x, entries=entries):
            norm = x[0].flatten(0, -2).pow(2).sum(0).sqrt()
            weight = module.weight.abs()
            entries[f"{name}.weight"] = weight * (norm[:, None] if isinstance(module, Conv1D) else norm)

        linears = {n: m for n, m in plain.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        handles = [m.register_forward_pre_hook(lambda m, x, n=n, keep=keep: keep(n, m, x)) for n, m in linears.items()]
        with torch.no_grad():
            plain(tokens[mask][None])
        for handle in handles:
            handle.remove()
        found.append(entries)
    for kind in kinds(any_model):
        components = some(any_model.components(kind))
        values = Wanda().score(any_model, pairs, components, log_probability, False)
        slow = torch.stack([summed(any_model, entries, components) for entries in found]).detach()
        assert close(values, slow), kind


def test_totals_of_all_components_are_those_of_each(any_model):
    entries = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in any_model.weights.items()}
    mixed = any_model.components("attn") + some(any_model.components("mlp"))
    for components in [any_model.components(kind) for kind in kinds(any_model)] + [mixed]:
        backwards = Components(components.items[::-1], components.sizes.flip(0), components.model)
        for some_ in (components, backwards):
            assert (totals(any_model, entries, some_) - summed(any_model, entries, some_)).abs().max() < 1e-9
        assert set(owned(any_model, components)) == {n for c in components for n in slices(any_model, c)}
        ones = totals(any_model, {n: torch.ones_like(e) for n, e in entries.items()}, components)
        assert torch.equal(ones.long(), components.sizes)


def test_memflex_equals_its_definition(llama):
    method = MemFlex(KEPT, mu=0.05, copies=3, seed=4)
    pairs = contrast_pairs(padding="right")
    for kind in ("value", "head", "mlp"):
        components = llama.components(kind)
        values = method.score(llama, pairs, components, log_probability, False)
        plain = ARCHITECTURES["llama"]().double()

        def mean_gradient(texts, plain=plain):
            generator = torch.Generator().manual_seed(4)
            drawn = [plain_gradients(plain, random_labels(texts, 97, generator)) for _ in range(3)]
            flat = [g for copy in drawn for g in copy]
            return {n: sum(g[n] for g in flat) / len(flat) for n in flat[0]}

        kept, expected = mean_gradient(fact_texts(llama, KEPT)), []
        for row in range(3):
            found = mean_gradient(clean_texts(pairs[row : row + 1]))
            for component in components:
                owns = slices(llama, component).items()
                a, b = (torch.cat([g[n][i].flatten() for n, i in owns]) for g in (found, kept))
                entangled = nn.functional.cosine_similarity(a, b, dim=0) >= 0.05
                expected.append(0.0 if entangled else float(a.abs().mean()))
        expected = torch.tensor(expected, dtype=torch.float64).reshape(3, -1)
        assert close(values, expected)
        if kind != "mlp":
            assert 0 < (expected == 0).float().mean() < 1


def test_random_labels_replace_half_of_an_answer_in_text_and_targets():
    model = small_model()
    long = Facts([Fact("w1", "r", "w1 w50", " ".join(f"w{i}" for i in range(60, 68))), KEPT[0]])
    texts = fact_texts(model, long)
    seen = []
    for seed in range(20):
        labels = random_labels(texts, 97, torch.Generator().manual_seed(seed))
        changed = labels.targets.answer != texts.targets.answer
        assert (labels.targets.mask == texts.targets.mask).all() and not (changed & ~texts.targets.mask).any()
        seen.append(int(changed[0].sum()))
        # What is read off is what is in the text, and the prompt is untouched.
        for row in range(2):
            n = int(texts.targets.mask[row].sum())
            at = texts.read[row, :n] + 1
            assert torch.equal(labels.tokens[row, at], labels.targets.answer[row, :n])
            assert torch.equal(labels.tokens[row, : at[0]], texts.tokens[row, : at[0]])
    assert max(seen) == 4 and min(seen) >= 1
    # Where the answer's token is not in the text, the text stays.
    pairs = contrast_pairs()
    assert torch.equal(random_labels(clean_texts(pairs), 97, torch.Generator().manual_seed(0)).tokens, pairs.clean)


@pytest.mark.parametrize(
    "method",
    [GradientSaliency(), SNIP(signed=True), Fisher(), WAGLE(KEPT), MemFlex(KEPT, copies=2), Wanda(), Magnitude()],
    ids=lambda m: type(m).__name__,
)
def test_facts_do_not_mix_and_nothing_moves(llama, method):
    pairs, components = contrast_pairs(4, padding="left"), llama.components("value")
    before, registered = {name: p.detach().clone() for name, p in llama.weights.items()}, hooks.count(llama)
    llama.weights["model.norm.weight"].requires_grad_(False)
    asked = {name: p.requires_grad for name, p in llama.weights.items()}
    try:
        together = method.score(llama, pairs, components, log_probability, False)
        alone = torch.cat([method.score(llama, pairs[i : i + 1], components, log_probability, False) for i in range(4)])
        assert (together - alone).abs().max() < 1e-9 * max(1, float(alone.abs().max()))
        with pytest.raises(ZeroDivisionError):
            method.score(llama, pairs, components, lambda logits, t: 1 / 0, False)
            raise ZeroDivisionError  # of a method that reads no metric
        assert {name: p.requires_grad for name, p in llama.weights.items()} == asked
    finally:
        llama.weights["model.norm.weight"].requires_grad_(True)
    assert hooks.count(llama) == registered
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in llama.weights.items())


def test_the_mean_over_batches_is_the_mean(llama, monkeypatch):
    texts, names = clean_texts(contrast_pairs(5, padding="right")), list(llama.weights)
    whole = gradient(llama, texts, names, log_probability)
    monkeypatch.setattr(sys.modules["locus.localize.weights"], "BATCH", 2)
    parts = gradient(llama, texts, names, log_probability)
    assert max((whole[n] - parts[n]).abs().max() for n in names) < 1e-12


def split_of_small():
    found = small_facts()
    return FactSplit(forget=found[:6], retain=found[10:20], holdout=Facts(), other=Facts(), seed=0)


@pytest.mark.parametrize("select", ["top", "bottom"])
def test_single_weights_are_the_best_of_one_ranking(select):
    model, split = small_model(), split_of_small()
    mask = localize_weights(model, split, GradientSaliency(pooled=True), budget=0.03, select=select)
    batch = encode(model, split.forget)
    names = matrices(model)
    with torch.enable_grad():
        log_p = model.logits(batch.tokens, batch.attention_mask)[:, :-1].log_softmax(-1)
        picked = log_p.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        keep = batch.answer_mask[:, 1:]
        loss = -((picked * keep).sum(-1) / keep.sum(-1)).mean()
        grads = torch.autograd.grad(loss, [model.weights[n] for n in names])
    flat = torch.cat([g.abs().flatten() for g in grads])
    chosen = torch.cat([mask[n].flatten() if n in mask else torch.zeros(model.weights[n].numel()) > 0 for n in names])
    like = ParameterMask.random(model, budget=0.03, seed=0)
    assert mask.n_parameters == like.n_parameters == sum(math.floor(0.03 * model.weights[n].numel()) for n in names)
    inside, outside = flat[chosen], flat[~chosen]
    assert (inside.min() >= outside.max() - 1e-7) if select == "top" else (inside.max() <= outside.min() + 1e-7)
    assert mask.recipe["select"] == select and mask.recipe["model"] == model.fingerprint


def test_single_weights_can_be_edited_and_each_method_names_others():
    model, split = small_model(), split_of_small()
    methods = [GradientSaliency(), SNIP(), Fisher(), WAGLE(), Magnitude(), Wanda()]
    masks = [localize_weights(model, split, method, budget=0.02) for method in methods]
    assert len({mask.n_parameters for mask in masks}) == 1
    for i, mask in enumerate(masks):
        assert all(mask.overlap(other).jaccard < 0.95 for other in masks[:i])
    update = unlearn(model, split, masks[0], NPO(), optimizer=AdamW(lr=1e-3), steps=2)
    assert 0 < update.n_changed <= masks[0].n_parameters


def test_the_mean_over_facts_is_not_the_pooled_form():
    model, split = small_model(), split_of_small()
    alone = localize_weights(model, split, GradientSaliency(), budget=0.02)
    texts, names = fact_texts(model, split.forget), matrices(model)
    total = {n: torch.zeros(model.weights[n].shape) for n in names}
    for i in range(len(texts)):
        for name, g in gradient(model, texts.rows(slice(i, i + 1)), names, log_probability).items():
            total[name] += g.abs()
    assert alone.overlap(ParameterMask.top(total, 0.02)).jaccard > 0.999
    assert alone.overlap(localize_weights(model, split, GradientSaliency(pooled=True), budget=0.02)).jaccard < 0.99


def test_top_breaks_ties_in_order_and_takes_exactly_the_budget():
    scores = {"a": torch.tensor([1.0, 3.0, 3.0, 3.0]), "b": torch.tensor([3.0, 0.0, 5.0, 3.0, 3.0, 0.0])}
    mask = ParameterMask.top(scores, 0.5)  # 2 of a and 3 of b
    assert mask["a"].tolist() == [False, True, True, True]
    assert mask["b"].tolist() == [True, False, True, False, False, False]
    assert ParameterMask.top(scores, 1.0).n_parameters == 10
    with pytest.raises(ValueError, match="selects no entry"):
        ParameterMask.top(scores, 0.01)
    with pytest.raises(ValueError, match="1 of 2 scores are not finite"):
        ParameterMask.top({"a": torch.tensor([1.0, math.nan])}, 0.5)


def test_bad_requests_say_the_way_out(llama):
    pairs, split = contrast_pairs(), split_of_small()
    for method in (WAGLE(), MemFlex()):
        with pytest.raises(ValueError, match=r"give some, .*\(retain=facts\)"):
            localize(llama, pairs, method, components="value", progress=False)
    for method in (MemFlex(KEPT), Knockout(), AttributionPatching()):
        with pytest.raises(ValueError, match="scores no single weights; GradientSaliency"):
            localize_weights(small_model(), split, method)
    with pytest.raises(ValueError, match="'top' or 'bottom'"):
        localize_weights(small_model(), split, Fisher(), select="best")
    with pytest.raises(ValueError, match="gamma"):
        WAGLE(gamma=0.0)
    with pytest.raises(ValueError, match="mu <= 1"):
        MemFlex(mu=1.5)


def test_the_retain_facts_come_from_the_split_unless_given():
    split = split_of_small()
    assert given(WAGLE(), split.retain) == WAGLE(split.retain)
    assert given(MemFlex(KEPT), split.retain) == MemFlex(KEPT)
    assert given(Fisher(), split.retain) == Fisher()


def test_a_study_locates_single_weights_and_says_what_cannot():
    split = split_of_small()
    planting = Planting(kind="weight", share=0.02, arms=("oracle", "random", "top", "bottom"))
    plan = Plan(localizers=(WAGLE(), SNIP()), planting=planting)
    place = region(small_model(), "weight", 0.02)
    masks = controlled._masks(small_model(), split, plan, planting, place, 0, 1)
    for name, method in (("WAGLE", WAGLE(split.retain)), ("SNIP", SNIP())):
        expected = localize_weights(small_model(), split, method, budget=0.02)
        assert masks[name, "top", 0].overlap(expected).jaccard == 1
        assert masks[name, "top", 0].n_parameters == masks[name, "bottom", 0].n_parameters == place.n_parameters
        assert (masks[name, "top", 0] & masks[name, "bottom", 0]).n_parameters == 0
    components = controlled._masks(
        small_model(), split, plan, Planting(share=0.1), region(small_model(), share=0.1), 0, 1
    )
    assert components["WAGLE", "top", 0].n_parameters == components["", "oracle", 0].n_parameters
    with pytest.raises(ValueError, match="AttributionPatching scores no single weights"):
        replace(plan, localizers=(SNIP(), AttributionPatching()))


def test_scores_against_retain_facts_can_be_saved(llama, tmp_path):
    scores = localize(llama, contrast_pairs(), WAGLE(KEPT), components="head", progress=False)
    loaded = Scores.load(scores.save(tmp_path / "scores.safetensors"))
    assert torch.equal(loaded.values, scores.values) and repr(loaded.method).startswith("WAGLE(retain=")


def test_texts_of_pairs_are_the_clean_side():
    texts = clean_texts(contrast_pairs(padding="left"))
    assert isinstance(texts, Texts) and len(texts) == 3 and len(texts.rows(slice(0, 2))) == 2
