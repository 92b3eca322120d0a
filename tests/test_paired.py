import numpy as np
import pytest
from scipy import stats
from synthetic import standard

from locus.paired import compare_paired, decide, judge, n_to_decide, power, step_down
from locus.sequential import Looks

LOOKS = Looks((4, 7, 11, 15, 19))
BOUND = 0.02


# ------------------------------------------------------------------------------------------------ one comparison


def test_intervals_are_students_below_twenty():
    difference = standard(0.013, 0.04, 9)
    row = compare_paired(difference, bound=BOUND)
    low, high = stats.t.interval(0.95, 8, loc=difference.mean(), scale=stats.sem(difference))
    assert (row["low95"], row["high95"]) == (pytest.approx(low), pytest.approx(high))
    assert row["p_different"] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)
    one_sided = [
        stats.ttest_1samp(difference, -BOUND, alternative="greater").pvalue,
        stats.ttest_1samp(difference, BOUND, alternative="less").pvalue,
    ]
    assert row["p_equivalent"] == pytest.approx(max(one_sided))
    assert row["p_wilcoxon"] == pytest.approx(stats.wilcoxon(difference).pvalue)
    assert np.isnan(compare_paired(difference[:5], bound=BOUND)["p_wilcoxon"])


def test_the_bootstrap_follows_skewed_data():
    skewed = np.random.default_rng(1).exponential(size=60)
    row = compare_paired(skewed, bound=BOUND)
    t = stats.t.interval(0.95, 59, loc=skewed.mean(), scale=stats.sem(skewed))
    assert row["high95"] - skewed.mean() > 1.1 * (skewed.mean() - row["low95"])  # longer to the right
    assert row["low95"] == pytest.approx(t[0], abs=0.1) and row["high95"] == pytest.approx(t[1], abs=0.3)
    assert row == compare_paired(skewed, bound=BOUND)
    assert compare_paired(skewed + 100, bound=BOUND)["p_different"] > 0  # what 10,000 samples can say


@pytest.mark.parametrize("n", [9, 30])
def test_intervals_say_what_the_tests_say_at_any_level(n):
    for mean in (0.0, 0.008, 0.015, 0.03):
        difference = standard(mean, 0.02, n, seed=n)
        for levels in ((0.05, 0.05), (0.01, 0.02), (0.002, 0.004)):
            row = compare_paired(difference, bound=BOUND, levels=levels)
            assert (row["p_equivalent"] < levels[0]) == (-BOUND < row["low90"] and row["high90"] < BOUND)
            assert (row["p_different"] < levels[1]) == (row["low95"] > 0 or row["high95"] < 0)


def test_error_rates_by_simulation():
    rng = np.random.default_rng(0)

    def rates(n: int, mean: float, times: int) -> tuple[float, float]:
        found = [compare_paired(rng.normal(mean, 0.02, n), bound=BOUND) for _ in range(times)]
        equivalent = np.mean([f["p_equivalent"] < 0.05 for f in found])
        better = np.mean([f["p_equivalent"] >= 0.05 and f["low95"] > 0 for f in found])
        return float(equivalent), float(better)

    equivalent, better = rates(12, 0.0, 600)
    assert equivalent == pytest.approx(power(12, 0.02)[0], abs=0.04) and equivalent > 0.8 and better <= 0.05
    assert rates(5, 0.0, 600)[0] == pytest.approx(0.29, abs=0.04)
    # At the edge of the bound, equivalence is a false claim: at most 5% of the time.
    assert rates(12, 0.02, 600)[0] <= 0.065
    equivalent, better = rates(24, 0.0, 80)
    assert equivalent > 0.9 and better <= 0.05


@pytest.mark.parametrize("n, times", [(5, 800), (24, 300)])
def test_intervals_cover(n, times):
    rng = np.random.default_rng(n)
    found = [compare_paired(rng.normal(0.013, 0.03, n), bound=BOUND) for _ in range(times)]
    for share, name in ((0.9, "90"), (0.95, "95")):
        covered = np.mean([f[f"low{name}"] <= 0.013 <= f[f"high{name}"] for f in found])
        assert covered == pytest.approx(share, abs=3.5 * np.sqrt(share * (1 - share) / times))


def test_n_to_decide_matches_the_known_numbers():
    assert power(5, 0.02)[0] == pytest.approx(0.29, abs=0.01)
    assert power(10, 0.02)[0] == pytest.approx(0.80, abs=0.01)
    # Textbook: a one-sample t-test needs 34 (199) for an effect of 0.5 (0.2) sd at 80% power.
    assert power(34, 1.0, difference=0.5, bound=0.02)[1] == pytest.approx(0.808, abs=0.005)
    assert n_to_decide(1.0, difference=0.5, bound=1e-6) == 34
    assert n_to_decide(1.0, difference=0.2, bound=1e-6) == 199
    assert n_to_decide(0.02) == 11
    assert n_to_decide(0.0) == 2
    assert n_to_decide(10.0, most=1000) == 1000
    for n in (n_to_decide(0.05, difference=0.004),):
        assert max(power(n, 0.05, difference=0.004)) >= 0.8 > max(power(n - 1, 0.05, difference=0.004))
    with pytest.raises(ValueError, match="sd=nan"):
        n_to_decide(float("nan"))


