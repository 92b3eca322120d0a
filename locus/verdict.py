"""Verdicts: is editing the located components better than, worse than or equivalent to editing random ones?

The rule is fixed before the data are seen. For each localizer and objective, the difference in one metric
between the located mask (arm "top") and the mean over the draws of its random controls is paired by seed.

1. the 90% interval of the mean difference lies inside ± bound   -> "equivalent" (also where it excludes 0)
2. else the 95% interval excludes 0                              -> "better" or "worse"
3. else                                                          -> "undecided", and the n that would decide

Step 1 is two one-sided tests at 5% (Schuirmann 1987), step 2 a two-sided test at 5%; with several
comparisons, both families of p-values are adjusted by Holm's method first. Intervals are Student's below 20
seeds and bootstrap-t from there on. Few seeds or few draws decide nothing: they give a "descriptive" verdict,
the rank among the draws. Intervals are printed unadjusted, so one may exclude 0 where Holm leaves the
comparison undecided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

NEEDED = ("localizer", "objective", "arm", "seed", "draw", "step", "metric", "value")
SETTING = ("model", "facts", "kind", "budget", "localizer", "objective")
BOOTSTRAP_FROM = 20
WILCOXON_FROM = 6


@dataclass(frozen=True, eq=False)
class Verdict:
    """The judgment of a table.

    rows: one comparison a row: verdict, difference, its 90% and 95% intervals, n (seeds), draws, p-values,
        and the number of seeds that would decide
    sentence: all of it in one sentence
    """

    rows: pd.DataFrame
    sentence: str
    metric: str
    bound: float

    def __repr__(self) -> str:
        shown = ["localizer", "objective", "verdict", "difference", "low95", "high95", "n", "draws"]
        return f"{self.sentence}\n{self.rows[shown].to_string(index=False, float_format='{:+.4f}'.format)}"


def verdict(
    table: pd.DataFrame,
    *,
    bound: float = 0.02,
    metric: str = "aues",
    arm: str = "top",
    control: str = "random",
    better: str | None = None,
    min_seeds: int = 3,
    min_draws: int = 5,
) -> Verdict:
    """Judge a tidy table by the rule of this module.

    table: columns localizer, objective, arm, seed, draw, step, metric, value; model, facts, kind and budget
        are kept apart where they are there
    bound: a difference inside ± bound counts as none, in units of the metric
    control: the arm to compare with, of the same localizer or without one ("kind", "all", "none")
    better: "higher" or "lower"; by default the known direction of the metric
    min_seeds, min_draws: with less than these the verdict is descriptive
    """
    if not bound > 0:
        raise ValueError(f"verdict got bound={bound}; expected a positive difference that counts as none.")
    better = _direction(metric, better)
    pairs, setting = _pairs(table, metric, arm, control)
    found = []
    for key, group in pairs.groupby(setting, sort=False, dropna=False):
        paired = group.dropna(subset=["arm_value", "control_value"])
        difference = (paired.arm_value - paired.control_value).to_numpy(float)
        row = dict(zip(setting, key, strict=True))
        row |= {"left_out": len(group) - len(paired), "draws": int(paired.draws.min()) if len(paired) else 0}
        row |= {"above": int(paired.above.sum()), "of": int(paired.draws.sum())}
        row |= compare_paired(difference, bound=bound)
        few_draws = control == "random" and row["draws"] < min_draws
        row["too_few"] = "seeds" if len(difference) < min_seeds else "draws" if few_draws else ""
        found.append(row)
    rows = pd.DataFrame(found)
    judged = rows.too_few == ""
    rows["holm_equivalent"], rows["holm_different"] = np.nan, np.nan
    rows.loc[judged, "holm_equivalent"] = holm(rows.p_equivalent[judged].to_numpy())
    rows.loc[judged, "holm_different"] = holm(rows.p_different[judged].to_numpy())
    alpha = 0.05 / max(1, int(judged.sum()))
    rows["verdict"] = [_decide(row, better) for row in rows.itertuples()]
    undecided = rows.verdict == "undecided"
    rows["n_if_none"] = [
        n_to_decide(sd, bound=bound, alpha=alpha) if u else math.nan for sd, u in zip(rows.sd, undecided, strict=True)
    ]
    rows["n_if_observed"] = [
        n_to_decide(row.sd, bound=bound, difference=row.difference, alpha=alpha) if u else math.nan
        for row, u in zip(rows.itertuples(), undecided, strict=True)
    ]
    return Verdict(rows, _sentence(rows, metric, arm, control, bound, better), metric, bound)


def compare_paired(difference: Float[np.ndarray, " seed"], *, bound: float, seed: int = 0) -> dict[str, Any]:
    """Mean paired difference, its intervals and p-values, unadjusted.

    p_equivalent = max of the two one-sided p-values of mean <= -bound and mean >= bound; it is below 0.05
    exactly where the 90% interval lies inside ± bound. p_different is two-sided, below 0.05 exactly where the
    95% interval excludes 0. Student's t below n = 20, from there bootstrap-t (Efron & Tibshirani 1993,
    section 12.5).
    """
    n = len(difference)
    mean = float(difference.mean()) if n else math.nan
    sd = float(difference.std(ddof=1)) if n > 1 else math.nan
    result = {"n": n, "difference": mean, "sd": sd}
    if n < 2:
        names = ("low90", "high90", "low95", "high95", "p_equivalent", "p_different", "p_wilcoxon")
        return result | dict.fromkeys(names, math.nan)
    error = sd / math.sqrt(n)
    if error <= 1e-12 * max(1.0, abs(mean)):  # the same difference for every seed: nothing left to estimate
        result |= dict.fromkeys(("low90", "high90", "low95", "high95"), mean)
        result |= {"p_equivalent": float(abs(mean) >= bound), "p_different": float(abs(mean) <= 1e-12)}
    elif n < BOOTSTRAP_FROM:
        t = stats.t(n - 1)
        for level, name in ((0.95, "90"), (0.975, "95")):
            result |= {f"low{name}": mean - t.ppf(level) * error, f"high{name}": mean + t.ppf(level) * error}
        result["p_equivalent"] = max(t.sf((mean + bound) / error), t.cdf((mean - bound) / error))
        result["p_different"] = 2 * t.sf(abs(mean) / error)
    else:
        sample = difference[np.random.default_rng(seed).integers(0, n, (10_000, n))]
        spread = np.maximum(sample.std(1, ddof=1), 1e-12) / math.sqrt(n)
        t_star = np.sort((sample.mean(1) - mean) / spread)
        for tail, name in ((0.05, "90"), (0.025, "95")):
            low, high = np.quantile(t_star, [tail, 1 - tail])
            result |= {f"low{name}": mean - high * error, f"high{name}": mean - low * error}
        above = [(t_star >= (mean - edge) / error).mean() for edge in (-bound, 0.0, bound)]
        result["p_equivalent"] = max(above[0], 1 - above[2])
        result["p_different"] = min(1.0, 2 * min(above[1], 1 - above[1]))
    varied = n >= WILCOXON_FROM and np.any(difference != 0)
    result["p_wilcoxon"] = float(stats.wilcoxon(difference).pvalue) if varied else math.nan
    return {key: value if key == "n" else float(value) for key, value in result.items()}


def holm(p: Float[np.ndarray, " comparison"]) -> Float[np.ndarray, " comparison"]:
    """Holm's step-down adjusted p-values, max over j <= i of min(1, (m - j) p_(j)); in the order given."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]))
    return adjusted


