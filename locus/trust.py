"""How far to trust a ranking: against exact patching, over resamples of the facts, and at what cost.

Left out: agreement on other facts than the ranking was made from; make it again on those, and see `scores.agreement`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from locus.localize import ActivationPatching, localize
from locus.metrics import logit_difference
from locus.scores import Scores, agreement_of

MEASURES = ("pearson", "spearman", "overlap")


@dataclass(frozen=True, eq=False)
class Trust:
    """What `trust` measured.

    Attributes:
        rows: of, measure, value, low, high (95%), chance, n (components). of = "exact": agreement of the mean scores
            with exact patching on a random sample, bootstrap interval over facts; "resamples": of the means over
            resampled facts with the ranking itself, mean and central 95% of resamples.
        against: the exact method.
        fraction: of the components, that is the top.
        facts: how many.
        passes: forward and backward passes of one prompt that the ranking took, None if unknown.
    """

    rows: pd.DataFrame
    against: object
    fraction: float
    facts: int
    passes: tuple[float, float] | None

    def __str__(self) -> str:
        names = {"pearson": "Pearson", "spearman": "Spearman"}
        lines = []
        for of, rows in self.rows.groupby("of", sort=False):
            found = []
            for r in rows.itertuples():
                names["overlap"] = f"overlap of the top {max(1, round(self.fraction * r.n))}"
                if np.isnan(r.value):
                    found.append(f"{names[r.measure]} undefined, as all scores are equal")
                    continue
                chance = f" (chance {r.chance:.2f})" if r.measure == "overlap" else ""
                found.append(f"{names[r.measure]} {r.value:.2f} [{r.low:.2f}, {r.high:.2f}]{chance}")
            what = f"agreement with {self.against!r}" if of == "exact" else "stability over resampled facts"
            lines.append(f"{what}, n = {rows.n.iloc[0]} components, {self.facts} facts: {', '.join(found)}")
        if self.passes:
            passes = "{:,.0f} forward and {:,.0f} backward passes of one prompt".format(*self.passes)
            lines.append(f"cost of all facts together: {passes}")
        return "\n".join(lines)


def trust(
    model: Any,
    pairs: Any,
    scores: Scores,
    *,
    sample: int = 64,
    fraction: float = 0.1,
    boots: int = 1000,
    seed: int = 0,
    metric: Callable = logit_difference,
    against: Any = None,
    progress: bool = True,
) -> Trust:
    """How far to trust a ranking of components.

    Args:
        model: a `HookedModel`.
        pairs: the `ContrastPairs` that the scores were made from.
        scores: from `locus.localize`.
        sample: components, drawn at random among those scored, that are patched exactly; all, if there are fewer.
        fraction: share of the components that is the top; of the sample, for the agreement with exact patching. Of
            many neurons a random sample has few that matter: there the correlations tell more.
        boots: resamples of the facts, with replacement, the same for scores and exact effects.
        seed: of the sample and the resamples.
        metric: the one that the scores are in.
        against: the exact method, `ActivationPatching()` by default; or its `Scores` of the same facts, if you have
            them, which may be of some components only: the sample is then drawn among these.
        progress: show a bar.

    Raises:
        ValueError: the scores are of another metric, of other facts or components, or the numbers make no sense.
    """
    name = getattr(metric, "__name__", str(metric))
    if scores.metric != name:
        raise ValueError(f"the scores are in {scores.metric} and metric is {name}; give the metric that made them")
    if len(pairs) != len(scores.values):
        raise ValueError(
            f"the scores are of {len(scores.values)} facts and there are {len(pairs)} pairs; give the same"
        )
    _same_facts(scores, tuple(fact.prompt for fact in pairs.facts))
    if sample < 2 or boots < 1 or not 0 < fraction <= 1:
        raise ValueError(
            f"trust needs a sample of at least 2, at least 1 resample and a fraction in (0, 1], got sample={sample}, "
            f"boots={boots}, fraction={fraction}"
        )
    part, exact = _exact(model, pairs, scores, against or ActivationPatching(), sample, seed, metric, progress)
    rows = [
        *_rows("exact", part, exact, fraction, boots, seed),
        *_rows("resamples", scores, None, fraction, boots, seed),
    ]
    frame = pd.DataFrame(rows, columns=["of", "measure", "value", "low", "high", "chance", "n"])
    return Trust(frame, exact.method, fraction, len(pairs), scores.passes)


def _same_facts(scores: Scores, prompts: tuple[str, ...]) -> None:
    if scores.facts and prompts and scores.facts != prompts:
        raise ValueError(
            f"the scores are of other facts, or of these in another order (the first: {scores.facts[0]!r}, and here "
            f"{prompts[0]!r}); give the pairs that they were made from"
        )


def _exact(
    model: Any, pairs: Any, scores: Scores, against: Any, sample: int, seed: int, metric: Callable, progress: bool
) -> tuple[Scores, Scores]:
    """A random sample of the scores' components, and the exact scores of the same ones."""
    among = list(range(len(scores.components)))
    if isinstance(against, Scores):
        if against.metric != scores.metric or len(against.values) != len(scores.values):
            raise ValueError(
                f"the exact scores are of {len(against.values)} facts in {against.metric}, the others of "
                f"{len(scores.values)} in {scores.metric}; give the same"
            )
        _same_facts(against, scores.facts)
        known = {component: i for i, component in enumerate(against.components)}
        among = [i for i in among if scores.components[i] in known]
        if len(among) < 2 or against.components.model != scores.components.model:
            raise ValueError("the exact scores and the others share fewer than two components of one model")
    order = torch.randperm(len(among), generator=torch.Generator().manual_seed(seed))[:sample].sort().values
    part = _columns(scores, torch.tensor(among)[order])
    if isinstance(against, Scores):
        return part, _columns(against, torch.tensor([known[component] for component in part.components]))
    return part, localize(model, pairs, against, components=part.components, metric=metric, progress=progress)


def _columns(scores: Scores, some: torch.Tensor) -> Scores:
    return Scores(scores.values[:, some], scores.components.take(some), scores.method, scores.metric, scores.facts)


def _rows(
    of: str, scores: Scores, exact: Scores | None, fraction: float, boots: int, seed: int
) -> list[tuple[str, str, float, float, float, float, int]]:
    """Agreement with exact effects, or, without any, of the resamples with the whole."""
    whole = scores.mean().double().numpy()
    drawn = scores.bootstrap(boots, seed=seed).double().numpy()
    other = [whole] * boots if exact is None else exact.bootstrap(boots, seed=seed).double().numpy()
    found = [agreement_of(x, y, fraction) for x, y in zip(drawn, other, strict=True)] if len(scores.values) > 1 else []
    rows = []
    for measure in MEASURES:
        values = np.array([getattr(a, measure) for a in found], dtype=float)
        low, high = _central(values)
        if exact is None:
            value = float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
        else:
            value = getattr(agreement_of(whole, exact.mean().double().numpy(), fraction), measure)
        chance = max(1, round(fraction * len(whole))) / len(whole) if measure == "overlap" else 0.0
        rows.append((of, measure, value, low, high, chance, len(whole)))
    return rows


def _central(values: np.ndarray) -> tuple[float, float]:
    """The central 95%, of those that are not NaN (a resample may leave all scores equal)."""
    if not np.isfinite(values).any():
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