# ------------------------------------------------------------------------------------------------ several


def test_step_down_is_holms_method():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.uniform(0, 0.06, 6)
        # The textbook's adjusted p-values: running maximum of (m - j) p_(j).
        order = np.argsort(p)
        adjusted = np.maximum.accumulate((6 - np.arange(6)) * p[order])
        found, last = step_down(p, lambda i, alpha: alpha)
        assert np.array_equal(found[order], adjusted < 0.05)
        assert np.array_equal(found, p < last)
    found, last = step_down(np.array([0.01, np.nan]), lambda i, alpha: alpha)
    assert list(found) == [True, False] and last[0] == 0.025 and np.isnan(last[1])


def test_one_of_ten_needs_more():
    # p = 0.03 decides alone, and not among ten.
    strong = standard(stats.t.isf(0.015, 11) * 0.1 / 12**0.5, 0.1, 12)
    assert judge({"A": strong}).verdict["A"] == "higher"
    rows = judge({"A": strong} | {f"B{i}": standard(0.0, 0.1, 12, seed=i) for i in range(9)})
    assert (rows.verdict == "undecided").all() and rows.low95["A"] > 0
    assert rows.level_different.iloc[0] == pytest.approx(0.005)


def test_judging_nothing():
    assert judge({}).empty and decide({}, looks=LOOKS).status == "go on"
    rows = judge({"A": np.array([0.1, np.nan]), "B": standard(0, 0.001, 5)}, looks=LOOKS)
    assert rows.verdict["A"] == "undecided" and rows.left_out["A"] == 1 and rows.n["A"] == 1


# ------------------------------------------------------------------------------------------------ looks


def stops(values: np.ndarray, looks: Looks, bound: float = BOUND, *, corrected: bool = True) -> tuple[np.ndarray, ...]:
    """The sequential rule written once more, for many studies at a time: (verdict, look, low95, high95) at the stop.

    values: [study, seed]. Verdicts: 0 undecided, 1 equivalent, 2 lower, 3 higher.
    """
    m = len(values)
    verdict, stop, low, high = np.zeros(m, int), np.full(m, -1), np.zeros(m), np.zeros(m)
    for k, n in enumerate(looks.at):
        mean, error = values[:, :n].mean(1), values[:, :n].std(1, ddof=1) / np.sqrt(n)
        one, half = (looks.level(n, 0.05), looks.level(n, 0.025)) if corrected else (0.05, 0.025)
        reach, side = stats.t.isf(one, n - 1) * error, stats.t.isf(half, n - 1) * error
        now = np.where(mean > side, 3, np.where(mean < -side, 2, 0))
        now = np.where(np.abs(mean) + reach < bound, 1, now)
        ends = (stop < 0) & ((now > 0) | (n == looks.cap))
        verdict[ends], stop[ends], low[ends], high[ends] = now[ends], k, (mean - side)[ends], (mean + side)[ends]
    return verdict, stop, low, high


def paths(mean: float, sd: float, times: int = 40_000, cap: int = 19, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, sd, (times, cap))


@pytest.mark.parametrize("mean, sd", [(0.0, 0.02), (0.02, 0.02), (0.03, 0.03), (0.0, 0.06)])
def test_decide_is_the_rule_of_the_simulation(mean, sd):
    values = paths(mean, sd, times=15, seed=1)
    words = np.array(["undecided", "equivalent", "lower", "higher"])
    for path, word, k in zip(values, *stops(values, LOOKS)[:2], strict=True):
        for i, n in enumerate(LOOKS.at[: k + 1]):
            found = decide({"NPO": path[:n]}, looks=LOOKS, bound=BOUND)
            if i < k:
                assert (found.status, found.next) == ("go on", LOOKS.at[i + 1])
        assert found.rows.verdict["NPO"] == words[word] and found.n == LOOKS.at[k] and found.next is None
        assert found.status == ("decided" if word else "cap reached")


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
@pytest.mark.parametrize("at", [(4, 7, 11, 15, 19), (3, 5, 8), (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)])
def test_a_false_difference_is_claimed_at_most_five_percent_of_the_time(spending, at):
    looks = Looks(at, spending)
    # A bound that nothing can meet, so that equivalence does not stop a study first.
    verdict = stops(paths(0.0, 1.0, cap=looks.cap), looks, bound=1e-9)[0]
    assert 0.0455 < (verdict >= 2).mean() < 0.0535  # 0.05 and three standard errors
    # Without the correction the claim would be made far more often.
    assert (stops(paths(0.0, 1.0, cap=looks.cap), looks, bound=1e-9, corrected=False)[0] >= 2).mean() > 0.085


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
@pytest.mark.parametrize("mean", [BOUND, -BOUND])
@pytest.mark.parametrize("sd", [0.002, 0.01, 0.02, 0.04])
def test_false_equivalence_is_claimed_at_most_five_percent_of_the_time(spending, mean, sd):
    looks = Looks(LOOKS.at, spending)
    verdict = stops(paths(mean, sd), looks)[0]
    assert (verdict == 1).mean() < 0.0535
    # The wrong side is claimed still less.
    assert (verdict == (2 if mean > 0 else 3)).mean() < 0.027


