"""Fact lookup, probes and mean ranks against what they say, done slowly."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import contrast_pairs
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from test_localize import metric_of, some

from locus import hooks
from locus.components import Component
from locus.facts import ContrastPairs, Fact
from locus.localize import (
    ActivationPatching,
    AttributionPatching,
    FactLookup,
    Knockout,
    KnowledgeNeurons,
    MeanRank,
    PathPatching,
    Probing,
    Random,
    fact_lookup,
    localize,
    path_patch,
    probe_curve,
)
from locus.localize.interventions import hook_names
from locus.localize.lookup import subject_streams
from locus.metrics import logit_difference


def lost(model, pairs, sender, receiver):
    """Two hooked passes: the stream that enters R with a sender as in the corrupted run, then the clean run with it."""
    mask, (name,) = pairs.attention_mask, hook_names(sender)
    source = hooks.states(model, pairs.corrupted, mask, [name])[name]
    between = [f"blocks.{layer}.hook_attn_out" for layer in range(sender.layer + 1, receiver)]
    held = hooks.states(model, pairs.clean, mask, between) if between else {}

    def put(act):
        if sender.index is None:
            return source
        act = act.clone()
        act[:, :, sender.index] = source[:, :, sender.index]
        return act

    edits = [(name, put), *((n, lambda _, value=value: value) for n, value in held.items())]
    enters = f"blocks.{receiver}.hook_resid_pre" if receiver < model.cfg.n_layers else "ln_final.hook_in"
    with torch.no_grad(), hooks.edits(model, edits), hooks.capture(model, [enters]) as found:
        model.logits(pairs.clean, mask)
    clean = metric_of(model, pairs.clean, pairs)
    with hooks.edits(model, [(enters, lambda _: found[enters])]):
        return clean - metric_of(model, pairs.clean, pairs)


def test_fact_lookup_equals_two_passes_a_path(any_model):
    pairs, method = contrast_pairs(padding="left"), FactLookup(heads=2)
    heads, mlps = any_model.components("head"), any_model.components("mlp")
    found = fact_lookup(any_model, pairs, method, progress=False)
    chosen = some(heads, 5)
    for c in chosen:
        expected = lost(any_model, pairs, c, 3)
        assert (found.heads.values[:, heads.items.index(c)] - expected).abs().max() < 1e-9, c
    assert found.heads.values.abs().max() > 1e-3
    means = found.heads.mean()
    above = [i for i, head in enumerate(heads) if head.layer > 0]
    best = sorted(above, key=lambda i: -abs(float(means[i])))[:2]
    assert found.extraction == tuple(heads[i] for i in best)
    assert found.receiver == min(heads[i].layer for i in best)
    for i, mlp in enumerate(mlps):
        expected = lost(any_model, pairs, mlp, found.receiver) if mlp.layer < found.receiver else 0
        assert (found.mlps.values[:, i] - expected).abs().max() < 1e-9, mlp
    scores = localize(any_model, pairs, method, components="mlp", progress=False)
    assert torch.equal(scores.values, found.mlps.values.float())
    total = metric_of(any_model, pairs.clean, pairs) - metric_of(any_model, pairs.corrupted, pairs)
    assert found.total == pytest.approx(float(total.mean()), abs=1e-6)
    share = (found.mlps.mean() / float(total.mean())).abs()
    assert found.layers(0.1) == tuple(i for i in range(3) if share[i] > 0.1)


def test_lookup_is_path_patching_where_nothing_stands_between(llama):
    """From the MLP below R all that follows moves; from the last MLP there is one path, to the logits."""
    pairs, mlps, method = contrast_pairs(padding="right"), llama.components("mlp"), FactLookup()
    noised = ActivationPatching("noising").score(llama, pairs, mlps, logit_difference, False)
    for receiver in (1, 2):
        values = method.mlp_effects(llama, pairs, mlps, receiver, logit_difference, False)
        assert (values[:, receiver - 1] - noised[:, receiver - 1]).abs().max() < 1e-9
        assert not values[:, receiver:].any()
    direct = method.mlp_effects(llama, pairs, mlps, 3, logit_difference, False)[:, 2]
    assert direct.abs().max() > 1e-3
    assert (direct - path_patch(llama, pairs, "L2MLP", "logits", direction="noising")).abs().max() < 1e-9
    heads = method.head_effects(llama, pairs, llama.components("head"), logit_difference, False)[:, -4:]
    slow = ActivationPatching("noising").score(llama, pairs, llama.components("head"), logit_difference, False)
    assert (heads - slow[:, -4:]).abs().max() < 1e-9


def probed(n=36, classes=3, permuted=False):
    """Prompts `subject word` about 2n subjects, whose attribute is the class of the subject's token."""
    generator = torch.Generator().manual_seed(5)
    subjects = torch.randperm(90, generator=generator)[: 2 * n] + 3
    labels = subjects % classes
    if permuted:
        labels = labels[torch.randperm(2 * n, generator=generator)]
    answers = (20 + labels).reshape(2, n, 1)
    tokens = torch.stack([torch.full((2 * n,), 95), subjects, torch.full((2 * n,), 96)], dim=1).reshape(2, n, 3)
    return ContrastPairs(
        clean=tokens[0],
        corrupted=tokens[1],
        attention_mask=torch.ones(n, 3, dtype=torch.bool),
        read=torch.full((n, 1), 2),
        answer=answers[0],
        distractor=answers[1],
        read_mask=torch.ones(n, 1, dtype=torch.bool),
        subject=torch.tensor([[False, True, False]]).expand(n, -1),
        facts=tuple(Fact(f"w{i}", "of", f"w92 w{i} w93", "w17") for i in range(n)),
    )


