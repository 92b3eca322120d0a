import numpy as np
import pandas as pd
import pytest
from scipy import stats

from locus.verdict import compare_paired, holm, localization_effect, n_to_decide, power, verdict


def table(
    differences: dict[tuple[str, str], np.ndarray],
    *,
    draws: int = 19,
    metric: str = "aues",
    seed: int = 0,
    draw_sd: float = 0.01,
) -> pd.DataFrame:
    """A table in which top minus the mean of the random draws is exactly as given, one value a seed."""
    rng = np.random.default_rng(seed)
    rows = []
    for (localizer, objective), values in differences.items():
        for s, difference in enumerate(values):
            random = rng.normal(0.5, draw_sd, draws)
            common = dict(model="m", facts="f", kind="neuron", budget=0.05, localizer=localizer, objective=objective)
            common |= dict(seed=s, step=-1, metric=metric, status="finished")
            rows.append(common | dict(arm="top", draw=0, value=random.mean() + difference))
            rows += [common | dict(arm="random", draw=d, value=v) for d, v in enumerate(random)]
            rows.append(common | dict(arm="all", localizer="", kind="", budget=np.nan, draw=0, value=0.4))
            rows.append(common | dict(arm="top", draw=0, step=3, metric="forget_strength", value=0.1))
    return pd.DataFrame(rows).drop_duplicates()


def standard(mean: float, sd: float, n: int, seed: int = 0) -> np.ndarray:
    """n values with exactly this mean and standard deviation."""
    x = np.random.default_rng(seed).normal(size=n)
    return mean + sd * (x - x.mean()) / x.std(ddof=1)


@pytest.mark.parametrize(
    "mean, sd, n, expected",
    [
        (0.0, 0.01, 12, "equivalent"),
        (0.008, 0.005, 12, "equivalent"),  # excludes 0 as well
        (0.05, 0.02, 12, "better"),
        (-0.05, 0.02, 12, "worse"),
        (0.01, 0.04, 12, "undecided"),
        (0.03, 0.02, 25, "better"),
        (0.0, 0.02, 25, "equivalent"),
    ],
)
def test_the_rule(mean, sd, n, expected):
    v = verdict(table({("A", "NPO"): standard(mean, sd, n)}), better="higher")
    row = v.rows.iloc[0]
    assert row.verdict == expected and expected in v.sentence
    assert row.difference == pytest.approx(mean, abs=1e-12) and row.sd == pytest.approx(sd)
    assert (row.n, row.draws) == (n, 19)
    # Each verdict is what the printed intervals say.
    inside = -0.02 < row.low90 and row.high90 < 0.02
    apart = row.low95 > 0 or row.high95 < 0
    assert expected == ("equivalent" if inside else ("better" if mean > 0 else "worse") if apart else "undecided")
    assert ("excludes 0" in v.sentence) == (inside and apart)
    assert np.isfinite(row.n_if_none) == np.isfinite(row.n_if_observed) == (expected == "undecided")


def test_intervals_are_students_below_twenty():
    difference = standard(0.013, 0.04, 9)
    row = compare_paired(difference, bound=0.02)
    low, high = stats.t.interval(0.95, 8, loc=difference.mean(), scale=stats.sem(difference))
    assert (row["low95"], row["high95"]) == (pytest.approx(low), pytest.approx(high))
    assert row["p_different"] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)
    one_sided = [
        stats.ttest_1samp(difference, -0.02, alternative="greater").pvalue,
        stats.ttest_1samp(difference, 0.02, alternative="less").pvalue,
    ]
    assert row["p_equivalent"] == pytest.approx(max(one_sided))
    assert row["p_wilcoxon"] == pytest.approx(stats.wilcoxon(difference).pvalue)
    assert np.isnan(compare_paired(difference[:5], bound=0.02)["p_wilcoxon"])


def test_the_bootstrap_follows_skewed_data():
    skewed = np.random.default_rng(1).exponential(size=60)
    row = compare_paired(skewed, bound=0.02)
    t = stats.t.interval(0.95, 59, loc=skewed.mean(), scale=stats.sem(skewed))
    assert row["high95"] - skewed.mean() > 1.1 * (skewed.mean() - row["low95"])  # longer to the right
    assert row["low95"] == pytest.approx(t[0], abs=0.1) and row["high95"] == pytest.approx(t[1], abs=0.3)
    assert row == compare_paired(skewed, bound=0.02)


def test_error_rates_by_simulation():
    rng = np.random.default_rng(0)

    def rates(n: int, mean: float, times: int) -> tuple[float, float]:
        found = [compare_paired(rng.normal(mean, 0.02, n), bound=0.02) for _ in range(times)]
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