def test_planted_effects_are_found_and_nulls_called_equivalent():
    null, at = stops(paths(0.0, 0.02), LOOKS)[:2]
    assert (null == 1).mean() > 0.93 and (null >= 2).mean() < 0.03
    effect, when = stops(paths(0.05, 0.03), LOOKS)[:2]
    assert (effect == 3).mean() > 0.99 and (effect <= 2).mean() < 0.01
    # Most of them before the cap: what looks are for.
    assert np.mean(np.array(LOOKS.at)[at]) < 15 and np.mean(np.array(LOOKS.at)[when]) < 12
    # Noise that no such study can see through stays undecided.
    assert (stops(paths(0.0, 0.2), LOOKS)[0] == 0).mean() > 0.94
    assert decide({"NPO": standard(0.01, 0.04, 4)}, looks=LOOKS).status == "go on"
    assert decide({"NPO": standard(0.01, 0.04, 19)}, looks=LOOKS).status == "cap reached"


def test_intervals_cover_although_the_data_said_when_to_stop():
    for mean in (0.0, 0.015, 0.03):
        low, high = stops(paths(mean, 0.03), LOOKS)[2:]
        assert ((low <= mean) & (mean <= high)).mean() > 0.9455
    low, high = stops(paths(0.0, 1.0), LOOKS, bound=1e-9, corrected=False)[2:]
    assert ((low <= 0) & (0 <= high)).mean() < 0.9


def found_by_holm(p: np.ndarray, levels: list[float]) -> np.ndarray:
    """Holm's method for many studies at a time; levels[m - 1] is that of one among m. p: [study, objective]."""
    left = np.ones(p.shape, dtype=bool)
    for _ in range(p.shape[1]):
        left &= p >= np.array([0.0, *levels])[left.sum(1)][:, None]
    return ~left


def test_several_objectives_are_false_together_at_most_five_percent_of_the_time():
    # Three true nulls beside a large effect, which is found at once and hands its share on.
    looks, means, times = Looks((5, 10, 15), "pocock"), np.array([0, 0, 0, 10.0]), 20_000
    values = np.random.default_rng(5).normal(means, 1.0, (times, looks.cap, 4))
    false = np.zeros(times, dtype=bool)
    for n in looks.at:
        p = 2 * stats.t.sf(np.abs(values[:, :n].mean(1) / stats.sem(values[:, :n], axis=1)), n - 1)
        found = found_by_holm(p, [2 * looks.level(n, 0.025 / m) for m in (1, 2, 3, 4)])
        assert found[:, 3].all()
        false |= found[:, :3].any(1)
        for i in range(0, times, 1000):
            rows = judge(dict(zip("abcd", values[i, :n].T, strict=True)), looks=looks, bound=1e-9)
            assert list(rows.verdict != "undecided") == list(found[i])
    assert 0.03 < false.mean() < 0.0547


def test_the_bootstrap_keeps_the_level_at_late_looks():
    looks, rng, times = Looks((12, 20, 26)), np.random.default_rng(7), 120
    false = 0
    for _ in range(times):
        values = rng.normal(0, 1, looks.cap)
        found = [decide({"a": values[:n]}, looks=looks, bound=1e-6) for n in looks.at]
        false += any(one.status == "decided" for one in found)
    assert false / times < 0.05 + 3 * np.sqrt(0.05 * 0.95 / times)


def test_only_planned_looks_decide():
    clear = standard(0.3, 0.01, 19)
    assert decide({"a": clear[:6]}, looks=LOOKS).status == "go on"
    assert decide({"a": clear[:6]}, looks=LOOKS).next == 7
    assert decide({"a": clear[:7]}, looks=LOOKS).status == "decided"
    # A seed without a pair is one that was looked at.
    holes = clear[:7].copy()
    holes[2] = np.nan
    found = decide({"a": holes}, looks=LOOKS)
    assert (found.status, found.n, found.rows.n["a"], found.rows.left_out["a"]) == ("decided", 7, 6, 1)
    # Every comparison has to be decided.
    both = decide({"a": clear[:7], "b": standard(0.0, 0.05, 7)}, looks=LOOKS)
    assert both.status == "go on" and list(both.rows.verdict) == ["higher", "undecided"]
    assert both.rows.level_different["a"] == pytest.approx(2 * LOOKS.level(7, 0.0125))
    assert both.rows.level_different["b"] == pytest.approx(2 * LOOKS.level(7, 0.025))
    assert both.rows.level_equivalent["b"] == pytest.approx(LOOKS.level(7, 0.025))
