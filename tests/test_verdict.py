import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import standard, synthetic_study

from locus.sequential import Looks
from locus.verdict import contrasts, localization_effect, verdict


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


def test_holm():
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


# ------------------------------------------------------------------------------------------------ controlled


def test_a_controlled_study_is_judged_by_the_true_location():
    found = {"NPO": standard(0.05, 0.02, 12), "WGA": standard(0.0, 0.01, 12), "DPO": standard(0.01, 0.05, 12)}
    frame = synthetic_study(found)
    v = verdict(frame)
    assert (v.arm, v.control, v.looks, v.status) == ("oracle", "random", None, None)
    rows = v.rows.set_index("objective")
    assert dict(rows.verdict) == {"NPO": "better", "WGA": "equivalent", "DPO": "undecided"}
    for objective, values in found.items():
        assert rows.difference[objective] == pytest.approx(np.mean(values)) and rows.draws[objective] == 3
    # Holm over the objectives: each family of tests hands on what it has found.
    assert rows.level_different["NPO"] == pytest.approx(0.05 / 3)
    assert rows.level_different["DPO"] == pytest.approx(0.05 / 2) == rows.level_equivalent["DPO"]
    assert v.sentence.startswith("Editing the true location (oracle) against random regions of the same size apart")
    assert rows.n_if_none["DPO"] > 12 and np.isnan(rows.n_if_none["NPO"])
    # The located arms of the same table, judged by themselves, share its random regions.
    located = verdict(frame, arm="top", min_draws=1)
    assert len(located.rows) == 6 and set(located.rows.localizer) == {"A", "B"}
    # A single draw a seed, as in the paper, is noisier and not less valid.
    assert set(verdict(synthetic_study(found, draws=1)).rows.verdict) == {"better", "equivalent", "undecided"}


def test_few_seeds_of_a_controlled_study_are_described():
    v = verdict(synthetic_study({"NPO": np.array([0.2, 0.2])}))
    assert v.rows.verdict[0] == "descriptive" and "too few seeds" in v.sentence
    assert verdict(synthetic_study({"NPO": standard(0, 0.01, 3)}), min_seeds=4).rows.verdict[0] == "descriptive"


def test_a_study_that_adds_seeds_until_it_is_decided():
    looks = Looks((4, 7, 11, 15))
    found = {"NPO": standard(0.05, 0.02, 15), "WGA": standard(0.012, 0.03, 15)}
    frame = synthetic_study(found)
    early = verdict(frame[frame.seed < 7], looks=looks)
    assert early.status == "go on" and "After 7 of at most 15 seeds (look 2 of 4;" in early.sentence
    assert "go on to 11" in early.sentence
    end = verdict(frame, looks=looks)
    assert end.status == "cap reached" and end.sentence.endswith("the cap is reached.")
    assert verdict(frame[frame.objective.isin(["NPO", ""])], looks=looks).status == "decided"
    assert verdict(frame[(frame.seed < 6) & frame.objective.isin(["NPO", ""])], looks=looks).status == "go on"
    assert "no planned look" in verdict(frame[frame.seed < 6], looks=looks).sentence
    # Corrected: longer intervals, lower levels and more seeds than for a number fixed beforehand.
    fixed = verdict(frame[frame.seed < 7])
    assert np.all(early.rows.high95 - early.rows.low95 > fixed.rows.high95 - fixed.rows.low95)
    assert np.all(early.rows.level_different < fixed.rows.level_different)
    assert end.rows.n_if_observed[1] >= verdict(frame).rows.n_if_observed[1]
    with pytest.raises(ValueError, match="Alpha is used up at 11"):
        verdict(frame, looks=Looks((4, 11)))


def test_attacked_runs_are_left_out():
    frame = synthetic_study({"NPO": standard(0.05, 0.02, 8)})
    more = frame[(frame.metric == "aues") & (frame.arm == "oracle")].assign(attack="full", value=0.0)
    v = verdict(pd.concat([frame, more]))
    assert len(v.rows) == 1 and v.rows.difference[0] == pytest.approx(0.05)
    # Numbers that only attacked runs have are judged attack by attack.
    back = verdict(frame, metric="recovery_best", better="lower")
    assert list(back.rows.attack) == ["full", "lora", "any"] and set(back.rows.verdict) == {"worse"}
    assert back.rows.difference.to_list() == pytest.approx([0.135] * 3) and "NPO attack any is worse" in back.sentence


def test_a_table_that_was_written_as_csv_is_judged_alike(tmp_path):
    for frame in (synthetic_study({"NPO": standard(0.05, 0.02, 8)}), table({("A", "NPO"): standard(0, 0.01, 6)})):
        frame.to_csv(tmp_path / "table.csv", index=False)
        read = pd.read_csv(tmp_path / "table.csv")
        assert read.localizer.isna().any()
        assert verdict(read).sentence == verdict(frame).sentence and "nan" not in repr(verdict(read))
        pd.testing.assert_frame_equal(contrasts(read), contrasts(frame), check_dtype=False)


def test_secondary_contrasts_are_described():
    frame = synthetic_study({"NPO": standard(0.05, 0.02, 8), "WGA": standard(0.0, 0.02, 8)})
    rows = contrasts(frame)
    primary = (rows.arm == "oracle") & (rows.control == "random") & (rows.metric == "aues")
    assert "verdict" not in rows and not primary.any()
    keyed = rows.set_index(["arm", "control", "metric", "objective", "localizer"]).sort_index()
    whole = frame[(frame.step == -1) & (frame.metric == "aues") & (frame.objective == "NPO")]
    oracle = whole[whole.arm == "oracle"].set_index("seed").value
    for control in ("decoy", "random-uniform"):
        other = whole[whole.arm == control].groupby("seed").value.mean()
        row = keyed.loc["oracle", control, "aues", "NPO", ""]
        low, high = stats.t.interval(0.95, 7, loc=(oracle - other).mean(), scale=stats.sem(oracle - other))
        assert (row.difference, row.low95, row.high95, row.n) == pytest.approx(((low + high) / 2, low, high, 8))
    # Arms without an objective are compared with each objective's.
    assert keyed.loc["oracle", "revert", "aues", "NPO", ""].difference == pytest.approx((oracle - 0.9).mean())
    assert keyed.loc["top", "random", "aues", "WGA", "B"].draws == 3
    assert keyed.loc["top", "oracle", "aues", "WGA", "A"].n == 8
    assert keyed.loc["oracle", "random", "mu95", "NPO", ""].difference == pytest.approx(0.05)
    back = rows[(rows.metric == "recovery_matched") & (rows.objective == "WGA")]
    assert list(back.attack) == ["full", "lora", "any"] and list(back.draws) == [1, 1, 1]
    assert back.difference.to_list() == pytest.approx([0.135] * 3)
    # A table of located masks has such contrasts, too.
    located = contrasts(table({("A", "NPO"): standard(0.0, 0.01, 5)}))
    assert list(located.control) == ["all"] and located.arm[0] == "top"


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


def test_infinite_values_are_refused():
    broken = table({("A", "NPO"): standard(0.0, 0.1, 5)})
    broken.loc[broken.index[broken.metric == "aues"][0], "value"] = np.inf
    with pytest.raises(ValueError, match="infinite values of aues"):
        verdict(broken)
