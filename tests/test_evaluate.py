"""What evaluate() says is what a loop over single prompts says, and areas are areas."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from small import facts, model

from locus.charts import summary
from locus.evaluate import (
    DIRECTION,
    METRICS,
    PARTS,
    _wrong_answers,
    aues,
    drift,
    drift_text,
    evaluate,
    interval,
    limits,
    relative,
    score,
)
from locus.facts import Fact, Facts, FactSplit, encode


@pytest.fixture(scope="module")
def split() -> FactSplit:
    return facts().split(forget=6, seed=0, other_relations=("pet",))


def alone(prompt: str, answer: str) -> tuple[float, float, bool]:
    """Probability per token, extraction strength and exactness of one answer, one prompt at a time."""
    m = model()
    start = len(m.tokenizer(prompt)["input_ids"])
    ids = torch.tensor([m.tokenizer(f"{prompt} {answer}")["input_ids"]])
    with torch.no_grad():
        logits = m.logits(ids)[0]
    log_p = [logits[i - 1].log_softmax(-1)[ids[0, i]].item() for i in range(start, ids.shape[1])]
    right = [int(logits[i - 1].argmax()) == int(ids[0, i]) for i in range(start, ids.shape[1])]
    shortest = next(k for k in range(len(right) + 1) if all(right[k:]))
    return math.exp(np.mean(log_p)), 1 - shortest / len(right), all(right)


def test_every_metric_is_that_of_single_prompts(split):
    e = evaluate(model(), split, wrong=3, seed=5)
    for part in PARTS:
        for i, fact in enumerate(getattr(split, part)):
            p, strength, exact = alone(fact.prompt, fact.answer)
            assert e.values(part, "probability")[i].item() == pytest.approx(p, rel=1e-4)
            assert e.values(part, "extraction_strength")[i].item() == strength
            assert e.values(part, "exact")[i].item() == exact
            again, strength, _ = alone(fact.paraphrases[0], fact.answer)
            assert e.values(part, "paraphrase_probability")[i].item() == pytest.approx(again, rel=1e-4)
            assert e.values(part, "paraphrase_extraction")[i].item() == strength
    pool = [fact for part in PARTS for fact in getattr(split, part)]
    fact = split.holdout[1]
    wrong = _wrong_answers(fact, pool, 3, 5)
    assert len(set(wrong)) == 3 and fact.answer not in wrong
    assert set(wrong) <= {f.answer for f in pool if f.relation == fact.relation}
    expected = (
        np.prod([alone(fact.prompt, answer)[0] for answer in wrong]) ** (1 / 3) / alone(fact.prompt, fact.answer)[0]
    )
    assert e.values("holdout", "truth_ratio")[1].item() == pytest.approx(expected, rel=1e-3)


def test_chunks_do_not_matter(split):
    batch = encode(model(), split.holdout)
    whole, chunked = score(model(), batch, rows=100), score(model(), batch, rows=2)
    torch.testing.assert_close(whole.log_probability, chunked.log_probability, atol=1e-5, rtol=1e-5)
    assert len(score(model(), encode(model(), split.holdout[:1])).exact) == 1


def test_unscored_is_nan_and_never_zero():
    lone = Facts([Fact("w3", "home", "w3 w90", facts()[6].answer)])
    none = Facts([])
    split = FactSplit(lone, none, none, none, 0)
    e = evaluate(model(), split)
    for metric in ("truth_ratio", "paraphrase_probability", "relative_probability"):
        assert e.values("forget", metric).isnan().all() and e.n("forget", metric) == 0
        assert math.isnan(e.mean("forget", metric))
    assert math.isnan(e.mean("holdout", "probability")) and math.isnan(e.utility())
    assert all(math.isnan(x) for x in e.interval("forget", "probability"))


def test_intervals_of_bounded_numbers_stay_inside():
    values = pd.Series([0.95, 1.0, 1.0])
    assert summary(values)[3] > 1 and summary(values, limits("aues"))[3] == 1
    assert limits("drift") == (0, math.inf) and limits("forget_truth_ratio") == (0, math.inf)
    assert limits("retain_exact") == limits("forget_strength") == (0, 1) and limits("recovery_best")[0] == -math.inf


def test_a_broken_model_has_forgotten_nothing(split):
    m = model()
    name = next(iter(m.weights))
    kept = m.weights[name].detach().clone()
    m.write(name, torch.full_like(kept, math.nan))
    try:
        e = evaluate(m, split)
    finally:
        m.write(name, kept)
    assert all(values.isnan().all() for values in e.per_fact.values())
    assert math.isnan(e.forget_strength()) and e.n("forget", "exact") == 0
    assert math.isnan(e.forget_quality(evaluate(m, split)))  # a study goes on with it


def test_relative_probability_is_to_the_original(split):
    original = evaluate(model(), split)
    again = evaluate(model(), split, reference=original)
    assert again.forget_strength("probability") == pytest.approx(0) and again.retain_strength("probability") == 1
    assert math.isnan(original.strength("forget", "probability"))
    other = facts().split(forget=6, seed=1, other_relations=("pet",))
    with pytest.raises(ValueError, match="other facts"):
        evaluate(model(), other, reference=original)
    assert relative(torch.tensor([0.2, 0.3]), torch.tensor([0.4, 0.0])).tolist()[0] == 0.5
    assert relative(torch.tensor([0.3]), torch.tensor([0.0])).isnan().all()


def test_knowledge_is_seen(split):
    e = evaluate(model(), split, reference=None)
    assert e.forget_strength() == 0 and e.retain_strength() == 1 and e.mean("forget", "truth_ratio") < 0.1
    assert 0.9 < e.utility() <= 1
    assert set(e.rows().metric) == set(METRICS) and set(e.rows().better) == {"higher", "lower"}
    assert DIRECTION["forget_probability"] == "lower" and DIRECTION["holdout_truth_ratio"] == "lower"


def test_forget_quality_needs_the_retained_model(split):
    e = evaluate(model(), split)
    with pytest.raises(ValueError, match="without the forget facts"):
        e.forget_quality()
    assert e.forget_quality(e) == 1


def test_interval_covers():
    rng = np.random.default_rng(0)
    for n, method in ((8, "t"), (60, "bootstrap")):
        hits = 0
        for _ in range(200):
            values = torch.tensor(rng.normal(0.3, 1, n))
            low, high = interval(values)
            assert (low, high) == interval(torch.cat([values, torch.tensor([math.nan])]), method=method)
            hits += low <= 0.3 <= high
        assert 178 <= hits <= 199, (n, hits)


# ------------------------------------------------------------------------------------------------ AUES


def brute(points: list[tuple[float, float]], low: float = 0.0, high: float = 1.0) -> float:
    grid = low + (np.arange(20_000) + 0.5) / 20_000 * (high - low)
    return float(np.mean([max([f for r, f in points if r >= x], default=0.0) for x in grid]))


@pytest.mark.parametrize("seed", range(8))
def test_aues_is_the_integral_of_the_envelope(seed):
    points = [tuple(p) for p in np.random.default_rng(seed).random((seed + 1, 2))]
    assert aues(points) == pytest.approx(brute(points), abs=1e-3)
    assert aues(points[::-1]) == aues(points)
    assert aues(points, between=(0.2, 0.7)) == pytest.approx(brute(points, 0.2, 0.7), abs=1e-3)
    assert aues(points + [(0.0, 1.0)]) == pytest.approx(aues(points))
    assert aues(points, form="trapezoid") >= aues(points) - 1e-12


def test_aues_at_its_ends():
    assert aues([(1.0, 0.0)]) == 0 and aues([(1.0, 1.0)]) == 1 and aues([(0.5, 1.0)]) == 0.5
    assert aues([(1.2, 1.0)]) == 1  # a fact more likely than before is kept, not more than kept
    line = [(1 - x, x) for x in np.linspace(0, 1, 1001)]
    assert aues(line) == pytest.approx(0.5, abs=1e-3)
    assert aues(line[::500], form="trapezoid") == pytest.approx(0.5)
    assert aues(line[::500]) == pytest.approx(0.25)
    for wrong in ([], [(math.nan, 1.0)]):
        with pytest.raises(ValueError, match="checkpoint"):
            aues(wrong)
    with pytest.raises(ValueError, match="range"):
        aues(line, between=(0.7, 0.2))


# ------------------------------------------------------------------------------------------------ drift


def test_drift_is_zero_for_the_model_itself_and_counts_an_edit(tmp_path):
    m = model()
    text = drift_text(m, n=3, length=6, seed=1)
    assert torch.equal(text.tokens, drift_text(m, n=3, length=6, seed=1).tokens)
    assert (drift(m, text) == 0).all()
    file = tmp_path / "text.txt"
    file.write_text("w1 w90 w35 w60 " * 5)
    own = drift_text(m, text=file, length=4, n=2)
    name, weight = next((n, w) for n, w in m.weights.items() if n.endswith("mlp.down_proj.weight"))
    kept = weight.detach().clone()
    try:
        m.write(name, kept * 0.5)
        for t in (text, own):
            q = m.logits(t.tokens).detach().log_softmax(-1)
            by_hand = torch.nn.functional.kl_div(q, t.log_probs, log_target=True, reduction="none").sum(-1).mean(-1)
            torch.testing.assert_close(drift(m, t).float(), by_hand, atol=1e-5, rtol=1e-4)
            assert (drift(m, t) > 0).all()
    finally:
        m.write(name, kept)
    with pytest.raises(ValueError, match="tokens"):
        drift_text(m, text=file, length=500)
    with pytest.raises(ValueError, match="no text file"):
        drift_text(m, text=tmp_path / "absent.txt")