def power(
    n: int, sd: float, *, bound: float = 0.02, difference: float = 0.0, alpha: float = 0.05
) -> tuple[float, float]:
    """Probability that n seeds find (equivalence, a difference), if the true mean difference is `difference`.

    With the sample standard deviation s, equivalence needs |mean| < bound - t(1 - alpha) s / sqrt(n), and a
    difference |mean| > t(1 - alpha/2) s / sqrt(n). Given s both are normal probabilities; they are averaged
    over the chi distribution of s.
    """
    if sd == 0:
        return float(abs(difference) < bound), float(difference != 0)
    error = sd / math.sqrt(n)
    s = error * np.sqrt(stats.chi2(n - 1).ppf((np.arange(400) + 0.5) / 400) / (n - 1))
    half = np.maximum(bound - stats.t(n - 1).ppf(1 - alpha) * s, 0)
    equivalent = stats.norm.cdf((half - difference) / error) - stats.norm.cdf((-half - difference) / error)
    reach = stats.t(n - 1).ppf(1 - alpha / 2) * s
    different = stats.norm.cdf((-reach - difference) / error) + stats.norm.sf((reach - difference) / error)
    return float(equivalent.mean()), float(different.mean())


def n_to_decide(
    sd: float,
    *,
    bound: float = 0.02,
    difference: float = 0.0,
    wanted: float = 0.8,
    alpha: float = 0.05,
    most: int = 100_000,
) -> int:
    """The smallest number of seeds that finds equivalence, or a difference, with probability `wanted`.

    sd: standard deviation of the paired differences over seeds
    difference: the true mean difference that is supposed
    most: returned where even that many would not do
    """
    if not sd >= 0 or not bound > 0:
        raise ValueError(f"n_to_decide got sd={sd} and bound={bound}; expected sd >= 0 and bound > 0.")

    def enough(n: int) -> bool:
        return max(power(n, sd, bound=bound, difference=difference, alpha=alpha)) >= wanted

    high = 2
    while not enough(high):
        if high >= most:
            return most
        high = min(2 * high, most)
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


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
    free = [name for name in ("localizer", "objective") if name in key and (others[name].fillna("") == "").all()]
    disjoint = [n for n in ("kind", "budget") if n in key and not set(others[n].dropna()) & set(mine[n].dropna())]
    return free + (disjoint if "localizer" in free else [])


def _decide(row, better: str) -> str:
    if row.too_few:
        return "descriptive"
    if row.holm_equivalent < 0.05:
        return "equivalent"
    if row.holm_different < 0.05:
        return "better" if (row.difference > 0) == (better == "higher") else "worse"
    return "undecided"


def _sentence(rows: pd.DataFrame, metric: str, arm: str, control: str, bound: float, better: str) -> str:
    shown = metric.upper() if metric == "aues" else metric.replace("_", " ")
    lead = {"top": "editing the located components", "bottom": "editing the lowest-scored components"}.get(
        arm, f"arm {arm}"
    )
    against = {
        "random": "random ones of the same size",
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


def _name(row, rows: pd.DataFrame) -> str:
    """Localizer and objective, with the other settings where they differ between the rows."""
    parts = [row.localizer, row.objective]
    parts += [f"{n} {getattr(row, n)}" for n in SETTING[:4] if n in rows and rows[n].nunique(dropna=False) > 1]
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
