"""Paired differences, one a seed: intervals, tests, the rule that judges them, and how many seeds it takes.

The rule, for each comparison:

1. the 90% interval of the mean difference lies inside ± bound   -> "equivalent" (also where it excludes 0)
2. else the 95% interval excludes 0                              -> "higher" or "lower"
3. else                                                          -> "undecided"

Step 1 is two one-sided tests at 5% (Schuirmann 1987), step 2 a two-sided test at 5%. Among several comparisons both
families are tested by Holm's method, step down; with several looks at growing numbers of seeds, at the corrected levels
of `locus.sequential`. Holm's method holds at a look as it does without: where a true null is claimed falsely, its
p-value is below its level for alpha / m at that look, and over all looks this happens at most alpha / m of the time
(Maurer & Bretz 2013). Only the newest look is tested, not the earlier ones again, so the order of the seeds is of no
account and each verdict is what the intervals say.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy import stats

from locus.sequential import Looks

ALPHA = 0.05
BOOTSTRAP_FROM = 20
WILCOXON_FROM = 6
Status = Literal["decided", "go on", "cap reached"]


def compare_paired(
    difference: Float[np.ndarray, " seed"],
    *,
    bound: float,
    levels: tuple[float, float] = (ALPHA, ALPHA),
    seed: int = 0,
) -> dict[str, Any]:
    """Mean paired difference, its intervals and p-values, unadjusted for other comparisons.

    p_equivalent = max of the two one-sided p-values of mean <= -bound and mean >= bound; it is below levels[0]
    exactly where the 90% interval lies inside ± bound. p_different is two-sided, below levels[1] exactly where the
    95% interval excludes 0. Student's t below n = 20, from there bootstrap-t (Efron & Tibshirani 1993,
    section 12.5).

    levels: of the tests that the intervals stand for. Lower than 0.05 at one of several looks, where 90% and 95%
        are what the intervals of all looks cover together.
    """
    n = len(difference)
    mean = float(difference.mean()) if n else math.nan
    sd = float(difference.std(ddof=1)) if n > 1 else math.nan
    result = {"n": n, "difference": mean, "sd": sd}
    tails = ((levels[0], "90"), (levels[1] / 2, "95"))
    if n < 2:
        names = ("low90", "high90", "low95", "high95", "p_equivalent", "p_different", "p_wilcoxon")
        return result | dict.fromkeys(names, math.nan)
    error = sd / math.sqrt(n)
    if error <= 1e-12 * max(1.0, abs(mean)):  # the same difference for every seed: nothing left to estimate
        result |= dict.fromkeys(("low90", "high90", "low95", "high95"), mean)
        result |= {"p_equivalent": float(abs(mean) >= bound), "p_different": float(abs(mean) <= 1e-12)}
    elif n < BOOTSTRAP_FROM:
        t = stats.t(n - 1)
        for tail, name in tails:
            result |= {f"low{name}": mean - t.isf(tail) * error, f"high{name}": mean + t.isf(tail) * error}
        result["p_equivalent"] = max(t.sf((mean + bound) / error), t.cdf((mean - bound) / error))
        result["p_different"] = 2 * t.sf(abs(mean) / error)
    else:
        sample = difference[np.random.default_rng(seed).integers(0, n, (10_000, n))]
        spread = np.maximum(sample.std(1, ddof=1), 1e-12) / math.sqrt(n)
        t_star = np.sort((sample.mean(1) - mean) / spread)
        for tail, name in tails:
            low, high = np.quantile(t_star, [tail, 1 - tail])
            result |= {f"low{name}": mean - high * error, f"high{name}": mean - low * error}
        # The data themselves count as one more sample, so no p-value is 0.
        above = [((t_star >= (mean - edge) / error).sum() + 1) / 10_001 for edge in (-bound, 0.0)]
        below = [((t_star <= (mean - edge) / error).sum() + 1) / 10_001 for edge in (bound, 0.0)]
        result["p_equivalent"] = max(above[0], below[0])
        result["p_different"] = min(1.0, 2 * min(above[1], below[1]))
    varied = n >= WILCOXON_FROM and np.any(difference != 0)
    result["p_wilcoxon"] = float(stats.wilcoxon(difference).pvalue) if varied else math.nan
    return {key: value if key == "n" else float(value) for key, value in result.items()}


def judge(
    differences: Mapping[Hashable, Float[np.ndarray, " seed"]], *, bound: float = 0.02, looks: Looks | None = None
) -> pd.DataFrame:
    """Judge several comparisons by the rule of this module, one row each, indexed as they are.

    differences: one value a seed; NaN where a seed has no pair, which is left out (and counts as looked at)
    looks: how the tests are corrected where more seeds may follow; None for a number of seeds fixed beforehand

    Columns: verdict (equivalent, higher, lower, undecided), n, left_out, the columns of `compare_paired`, and
    level_equivalent and level_different, what p_equivalent and p_different were held against in the end.
    """

    def one_sided(row: int, alpha: float) -> float:
        return looks.level(seen[row], alpha) if looks else alpha

    def two_sided(row: int, alpha: float) -> float:
        return 2 * one_sided(row, alpha / 2)

    values = [np.asarray(d, dtype=float) for d in differences.values()]
    seen = [len(d) for d in values]
    found = []
    for row, d in enumerate(values):
        whole = d[~np.isnan(d)]
        tests = (one_sided(row, ALPHA), two_sided(row, ALPHA)) if len(whole) > 1 else (ALPHA, ALPHA)
        found.append({"left_out": len(d) - len(whole)} | compare_paired(whole, bound=bound, levels=tests))
    rows = pd.DataFrame(found, index=pd.Index(differences.keys(), tupleize_cols=False))
    if not len(rows):
        return rows
    equivalent, rows["level_equivalent"] = step_down(rows.p_equivalent.to_numpy(), one_sided)
    different, rows["level_different"] = step_down(rows.p_different.to_numpy(), two_sided)
    side = np.where(rows.difference > 0, "higher", "lower")
    verdict = np.where(equivalent, "equivalent", np.where(different, side, "undecided"))
    rows.insert(0, "verdict", verdict.astype(object))
    return rows


def step_down(
    p: Float[np.ndarray, " comparison"], level: Callable[[int, float], float]
) -> tuple[Bool[np.ndarray, " comparison"], Float[np.ndarray, " comparison"]]:
    """Holm's step-down test, each p-value held against a level of its own.

    With m comparisons left, each is tested as if alone, at alpha = 0.05 / m. What is found leaves, and the rest is
    tested again.

    level: (comparison, alpha) -> the level that its p-value must be below to be found with that alpha
    Returns which are found, and the last level of each; NaN where the p-value is.
    """
    found, last = np.zeros(len(p), dtype=bool), np.full(len(p), math.nan)
    while left := [i for i in range(len(p)) if not found[i] and not math.isnan(p[i])]:
        # Those without a p-value may get one with more seeds, so they keep their share.
        alpha = ALPHA / int((~found).sum())
        for i in left:
            last[i] = level(i, alpha)
        new = [i for i in left if p[i] < last[i]]
        if not new:
            break
        found[new] = True
    return found, last


@dataclass(frozen=True, eq=False)
class Decision:
    """What to do after a look: "decided", "go on" (to `next` seeds) or "cap reached"; the rows are those of `judge`."""

    status: Status
    n: int
    next: int | None
    rows: pd.DataFrame


def decide(
    differences: Mapping[Hashable, Float[np.ndarray, " seed"]], *, looks: Looks, bound: float = 0.02
) -> Decision:
    """Whether to stop: a function of the differences so far, the planned looks with their cap, and the bound.

    differences: of each comparison, one value a seed, NaN for a seed without a pair
    Only at a planned look can it be "decided", and then every comparison is.
    """
    rows = judge(differences, bound=bound, looks=looks)
    n = min((len(d) for d in differences.values()), default=0)
    status = status_of(rows.verdict, n, looks) if len(rows) else "go on"
    return Decision(status, n, looks.next(n) if status == "go on" else None, rows)


def status_of(verdicts: Sequence[str] | pd.Series, n: int, looks: Looks) -> Status:
    """The status of a study with these verdicts after n seeds."""
    if n in looks.at and not set(verdicts) & {"undecided", "descriptive"}:
        return "decided"
    return "cap reached" if n >= looks.cap else "go on"


def power(
    n: int, sd: float, *, bound: float = 0.02, difference: float = 0.0, alpha: float = ALPHA
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
    alpha: float = ALPHA,
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
