"""Verdicts: is editing here better than, worse than or equivalent to editing there?

The rule is fixed before the data are seen. For each localizer and objective, the difference in one metric
between one arm and the mean over the draws of its random controls is paired by seed: the located mask (arm "top") where
locations are guessed, the region that the facts were planted in ("oracle") where they are known.

1. the 90% interval of the mean difference lies inside ± bound   -> "equivalent" (also where it excludes 0)
2. else the 95% interval excludes 0                              -> "better" or "worse"
3. else                                                          -> "undecided", and the n that would decide

Step 1 is two one-sided tests at 5% (Schuirmann 1987), step 2 a two-sided test at 5%; with several comparisons, both
families of tests are corrected by Holm's method first, and where seeds are added until it is decided, for the looks as
well (`locus.paired`, `locus.sequential`). Intervals are Student's below 20 seeds and bootstrap-t from there on. Few
seeds or few draws decide nothing: they give a "descriptive" verdict, the rank among the draws. Intervals are corrected
for the looks, not for the other comparisons, so one may exclude 0 where Holm leaves the comparison undecided.

All other contrasts of a table (`contrasts`) are descriptive: differences and intervals, and no verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from locus.paired import ALPHA, Status, compare_paired, judge, n_to_decide, status_of
from locus.sequential import Looks

WORDS = ("localizer", "objective", "attack")  # columns of a table in which "" says: none
NEEDED = ("localizer", "objective", "arm", "seed", "draw", "step", "metric", "value")
SETTING = ("model", "facts", "kind", "budget", "localizer", "objective", "attack")
# What `contrasts` compares the primary pair of arms in, beside the metric of the verdict.
OUTCOMES = (
    *(f"aues_{form}" for form in ("extraction", "probability", "trapezoid", "common")),
    *("forget_at_95", "mu95", "forget_quality", "utility", "drift"),
    *("recovery_matched", "recovery_best", "distance_to_retained", "distance_to_planted"),
)


@dataclass(frozen=True, eq=False)
class Verdict:
    """The judgment of a table.

    rows: one comparison a row: verdict, difference, its 90% and 95% intervals, n (seeds), draws, p-values with the
        levels they were held against, and the number of seeds that would decide
    sentence: all of it in one sentence
    status: with looks, "decided", "go on" or "cap reached"; else empty
    """

    rows: pd.DataFrame
    sentence: str
    metric: str
    bound: float
    arm: str
    control: str
    looks: Looks | None = None
    status: Status | None = None

    def __repr__(self) -> str:
        shown = ["localizer", "objective", "verdict", "difference", "low95", "high95", "n", "draws"]
        return f"{self.sentence}\n{self.rows[shown].to_string(index=False, float_format='{:+.4f}'.format)}"


def verdict(
    table: pd.DataFrame,
    *,
    bound: float = 0.02,
    metric: str = "aues",
    arm: str | None = None,
    control: str = "random",
    better: str | None = None,
    min_seeds: int = 3,
    min_draws: int | None = None,
    looks: Looks | None = None,
) -> Verdict:
    """Judge a tidy table by the rule of this module.

    table: columns localizer, objective, arm, seed, draw, step, metric, value; model, facts, kind and budget
        are kept apart where they are there, and attacked runs (column attack) are left out
    bound: a difference inside ± bound counts as none, in units of the metric
    arm: by default "oracle" where the table has it (a controlled study), else "top"
    control: the arm to compare with, of the same localizer or without one ("kind", "all", "none")
    better: "higher" or "lower"; by default the known direction of the metric
    min_seeds, min_draws: with less than these the verdict is descriptive. By default 5 draws for a located mask; 1 for
        "oracle", whose region is itself drawn anew for each seed: there the seeds replicate, and draws only sharpen.
    looks: for a study that adds seeds until it is decided, its plan; the rule is then corrected for it
    """
    if not bound > 0:
        raise ValueError(f"verdict got bound={bound}; expected a positive difference that counts as none.")
    table = tidy(table)
    arm = arm or primary_arm(table)
    min_draws = (1 if arm == "oracle" else 5) if min_draws is None else min_draws
    better = _direction(metric, better)
    pairs, setting = _pairs(table, metric, arm, control)
    if np.isinf(pairs[["arm_value", "control_value"]].astype(float)).to_numpy().any():
        raise ValueError(f"verdict got infinite values of {metric}; make them NaN, which counts as no pair.")
    found, differences = [], []
    for key, group in pairs.groupby(setting, sort=False, dropna=False):
        paired = group.dropna(subset=["arm_value", "control_value"])
        row = dict(zip(setting, key, strict=True)) | {"draws": int(paired.draws.min()) if len(paired) else 0}
        row |= {"above": int(paired.above.sum()), "of": int(paired.draws.sum())}
        few_draws = control == "random" and row["draws"] < min_draws
        row["too_few"] = "seeds" if len(paired) < min_seeds else "draws" if few_draws else ""
        found.append(row)
        differences.append((group.arm_value - group.control_value).to_numpy(float))
    rows = pd.DataFrame(found)
    judged = (rows.too_few == "").to_numpy()
    parts = [
        judge({i: differences[i] for i in np.flatnonzero(some)}, bound=bound, looks=looks) for some in (judged, ~judged)
    ]
    rows = rows.join(pd.concat([part for part in parts if len(part)]))
    names = {"higher": "better", "lower": "worse"} if better == "higher" else {"higher": "worse", "lower": "better"}
    rows["verdict"] = rows.verdict.replace(names).where(judged, "descriptive")
    alpha = ALPHA / max(1, int(judged.sum()))
    alpha = min(looks.level(looks.cap, alpha), 2 * looks.level(looks.cap, alpha / 2)) if looks else alpha
    for name, supposed in (("n_if_none", 0 * rows.difference), ("n_if_observed", rows.difference)):
        rows[name] = [
            n_to_decide(sd, bound=bound, difference=mean, alpha=alpha) if word == "undecided" and sd >= 0 else math.nan
            for sd, mean, word in zip(rows.sd, supposed, rows.verdict, strict=True)
        ]
    seen = int((rows.n + rows.left_out).min())
    status = status_of(rows.verdict, seen, looks) if looks else None
    sentence = _sentence(rows, metric, arm, control, bound, better) + (_looked(seen, looks, status) if looks else "")
    return Verdict(rows, sentence, metric, bound, arm, control, looks, status)


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """The table with "" where it names no localizer, objective or attack, which comes back from a CSV file as NaN."""
    words = [name for name in WORDS if name in table.columns]
    return table.assign(**{name: table[name].astype(object).where(table[name].notna(), "") for name in words})


def primary_arm(table: pd.DataFrame) -> str:
    """The arm that a table is about: "oracle" in a controlled study, else "top"."""
    return "oracle" if "arm" in table.columns and (table.arm == "oracle").any() else "top"


def contrasts(table: pd.DataFrame, *, metric: str = "aues", control: str = "random") -> pd.DataFrame:
    """The secondary contrasts of a table, paired by seed, each with its ordinary 95% interval and no verdict.

    The primary arm minus every other arm, and every located mask minus the primary arm and minus its control, in
    `metric`; and the primary arm minus its control in every other outcome of whole runs (OUTCOMES).

    Columns: arm, control, metric, the settings, n, draws, difference, sd, low95, high95
    """
    table = tidy(table)
    arm = primary_arm(table)
    arms = [name for name in table.arm.unique() if name not in (arm, control, "top")]
    wanted = [(arm, other, metric) for other in arms]
    if arm != "top" and (table.arm == "top").any():
        wanted += [("top", control, metric), ("top", arm, metric)]
    wanted += [(arm, control, other) for other in OUTCOMES if other != metric]
    whole = table[table.step == -1]
    there = set(zip(whole.arm, whole.metric, strict=True))
    found = []
    for first, second, name in wanted:
        if {(first, name), (second, name)} - there:
            continue
        pairs, setting = _pairs(table, name, first, second)
        for key, group in pairs.groupby(setting, sort=False, dropna=False):
            paired = group.dropna(subset=["arm_value", "control_value"])
            if paired.empty:
                continue
            row = {"arm": first, "control": second, "metric": name} | dict(zip(setting, key, strict=True))
            # The bound has no part in an interval.
            result = compare_paired((paired.arm_value - paired.control_value).to_numpy(float), bound=1.0)
            kept = {column: result[column] for column in ("n", "difference", "sd", "low95", "high95")}
            found.append(row | {"draws": int(paired.draws.min())} | kept)
    return pd.DataFrame(found)


def _direction(metric: str, better: str | None) -> str:
    if better is None:
        # Here, because judging a table that is given its direction needs no model and none of its imports.
        from locus.evaluate import DIRECTION

        better = DIRECTION.get(metric, "")
    if better not in ("higher", "lower"):
        raise ValueError(
            f'verdict cannot tell which direction of {metric!r} is better; pass better="higher" or better="lower".'
        )
    return better


def _pairs(table: pd.DataFrame, metric: str, arm: str, control: str) -> tuple[pd.DataFrame, list[str]]:
    """One row a (setting, seed): the arm's value, the mean over the control's draws, how many it is above."""
    if missing := [name for name in NEEDED if name not in table.columns]:
        raise ValueError(
            f"verdict: the table has no column {', '.join(missing)}; it has "
            f"{', '.join(map(str, table.columns))}. Expected at least {', '.join(NEEDED)}."
        )
    rows = table[(table.metric == metric) & (table.step == -1)]
    if rows.empty:
        known = ", ".join(sorted(table.metric[table.step == -1].astype(str).unique())) or "none"
        raise ValueError(f"verdict: no row has metric {metric!r} and step -1; metrics of whole runs here: {known}.")
    if "attack" in rows and (rows.attack == "").any():
        rows = rows[rows.attack == ""]
    setting = [name for name in SETTING if name in table.columns]
    mine, others = rows[rows.arm == arm], rows[rows.arm == control]
    if mine.empty or others.empty:
        arms = ", ".join(sorted(rows.arm.astype(str).unique()))
        raise ValueError(
            f"verdict compares arm {arm!r} with {control!r}; the rows of {metric!r} have the arms: {arms}. "
            "Pass arm= and control= of these."
        )
    key = [*setting, "seed"]
    if (twice := mine.duplicated(key) | (mine.draw != mine.draw.iloc[0])).any():
        first = mine[twice].iloc[0]
        raise ValueError(
            f"verdict: arm {arm!r} has several values of {metric!r} for {first.localizer} {first.objective} "
            f"seed {first.seed}; expected one. Was a table joined to itself?"
        )
    if others.duplicated([*key, "draw"]).any():
        raise ValueError(f"verdict: some draws of arm {control!r} are in the table twice; drop the duplicates.")
    # Arms without a localizer (all components of the kind, …) are controls of every localizer.
    shared = [name for name in key if name not in _unset(others, mine, key)]
    merged = mine[[*key, "value"]].merge(others[[*shared, "value"]], on=shared, how="left", suffixes=("", "_control"))
    merged["is_above"] = merged.value > merged.value_control
    merged["drawn"] = merged.value_control.notna()
    pairs = merged.groupby(key, sort=False, dropna=False, as_index=False).agg(
        arm_value=("value", "first"),
        control_value=("value_control", "mean"),
        draws=("drawn", "sum"),
        above=("is_above", "sum"),
    )
    return pairs, setting


def _unset(others: pd.DataFrame, mine: pd.DataFrame, key: Sequence[str]) -> list[str]:
    """Settings that the control lacks: localizer (kind, all, none), objective (none), kind and budget."""
    free = [name for name in ("localizer", "objective") if name in key and (others[name] == "").all()]
    disjoint = [n for n in ("kind", "budget") if n in key and not set(others[n].dropna()) & set(mine[n].dropna())]
    return free + (disjoint if "localizer" in free else [])


def _sentence(rows: pd.DataFrame, metric: str, arm: str, control: str, bound: float, better: str) -> str:
    shown = metric.upper() if metric == "aues" else metric.replace("_", " ")
    lead = {
        "top": "editing the located components",
        "bottom": "editing the lowest-scored components",
        "oracle": "editing the true location (oracle)",
    }.get(arm, f"arm {arm}")
    against = {
        "random": "random regions of the same size apart from it"
        if arm == "oracle"
        else "random ones of the same size",
        "kind": "all components of the kind",
        "all": "all parameters",
    }.get(control, f"arm {control}")
    if len(rows) <= 4:
        parts = [_clause(row, rows, shown, bound, better) for row in rows.itertuples()]
    else:
        parts = []
        for word in ("better", "worse", "equivalent", "undecided", "descriptive"):
            if len(some := rows[rows.verdict == word]):
                names = ", ".join(_name(row, rows) for row in some.head(4).itertuples())
                parts.append(f"{word} in {len(some)} of {len(rows)} comparisons ({names}{', …' * (len(some) > 4)})")
    text = f"{lead} against {against}: {'; '.join(parts)}."
    return text[0].upper() + text[1:]


def _looked(n: int, looks: Looks, status: Status | None) -> str:
    """What the looks come to, as a sentence to follow the verdict."""
    which = f"look {looks.at.index(n) + 1} of {len(looks.at)}" if n in looks.at else "no planned look"
    then = {"go on": f"not all is decided: go on to {looks.next(n)}", "cap reached": "the cap is reached"}
    return (
        f" After {n} of at most {looks.cap} seeds ({which}; tests and intervals are corrected for the looks) "
        f"{then.get(str(status), 'all is decided')}."
    )


def _name(row, rows: pd.DataFrame) -> str:
    """Localizer and objective, with the other settings where they differ between the rows."""
    parts = [row.localizer, row.objective]
    others = [n for n in SETTING if n not in ("localizer", "objective")]
    parts += [f"{n} {getattr(row, n)}" for n in others if n in rows and rows[n].nunique(dropna=False) > 1]
    return " ".join(str(part) for part in parts if part not in ("", None)) or "the mask"


def _clause(row, rows: pd.DataFrame, metric: str, bound: float, better: str) -> str:
    name, seeds = _name(row, rows), f"n = {row.n} seed{'' if row.n == 1 else 's'}"
    if row.verdict == "descriptive":
        if not row.n:
            return f"{name} has no complete pair of runs"
        ranked = f"{'above' if better == 'higher' else 'not above'}"
        count = row.above if better == "higher" else row.of - row.above
        return (
            f"{name} is {ranked} {count} of {row.of} random masks in {metric} (mean difference "
            f"{row.difference:+.3f}, {seeds}; descriptive: too few {row.too_few} to decide)"
        )
    interval = f"{row.difference:+.3f} {metric}, 95% interval [{row.low95:+.3f}, {row.high95:+.3f}], {seeds}"
    if row.verdict == "equivalent":
        excludes = row.low95 > 0 or row.high95 < 0
        note = ", though its 95% interval excludes 0" if excludes else ""
        note += ", every seed exactly the same: check that the edits differ" if row.sd == 0 == row.difference else ""
        return f"{name} is equivalent within ± {bound:g}{note} ({interval})"
    if row.verdict == "undecided":
        holm = "which excludes 0 only before Holm's correction; " * bool(row.low95 > 0 or row.high95 < 0)
        return (
            f"{name} is undecided ({interval}; {holm}about {row.n_if_none:.0f} seeds would decide if there "
            f"is no difference, {row.n_if_observed:.0f} if it is as observed)"
        )
    return f"{name} is {row.verdict} ({interval})"


@dataclass(frozen=True, eq=False)
class LocalizationEffect:
    """How well the causal effect of a layer predicts what editing it alone unlearns (Hase et al. 2023).

    spearman: over all (fact, layer) pairs; low, high: its 95% interval, resampling whole facts
    within: mean over facts of the Spearman correlation over layers of one fact
    r2: one row a predictor ("layer", "effect", "both"): r2, adjusted (for the number of parameters) and
        cross_fact (out of sample: predictions for facts that the fit has not seen; can be negative)
    gain, p_gain: adjusted R2 of both minus that of layer, and its F-test, which takes rows as independent
    n_facts, n_layers, n: what went in; left_out rows had no finite value
    """

    spearman: float
    low: float
    high: float
    within: float
    r2: pd.DataFrame
    gain: float
    p_gain: float
    n_facts: int
    n_layers: int
    n: int
    left_out: int

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if math.isnan(self.spearman):
            return f"Too few or constant values ({self.n} pairs of fact and layer) to relate them to unlearning."
        r2 = self.r2.adjusted
        return (
            f"Across {self.n_facts} facts and {self.n_layers} layers, the causal effect of a layer and the "
            f"unlearning by editing it alone have a Spearman correlation of {self.spearman:+.2f} (95% "
            f"interval [{self.low:+.2f}, {self.high:+.2f}], clustered by fact); adjusted R² is "
            f"{r2['layer']:.3f} for the layer, {r2['effect']:.3f} for the effect and "
            f"{r2['both']:.3f} for both."
        )


def localization_effect(frame: pd.DataFrame, *, samples: int = 1000, seed: int = 0) -> LocalizationEffect:
    """Relate causal effect and unlearning of one layer edited alone, over facts and layers.

    Three least-squares fits of unlearning, as in Hase et al. (2023): on the layer (a category), on the
    effect, and on both with their full interaction. adjusted R2 = 1 - (1 - R2)(n - 1)/(n - rank). Cross-fact
    R2 = 1 - sum of squared errors / sum of squares about the training mean, on facts left out of the fit (up
    to ten folds).

    frame: columns layer, fact, effect (by patching; positive = the layer supports the fact) and unlearning
    """
    if missing := [name for name in ("layer", "fact", "effect", "unlearning") if name not in frame.columns]:
        raise ValueError(
            f"localization_effect: no column {', '.join(missing)} in {', '.join(map(str, frame.columns))}; "
            "expected layer, fact, effect and unlearning."
        )
    finite = np.isfinite(frame[["effect", "unlearning"]].to_numpy(float)).all(1)
    rows = frame[finite]
    fact, names = pd.factorize(rows.fact)
    layer, layers = pd.factorize(rows.layer, sort=True)
    x, y = rows.effect.to_numpy(float), rows.unlearning.to_numpy(float)
    members = [np.flatnonzero(fact == i) for i in range(len(names))]
    rng = np.random.default_rng(seed)
    drawn = []
    if len(members) > 1 and not math.isnan(_spearman(x, y)):
        for choice in rng.integers(0, len(members), (samples, len(members))):
            index = np.concatenate([members[i] for i in choice])
            drawn.append(_spearman(x[index], y[index]))
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if drawn else (math.nan, math.nan)
    within = [r for m in members if not math.isnan(r := _spearman(x[m], y[m]))]
    one = np.eye(len(layers))[layer]
    designs = {"layer": one, "effect": np.column_stack([np.ones(len(x)), x])}
    designs["both"] = np.column_stack([one, one * x[:, None]])
    fits = {name: _fit(design, y, fact) for name, design in designs.items()}
    r2 = pd.DataFrame({name: fit[:3] for name, fit in fits.items()}, index=["r2", "adjusted", "cross_fact"]).T
    return LocalizationEffect(
        spearman=_spearman(x, y),
        low=float(low),
        high=float(high),
        within=float(np.mean(within)) if within else math.nan,
        r2=r2,
        gain=float(r2.adjusted["both"] - r2.adjusted["layer"]),
        p_gain=_f_test(r2.r2["layer"], r2.r2["both"], fits["layer"][3], fits["both"][3], len(y)),
        n_facts=len(names),
        n_layers=len(layers),
        n=len(y),
        left_out=int((~finite).sum()),
    )


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])


def _fit(design: np.ndarray, y: np.ndarray, fact: np.ndarray) -> tuple[float, float, float, int]:
    """R2, adjusted R2, cross-fact R2 and the rank of a least-squares fit."""
    n, rank = len(y), int(np.linalg.matrix_rank(design)) if len(y) else 0
    if n <= rank or np.ptp(y) == 0:
        return math.nan, math.nan, math.nan, rank
    r2 = 1 - ((y - design @ np.linalg.lstsq(design, y)[0]) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    folds = min(10, int(fact.max()) + 1)
    error = total = 0.0
    for fold in range(folds if folds > 1 else 0):
        out = fact % folds == fold
        predicted = design[out] @ np.linalg.lstsq(design[~out], y[~out])[0]
        error += ((y[out] - predicted) ** 2).sum()
        total += ((y[out] - y[~out].mean()) ** 2).sum()
    cross = 1 - error / total if total else math.nan
    return float(r2), float(1 - (1 - r2) * (n - 1) / (n - rank)), float(cross), rank


def _f_test(small: float, large: float, rank_small: int, rank_large: int, n: int) -> float:
    """p-value of the larger of two nested fits explaining no more than the smaller."""
    more, left = rank_large - rank_small, n - rank_large
    if math.isnan(small) or math.isnan(large) or more < 1 or left < 1 or large >= 1:
        return math.nan
    return float(stats.f.sf((large - small) / more / ((1 - large) / left), more, left))