def by_hand(features, labels, folds, strength):
    """Out-of-fold probabilities: the members of each class are dealt to the folds in turn, class after class."""
    order = [i for label in sorted(set(labels.tolist())) for i in np.flatnonzero(labels == label)]
    fold = np.empty(len(labels), dtype=int)
    for turn, i in enumerate(order):
        fold[i] = turn % folds
    out = np.empty((len(labels), len(set(labels.tolist()))))
    for f in range(folds):
        scaler = StandardScaler().fit(features[fold != f])
        probe = LogisticRegression(C=strength, max_iter=2000)
        probe.fit(scaler.transform(features[fold != f]), labels[fold != f])
        out[fold == f] = probe.predict_proba(scaler.transform(features[fold == f]))
    return out


def test_probes_equal_scikit_learn_by_hand(llama):
    pairs, method = probed(), Probing(folds=4, strength=0.5)
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_{w}" for i in range(3) for w in ("mid", "post"))]
    both = torch.cat([pairs.clean, pairs.corrupted])
    acts = hooks.states(llama, both, torch.ones_like(both).bool(), names)
    streams = subject_streams(llama, pairs)
    labels = torch.cat([pairs.answer, pairs.distractor])[:, 0].numpy()
    classes = np.searchsorted(np.unique(labels), labels)
    rows = np.arange(len(pairs))
    log_p, accuracy = [], []
    for name, stream in zip(names, streams, strict=True):
        assert (stream - acts[name][:, 1]).abs().max() < 1e-9
        p = by_hand(acts[name][:, 1].numpy(), classes, 4, 0.5)
        log_p.append(np.log(p[rows, classes[: len(pairs)]]))
        accuracy.append((p.argmax(1) == classes).mean())
    for kind, first in (("attn", 0), ("mlp", 1)):
        values = method.score(llama, pairs, llama.components(kind), logit_difference, False)
        for layer in range(3):
            expected = log_p[2 * layer + first + 1] - log_p[2 * layer + first]
            assert values[:, layer].numpy() == pytest.approx(expected, abs=1e-6)
    curve = probe_curve(llama, pairs, method)
    assert curve.accuracy.to_list() == pytest.approx(accuracy)
    assert curve.log_probability.to_list() == pytest.approx([p.mean() for p in log_p], abs=1e-6)
    assert curve.stream.to_list() == ["embed", *["attn", "mlp"] * 3] and set(curve.n) == {72}
    assert curve.chance.to_list() == pytest.approx([np.bincount(classes).max() / 72] * 7)


