"""Does the true location help? Table 2 of Lee et al. (EMNLP 2025, arXiv 2505.16252), on a model of your own.

    python experiments/controlled.py --model tiny --cap 20
    python experiments/controlled.py --model smollm2 --seeds 3
    python experiments/controlled.py --model smollm2 --seeds 3 --objectives NPO --arms oracle random revert

Knowledge is planted in a random 10% of the MLP value vectors (V), then unlearned in V (oracle) or in an equal-size
region apart from it (random). On tiny, seeds are added until each objective is decided, at most `--cap`; on SmolLM2 a
few seeds are described. Writes results/controlled_MODEL_{runs,verdicts}.csv.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd

import locus
from locus.plans import planted_facts, planting_plan
from locus.runs import named
from locus.sequential import Looks
from locus.study import compare

RESULTS = Path(__file__).parent / "results"


def table2(table: pd.DataFrame) -> pd.DataFrame:
    """Mean ± sd over seeds of random and oracle, the mean of |oracle − random|, and the p-value of a paired t-test."""
    rows = []
    for metric in ("aues", "mu95"):
        verdicts = locus.verdict(table, metric=metric).rows.set_index("objective")
        some = table[(table.metric == metric) & (table.step == -1) & table.arm.isin(["oracle", "random"])]
        wide = some.groupby(["objective", "seed", "arm"]).value.mean().unstack("arm")
        for objective, pairs in wide.groupby("objective"):
            row = {"objective": objective, "metric": metric, "n": len(pairs)}
            row |= {arm: f"{pairs[arm].mean():.3f} ± {pairs[arm].std():.3f}" for arm in ("random", "oracle")}
            row |= {"|D|": (pairs.oracle - pairs.random).abs().mean(), "p": verdicts.p_different[objective]}
            rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cap", type=int, default=20, help="the most seeds, on tiny")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of a real model")
    parser.add_argument(
        "--objectives", nargs="+", help="of a real model's, by class name; their names go into the files'"
    )
    parser.add_argument("--arms", nargs="+", help="of a real model")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    plan, name = planting_plan(options.model), options.model
    if options.model == "tiny":
        objectives = (locus.WGA(), locus.NPO(), locus.DPO(refusal=None), locus.RMU(layer=2, coefficient=2.0))
        place = replace(plan.planting, arms=("oracle", "random", "all", "revert"), attacks=())
        looks = Looks.until(options.cap)
        plan = replace(plan, objectives=objectives, planting=place, looks=looks, seeds=tuple(range(options.cap)))
    else:
        plan = replace(plan, seeds=tuple(range(options.seeds)))
        if options.arms:
            plan = replace(plan, planting=replace(plan.planting, arms=tuple(options.arms)))
        if options.objectives:
            plan = replace(plan, objectives=tuple(named(plan.objectives)[one] for one in options.objectives))
            name = "_".join([options.model, *options.objectives]).lower()
    facts, known = planted_facts(options.model)
    out = options.out or Path("runs") / f"controlled-{options.model}"
    table = compare(locus.load(options.model), facts, plan, out=out, other=known, jobs=options.jobs)
    verdict = locus.verdict(table, looks=plan.looks)
    print(verdict)
    print(table2(table).round(3).to_string(index=False))
    whole = table[(table.step == -1) & table.metric.isin(KEPT)]
    whole.to_csv(RESULTS / f"controlled_{name}_runs.csv", index=False)
    verdict.rows.to_csv(RESULTS / f"controlled_{name}_verdicts.csv", index=False)


KEPT = [
    *(
        "aues",
        "aues_trapezoid",
        "aues_common",
        "aues_halved",
        "aues_extraction",
        "aues_probability",
        "mu95",
        "forget_at_95",
        "forget_quality",
        "update_norm",
    ),
    *("distance_to_retained", "n_parameters", "learning_rate", "utility", "forget_extraction_strength"),
    *("retain_extraction_strength", "holdout_extraction_strength", "other_extraction_strength"),
    *("attacked", "attacked_matched", "attacked_best", "recovery_matched", "recovery_best"),
]

if __name__ == "__main__":
    main()
