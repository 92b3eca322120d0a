"""Cases of an experiment's own, run, tuned, kept and judged as those of a study are; for decoy.py and routed.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from controlled import RESULTS

from locus.evaluate import DriftText
from locus.folder import enter
from locus.models import HookedModel
from locus.paired import judge
from locus.progress import Progress
from locus.runs import Case, Plan, Run, execute, named, search_rate

RATES = (2.8e-3, 5.6e-3, 1.12e-2)
ENDS = ("aues", "forget_at_95", "update_norm", "other_extraction_strength", "distance_to_retained")
Rates = Mapping[str, float]  # of each objective


def ends(model: HookedModel, case: Case, plan: Plan, seed: int, rates: Rates, text: DriftText) -> Iterator[dict]:
    """A row an objective and mask: what was measured in the end."""
    for objective, rate in rates.items():
        for localizer, arm, draw in case.masks:
            run = Run("compare", seed, objective, arm, localizer, draw, rate)
            made = execute(model, case, plan, run, text)
            values = {metric: value for step, metric, value in made["rows"] if step == -1}
            row = {"seed": seed, "objective": objective, "arm": arm, "draw": draw, "rate": rate}
            yield row | {"status": made["status"]} | {metric: values[metric] for metric in ENDS if metric in values}


def experiment(
    name: str,
    one_seed: Callable[[int, Rates], list[dict]],
    plan: Plan,
    seeds: int,
    contrasts: Sequence[tuple[str, str]],
    out: Path,
    settings: dict,
) -> pd.DataFrame:
    """The rows of all seeds, each objective at the rate of the best mean AUES of all arms on the tuning seed.

    one_seed: (seed, rates) -> rows of `ends`.   contrasts: pairs of arms, judged by AUES.
    It can be stopped; the same call goes on. Writes results/NAME.csv and results/NAME_verdicts.csv.
    """
    objectives = named(plan.objectives)
    bar = Progress(seeds + len(RATES) * len(objectives))
    settings |= {"objectives": [repr(o) for o in plan.objectives], "rates": list(RATES)}
    folder = enter(out, settings, {"settings": settings}, bar.say)

    def kept(seed: int, rates: Rates) -> pd.DataFrame:
        file = f"seed{seed}-{'-'.join(f'{objective}-{rate:.6g}' for objective, rate in rates.items())}.json"
        result = folder.load(file)
        if result is None:
            result = {"rows": one_seed(seed, rates)}
            folder.save(file, result)
        bar.done(file)
        return pd.DataFrame(result["rows"])

    def areas(objective: str, grid: Sequence[float]) -> list[float]:
        if not set(grid) <= set(RATES):
            bar.extend(len(grid))
        return [float(np.mean(kept(plan.tuning_seed, {objective: rate}).aues)) for rate in grid]

    rates = {}
    for objective in objectives:
        found = search_rate(partial(areas, objective), RATES)
        print(objective, found)
        rates[objective] = found["chosen"]
    table = pd.concat([kept(seed, rates) for seed in range(seeds)])
    bar.close()
    wide = table.groupby(["objective", "seed", "arm"]).aues.mean().unstack("arm")
    differences = {
        (objective, f"{a} - {b}"): (pairs[a] - pairs[b]).to_numpy()
        for objective, pairs in wide.groupby("objective")
        for a, b in contrasts
    }
    verdicts = judge(differences, bound=plan.bound)
    verdicts.index = pd.MultiIndex.from_tuples(verdicts.index, names=["objective", "contrast"])
    print(table.groupby(["objective", "arm"])[[metric for metric in ENDS if metric in table]].mean().round(3))
    print(verdicts[["verdict", "n", "difference", "sd", "low95", "high95", "p_different"]].round(4).to_string())
    table.to_csv(RESULTS / f"{name}.csv", index=False)
    verdicts.to_csv(RESULTS / f"{name}_verdicts.csv")
    return table
