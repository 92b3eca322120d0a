"""Synthetic tables of controlled studies: made up to test statistics and pages. No model was run for these numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd


def standard(mean: float, sd: float, n: int, seed: int = 0) -> np.ndarray:
    """n values with exactly this mean and standard deviation."""
    x = np.random.default_rng(seed).normal(size=n)
    return mean + sd * (x - x.mean()) / x.std(ddof=1)


def synthetic_study(
    differences: Mapping[str, Sequence[float] | np.ndarray],
    *,
    draws: int = 3,
    localizers: Sequence[str] = ("A", "B"),
    attacks: Sequence[str] = ("full", "lora"),
    steps: int = 6,
    draw_sd: float = 0.01,
    seed: int = 0,
) -> pd.DataFrame:
    """A made-up table of a controlled study; oracle minus the mean of its random draws is exactly as given.

    differences: objective -> one value a seed
    """
    rng = np.random.default_rng(seed)
    rows: list[dict] = []

    def run(arm: str, objective: str, s: int, area: float, *, localizer: str = "", draw: int = 0) -> dict:
        head = dict(model="synthetic", facts="made up", localizer=localizer, arm=arm, kind="value", budget=0.1)
        head |= dict(objective=objective, seed=s, draw=draw, status="finished", attack="")
        # A model that is not edited is one point.
        for step in range(steps) if objective or arm == "revert" else (0 if arm == "none" else 3,):
            rows.append(head | dict(step=step, metric="forget_strength", value=1 - 0.6**step))
            rows.append(head | dict(step=step, metric="retain_strength", value=0.9 - 0.02 * step * (1.5 - area)))
        numbers = dict(aues=area, mu95=-8 + area, utility=0.5, update_norm=2.0, distance_to_retained=1.5 - area)
        rows.extend(head | dict(step=-1, metric=metric, value=value) for metric, value in numbers.items())
        return head

    def attacked(head: dict, back: float, *points: str) -> None:
        for name in (*attacks, "any") if attacks else ():
            for metric in ("attacked", "recovery") if points else ("attacked",):
                for point in points or ("",):
                    rows.append(head | dict(step=-1, attack=name, metric=f"{metric}{point}", value=back))
            # An attack has steps of its own, which are no part of the trade-off.
            rows.append(head | dict(step=2, attack=name, metric="forget_strength", value=0.123))

    for s in range(max(map(len, differences.values()))):
        for arm, knows in (("pretrained", (0.1, 0.1)), ("retain", (0.12, 0.98)), ("none", (0.97, 0.9 + 0.01 * s))):
            head = run(arm, "", s, 0.05)
            for part, value in zip(("forget", "holdout"), knows, strict=True):
                rows.append(head | dict(step=-1, metric=f"{part}_extraction_strength", value=value))
            if arm != "pretrained":
                attacked(head, 0.2)
        run("revert", "", s, 0.9)
        for objective, values in differences.items():
            if s >= len(values):
                continue
            random = rng.normal(0.6, draw_sd, draws)
            head = run("oracle", objective, s, random.mean() + values[s])
            attacked(head, 0.3 + 0.01 * s, "_matched", "_best")
            for draw, area in enumerate(random):
                head = run("random", objective, s, area, draw=draw)
                if draw == 0:
                    attacked(head, 0.2, "_matched", "_best")
                run("random-uniform", objective, s, area - 0.01, draw=draw)
            for arm, area in (("decoy", 0.58), ("complement", 0.5), ("kind", 0.52), ("all", 0.55)):
                run(arm, objective, s, area)
            for localizer in localizers:
                run("top", objective, s, 0.6 + 0.02 * rng.normal(), localizer=localizer)
    return pd.DataFrame(rows)