def test_holm():
    p = np.array([0.04, 0.01, 0.03])
    assert holm(p) == pytest.approx([0.06, 0.03, 0.06])
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1.0, 1.0])
    # One of ten comparisons with p = 0.03 is decided alone, and not among ten.
    value = stats.t.isf(0.015, 11) * 0.1 / 12**0.5
    strong = {("A", "NPO"): standard(value, 0.1, 12)}
    assert verdict(table(strong), better="higher").rows.verdict[0] == "better"
    rest = {(f"B{i}", "NPO"): standard(0.0, 0.1, 12, seed=i) for i in range(9)}
    many = verdict(table(strong | rest), better="higher")
    assert (many.rows.verdict == "undecided").all() and many.rows.low95[0] > 0
    assert "undecided in 10 of 10 comparisons" in many.sentence


@pytest.mark.parametrize("n, draws, why", [(2, 19, "seeds"), (12, 3, "draws")])
def test_few_seeds_or_draws_are_described(n, draws, why):
    v = verdict(table({("A", "NPO"): np.full(n, 0.2)}, draws=draws), better="higher")
    assert v.rows.verdict[0] == "descriptive"
    assert f"above {n * draws} of {n * draws} random masks" in v.sentence and f"too few {why}" in v.sentence
    low = verdict(table({("A", "NPO"): np.full(n, -0.2)}, draws=draws), better="lower")
    assert f"not above {n * draws} of {n * draws} random masks" in low.sentence


def test_one_seed():
    frame = table({("A", "NPO"): np.array([0.0])}, draws=19, draw_sd=0.02)
    v = verdict(frame, better="higher")
    random = frame[(frame.arm == "random")].value
    top = frame[(frame.arm == "top") & (frame.step == -1)].value.iloc[0]
    assert f"above {(random < top).sum()} of 19 random masks" in v.sentence and "n = 1 seed;" in v.sentence


def test_direction():
    frame = table({("A", "NPO"): standard(0.05, 0.02, 12)}, metric="drift")
    assert verdict(frame, metric="drift", better="lower").rows.verdict[0] == "worse"
    assert verdict(frame, metric="drift").rows.verdict[0] == "worse"  # known without being told
    with pytest.raises(ValueError, match="which direction of 'mystery' is better"):
        verdict(frame.replace("drift", "mystery"), metric="mystery")


def test_missing_and_broken_rows():
    frame = table({("A", "NPO"): standard(0.0, 0.01, 12)})
    holes = frame.copy()
    holes.loc[(holes.arm == "top") & (holes.seed == 3) & (holes.step == -1), "value"] = np.nan
    holes = holes[~((holes.arm == "random") & (holes.seed == 5))]
    row = verdict(holes, better="higher").rows.iloc[0]
    assert (row.n, row.left_out) == (10, 2)
    some = frame.copy()
    some.loc[(some.arm == "random") & (some.draw >= 10) & (some.seed == 0), "value"] = np.nan
    assert verdict(some, better="higher").rows.draws[0] == 10
    with pytest.raises(ValueError, match="no column draw, metric"):
        verdict(frame.drop(columns=["draw", "metric"]))
    with pytest.raises(ValueError, match="have the arms: all, top"):
        verdict(frame[frame.arm != "random"], better="higher")
    with pytest.raises(ValueError, match="metrics of whole runs here: aues"):
        verdict(frame, metric="forget_strength", better="higher")
    with pytest.raises(ValueError, match="several values"):
        verdict(pd.concat([frame, frame[frame.arm == "top"]]), better="higher")
    with pytest.raises(ValueError, match="draws of arm 'random' are in the table twice"):
        verdict(pd.concat([frame, frame[frame.arm == "random"]]), better="higher")
    with pytest.raises(ValueError, match="positive difference"):
        verdict(frame, bound=0.0)
    nothing = frame.assign(value=np.nan)
    assert "no complete pair of runs" in verdict(nothing, better="higher").sentence


def test_identical_runs_are_pointed_out():
    v = verdict(table({("A", "NPO"): np.zeros(6)}, draw_sd=0.0), better="higher")
    assert v.rows.verdict[0] == "equivalent" and "every seed exactly the same" in v.sentence


def test_a_control_without_a_localizer():
    v = verdict(table({("A", "NPO"): np.zeros(6), ("B", "NPO"): np.zeros(6)}), control="all", better="higher")
    assert list(v.rows.verdict) == ["better", "better"] and "all parameters" in v.sentence
    assert v.rows.difference[0] == pytest.approx(0.1, abs=0.01) and v.rows.draws[0] == 1