def test_permuted_attributes_are_at_chance_and_true_ones_are_not(llama):
    """The class of a token is written into its embedding; the model is put back."""
    embedding, kept = llama.bridge.embed.weight, llama.bridge.embed.weight.detach().clone()
    try:
        with torch.no_grad():
            for label in range(3):
                embedding[torch.arange(97) % 3 == label, label] += 3
        found = probe_curve(llama, probed(), Probing(folds=4))
        permuted = probe_curve(llama, probed(permuted=True), Probing(folds=4))
    finally:
        with torch.no_grad():
            embedding.copy_(kept)
    assert found.accuracy.min() > 0.9
    error = (permuted.chance * (1 - permuted.chance) / permuted.n) ** 0.5
    assert (permuted.accuracy < permuted.chance + 2.5 * error).all(), permuted


def test_attributes_that_no_other_subject_has_cannot_be_probed(llama):
    pairs = probed()
    answer = pairs.answer.clone()
    answer[3] = 77
    with pytest.raises(ValueError, match="1 of 36 facts have an attribute that no other subject has"):
        localize(llama, dataclasses.replace(pairs, answer=answer), Probing(), components="mlp", progress=False)
    same = dataclasses.replace(pairs, answer=torch.full_like(answer, 7), distractor=torch.full_like(answer, 7))
    with pytest.raises(ValueError, match="all subjects have the same 'of'"):
        localize(llama, same, Probing(), components="mlp", progress=False)
    for wrong in ({"folds": 1}, {"strength": 0.0}):
        with pytest.raises(ValueError, match="at least 2 folds and a strength above 0"):
            Probing(**wrong)
    with pytest.raises(ValueError, match="at least one extraction head, got heads=0"):
        FactLookup(heads=0)


class Given:
    """A localizer that gives what it was made with."""

    KINDS = ("head", "mlp")

    def __init__(self, values):
        self.values = values

    def score(self, *_):
        return self.values


def test_mean_ranks_are_counted(llama):
    heads = llama.components("head")
    generator = torch.Generator().manual_seed(0)
    # Small numbers, so that there are ties.
    first, second = torch.randint(0, 5, (2, 3, len(heads)), generator=generator).double()
    values = MeanRank((Given(first), Given(second))).score(llama, contrast_pairs(), heads, logit_difference, False)
    for fact in range(3):
        for c in range(len(heads)):
            ranks = []
            for scores in (first[fact], second[fact]):
                below, equal = (scores < scores[c]).sum(), (scores == scores[c]).sum()
                ranks.append(float(below) + (float(equal) + 1) / 2)
            assert float(values[fact, c]) == pytest.approx(sum(ranks) / 2 / len(heads))


def test_mean_rank_of_one_method_twice_orders_as_the_method(llama):
    pairs, heads = contrast_pairs(), llama.components("head")
    one = AttributionPatching().score(llama, pairs, heads, logit_difference, False)
    values = MeanRank((AttributionPatching(), AttributionPatching())).score(
        llama, pairs, heads, logit_difference, False
    )
    assert torch.equal(values.argsort(1), one.argsort(1)) and torch.equal(values.max(1).values, torch.ones(3).double())


def test_mean_rank_scores_what_its_methods_share():
    assert MeanRank((PathPatching(), Knockout())).KINDS == ("head", "mlp")
    assert "neuron" in MeanRank().KINDS and Component.parse("L0H0").kind in MeanRank().KINDS
    with pytest.raises(ValueError, match="at least two methods, got 1"):
        MeanRank((Random(),))
    with pytest.raises(ValueError, match=r"no kind of component in common \(KnowledgeNeurons: neuron, value; PathP"):
        MeanRank((KnowledgeNeurons(), PathPatching()))
