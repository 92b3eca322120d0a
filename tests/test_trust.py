"""How far to trust a ranking: figures by hand, and counts of passes."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from helpers import contrast_pairs
from scipy import stats
from test_localize import some

from locus import hooks, trust
from locus.cost import passes
from locus.localize import (
    ActivationPatching,
    AttributionPatching,
    IntegratedGradients,
    Knockout,
    localize,
)
from locus.metrics import log_probability
from locus.scores import Scores


@pytest.fixture(scope="module")
def pairs():
    return contrast_pairs(8)


@pytest.fixture(scope="module")
def exact(llama, pairs):
    return localize(llama, pairs, ActivationPatching(), components="neuron", progress=False)


def of(found, which, measure):
    return found.rows[(found.rows.of == which) & (found.rows.measure == measure)].iloc[0]


def test_a_ranking_that_is_exact_agrees_wholly(llama, pairs, exact):
    found = trust(llama, pairs, exact, sample=1000, boots=20, progress=False)
    for measure in ("pearson", "spearman", "overlap"):
        row = of(found, "exact", measure)
        assert (row.value, row.low, row.high) == pytest.approx((1, 1, 1)) and row.n == 144
    assert of(found, "exact", "overlap").chance == pytest.approx(14 / 144)
    noising = trust(llama, pairs, exact, against=ActivationPatching("noising"), boots=20, progress=False)
    assert of(noising, "exact", "pearson").value < 1 and "noising" in str(noising)
    assert f"{exact.passes[0]:,.0f} forward and 0 backward" in str(found)


def test_a_shuffled_ranking_is_near_chance(llama, pairs, exact):
    order = torch.randperm(144, generator=torch.Generator().manual_seed(1))
    shuffled = dataclasses.replace(exact, values=exact.values[:, order])
    found = trust(llama, pairs, shuffled, sample=144, boots=50, progress=False)
    for measure in ("pearson", "spearman"):
        assert abs(of(found, "exact", measure).value) < 3 / 144**0.5
    row = of(found, "exact", "overlap")
    assert row.value - row.chance < 3 * (row.chance * (1 - row.chance) / 14) ** 0.5
    # Shuffled scores are as stable over the facts as they were.
    assert of(found, "resamples", "pearson").value == pytest.approx(
        of(trust(llama, pairs, exact, boots=50, progress=False), "resamples", "pearson").value
    )


def test_figures_equal_scipy_on_resamples_by_hand(llama, pairs, exact):
    scores = localize(llama, pairs, AttributionPatching(), components="neuron", progress=False)
    found = trust(llama, pairs, scores, sample=40, fraction=0.2, boots=60, seed=3, progress=False)
    chosen = torch.randperm(144, generator=torch.Generator().manual_seed(3))[:40].sort().values.tolist()
    ours, theirs = (s.values.double().numpy() for s in (scores, exact))

    def measures(x, y):
        top = [set(sorted(range(len(v)), key=lambda i, v=v: -v[i])[: round(0.2 * len(v))]) for v in (x, y)]
        common = len(top[0] & top[1]) / len(top[0])
        return stats.pearsonr(x, y).statistic, stats.spearmanr(x, y).statistic, common

    draw = np.random.default_rng(3)
    agree, stable = [], []
    for counts in draw.multinomial(8, np.full(8, 1 / 8), size=60):
        drawn = np.repeat(np.arange(8), counts)  # the facts of one resample
        agree.append(measures(ours[drawn].mean(0)[chosen], theirs[drawn].mean(0)[chosen]))
        stable.append(measures(ours[drawn].mean(0), ours.mean(0)))
    value = measures(ours.mean(0)[chosen], theirs.mean(0)[chosen])
    for m, measure in enumerate(("pearson", "spearman", "overlap")):
        row = of(found, "exact", measure)
        assert row.value == pytest.approx(value[m], abs=1e-5) and row.n == 40
        assert (row.low, row.high) == pytest.approx(np.quantile([a[m] for a in agree], [0.025, 0.975]), abs=1e-4)
        row = of(found, "resamples", measure)
        assert row.value == pytest.approx(np.mean([a[m] for a in stable]), abs=1e-4) and row.n == 144
        assert (row.low, row.high) == pytest.approx(np.quantile([a[m] for a in stable], [0.025, 0.975]), abs=1e-4)
    assert "n = 40 components, 8 facts: Pearson" in str(found) and "overlap of the top 8 " in str(found)


def test_one_fact_has_no_interval(llama, pairs, exact):
    one = localize(llama, pairs[:1], ActivationPatching(), components="mlp", progress=False)
    found = trust(llama, pairs[:1], one, progress=False)
    assert of(found, "exact", "pearson").value == pytest.approx(1) and np.isnan(of(found, "exact", "pearson").low)
    assert np.isnan(of(found, "resamples", "pearson").value)


def test_bad_requests_say_the_way_out(llama, pairs, exact):
    with pytest.raises(ValueError, match="scores are in logit_difference and metric is log_probability"):
        trust(llama, pairs, exact, metric=log_probability)
    with pytest.raises(ValueError, match="the scores are of 8 facts and there are 3 pairs"):
        trust(llama, pairs[:3], exact)
    for wrong in ({"sample": 1}, {"boots": 0}, {"fraction": 0.0}, {"fraction": 1.5}):
        with pytest.raises(ValueError, match="a sample of at least 2, at least 1 resample and a fraction in"):
            trust(llama, pairs, exact, **wrong)


def test_a_plain_pass_counts_1_for_each_prompt(llama, pairs):
    with passes(llama, 6) as found, torch.no_grad():
        llama.logits(pairs.clean)
        assert (found.forward, found.backward) == pytest.approx((8, 0))
        llama.logits(pairs.clean[:2, :3])  # half of the tokens
    assert (found.forward, found.backward) == pytest.approx((9, 0))
    with passes(llama, 6) as found:
        llama.logits(pairs.clean).sum().backward()
    assert (found.forward, found.backward) == pytest.approx((8, 8))
    llama.bridge.zero_grad(set_to_none=True)


def test_rows_of_a_sweep_count_the_blocks_and_tokens_that_they_take(llama, pairs):
    recorded, read = hooks.trace(llama, pairs.clean), torch.full((8, 1), 5)
    for first in (0, 3):
        starts = {k: hooks.Start(torch.arange(8), {}, functools.partial(moved, first=first)) for k in (1, 2)}
        with passes(llama, 6) as found, torch.no_grad():
            recorded.grow(starts, read)
        # The last block gives out what is read only: a token of six.
        blocks = [8 * (6 - first) / 6, 16 * 1 / 6]
        assert found.forward == pytest.approx(sum(blocks) / 3)


def moved(act, first):
    act = act.clone()
    act[:, first:] += 1
    return act


def test_scores_say_what_they_cost(llama, pairs):
    before = hooks.count(llama)
    heads = some(llama.components("head"), 2)  # one in layer 0, one in layer 2
    assert [c.layer for c in heads] == [0, 2]
    cost = {
        method: localize(llama, pairs, method, components=heads, progress=False).passes
        for method in (AttributionPatching(), IntegratedGradients(steps=3), Knockout())
    }
    assert cost[AttributionPatching()] == pytest.approx((16, 8))
    # Two runs for the ends, and three for each of two layers; a backward pass reaches down to the hook it asks for.
    forward, backward = cost[IntegratedGradients(steps=3)]
    assert forward == pytest.approx(16 + 8 * 3 * 2) and 0 < backward <= 8 * 3 * 2
    # Two runs; then layers 0 and 1 on a head's rows, layer 2 on two heads'.
    assert cost[Knockout()] == pytest.approx((8 * (2 + 4 / 3), 0))
    assert hooks.count(llama) == before
    assert Scores(torch.zeros(1, 2), heads, None, "m").passes is None


def test_equal_scores_have_no_ranking_to_agree_with(llama, pairs):
    heads = llama.components("head")
    flat = Scores(torch.ones(len(pairs), len(heads)), heads, None, "logit_difference")
    found = trust(llama, pairs, flat, boots=20, progress=False)
    assert found.rows.value.isna().all() and "overlap of the top 1 undefined, as all scores are equal" in str(found)


def test_requests_that_are_no_contrast_pairs_say_how_to_make_some(llama, pairs):
    with pytest.raises(ValueError, match="contrast_pairs"):
        localize(llama, pairs.facts, AttributionPatching())
    assert pairs[-1].facts == (pairs.facts[-1],) and torch.equal(pairs[0].clean, pairs.clean[:1])


def test_scores_of_other_facts_are_refused(llama, pairs):
    heads = localize(llama, pairs, AttributionPatching(), components="head", progress=False)
    turned = pairs[torch.arange(len(pairs)).flip(0)]
    with pytest.raises(ValueError, match="other facts"):
        trust(llama, turned, heads, progress=False)
    exact = localize(llama, turned, Knockout(), components="head", progress=False)
    with pytest.raises(ValueError, match="other facts"):
        trust(llama, pairs, heads, against=exact, progress=False)