def test_settings_are_judged_apart():
    a = table({("A", "NPO"): standard(0.05, 0.01, 8)})
    b = table({("A", "NPO"): standard(-0.05, 0.01, 8)}).assign(budget=0.1)
    v = verdict(pd.concat([a, b]), better="higher")
    assert list(v.rows.verdict) == ["better", "worse"] and "budget 0.1" in v.sentence
    # A minimal table, with only the columns that are needed, is enough.
    needed = ["localizer", "objective", "arm", "seed", "draw", "step", "metric", "value"]
    assert verdict(a[needed], better="higher").rows.verdict[0] == "better"
    assert "better" in repr(v) and "+0.0500" in repr(v)


def scan(n_facts: int = 30, n_layers: int = 6, *, layer: float, effect: float, noise: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = pd.DataFrame([(a, f"fact {b}") for b in range(n_facts) for a in range(n_layers)], columns=["layer", "fact"])
    rows["effect"] = rng.normal(size=len(rows))
    rows["unlearning"] = layer * rows.layer + effect * rows.effect + noise * rng.normal(size=len(rows))
    return rows


def test_localization_effect_tells_layer_from_effect():
    by_layer = localization_effect(scan(layer=1.0, effect=0.0, noise=0.3))
    assert by_layer.r2.adjusted["layer"] > 0.9 > 0.1 > by_layer.r2.adjusted["effect"]
    assert abs(by_layer.gain) < 0.01 and by_layer.p_gain > 0.01
    assert by_layer.r2.cross_fact["layer"] > 0.9 and by_layer.r2.cross_fact["effect"] < 0.05
    assert by_layer.low < 0 < by_layer.high
    by_effect = localization_effect(scan(layer=0.0, effect=1.0, noise=0.3))
    assert by_effect.r2.adjusted["effect"] > 0.85 and by_effect.gain > 0.8 and by_effect.p_gain < 1e-6
    assert by_effect.low > 0.8 and by_effect.within > 0.8
    assert "Spearman correlation of +0.9" in by_effect.sentence


def test_localization_effect_statistics_against_direct_formulas():
    frame = scan(layer=0.5, effect=0.5, noise=1.0)
    result = localization_effect(frame, samples=50)
    assert result.spearman == pytest.approx(stats.spearmanr(frame.effect, frame.unlearning).statistic)
    fit = stats.linregress(frame.effect, frame.unlearning)
    n = len(frame)
    assert result.r2.r2["effect"] == pytest.approx(fit.rvalue**2)
    assert result.r2.adjusted["effect"] == pytest.approx(1 - (1 - fit.rvalue**2) * (n - 1) / (n - 2))
    groups = frame.groupby("layer").unlearning
    within = ((frame.unlearning - groups.transform("mean")) ** 2).sum()
    total = ((frame.unlearning - frame.unlearning.mean()) ** 2).sum()
    assert result.r2.r2["layer"] == pytest.approx(1 - within / total)
    # The full interaction is one line a layer.
    residual = 0.0
    for _, rows in frame.groupby("layer"):
        line = stats.linregress(rows.effect, rows.unlearning)
        residual += ((rows.unlearning - line.intercept - line.slope * rows.effect) ** 2).sum()
    assert result.r2.r2["both"] == pytest.approx(1 - residual / total)


def test_noise_has_no_adjusted_and_no_cross_fact_r2():
    results = [localization_effect(scan(layer=0, effect=0, noise=1, seed=s), samples=0) for s in range(40)]
    adjusted = pd.concat([r.r2.adjusted for r in results], axis=1).mean(axis=1)
    assert adjusted.abs().max() < 0.02
    assert pd.concat([r.r2.cross_fact for r in results], axis=1).mean(axis=1)["both"] < 0


def test_intervals_are_clustered_by_fact():
    # Twenty copies of each row add no knowledge, so the interval may not shrink.
    frame = scan(12, 4, layer=0.3, effect=0.3, noise=1.0)
    one = localization_effect(frame)
    copies = localization_effect(pd.concat([frame] * 20))
    assert copies.high - copies.low == pytest.approx(one.high - one.low, rel=0.05)


def test_localization_effect_of_little():
    frame = scan(1, 6, layer=1, effect=0, noise=1)
    assert np.isnan(localization_effect(frame).low)
    frame.loc[2, "effect"] = np.nan
    assert localization_effect(frame).left_out == 1
    assert np.isnan(localization_effect(frame.assign(unlearning=0.0)).spearman)
    empty = localization_effect(frame.iloc[:0])
    assert empty.n == 0 and "Too few" in empty.sentence
    with pytest.raises(ValueError, match="no column effect"):
        localization_effect(frame.drop(columns="effect"))
