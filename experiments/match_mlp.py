"""Does the true location help with direct supervision? Fig. 1 of Lee et al. (EMNLP 2025, arXiv 2505.16252), on tiny.

    python experiments/match_mlp.py --seeds 12

The objective is the distance of all MLP outputs on the facts to forget to those of θ_r, the model that never learned
them, with nothing that holds the retained facts: what location can give is not lost in a loss on the output. The
rest is as in controlled.py. Writes results/match_mlp_runs.csv and results/match_mlp_verdicts.csv.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
from controlled import KEPT, RESULTS, table2

import locus
from locus.plans import planted_facts, planting_plan
from locus.study import compare

ENDS = ("aues", "forget_extraction_strength", "holdout_extraction_strength", "forget_quality", "distance_to_retained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/match-mlp"))
    options = parser.parse_args()
    plan, (facts, known) = planting_plan("tiny"), planted_facts("tiny")
    place = replace(plan.planting, arms=("oracle", "random", "all", "revert"), attacks=())
    plan = replace(plan, objectives=(locus.MatchMLP(),), planting=place, seeds=tuple(range(options.seeds)))
    table = compare(locus.load("tiny"), facts, plan, out=options.out, other=known)
    print(table2(table).round(3).to_string(index=False))
    whole = table[(table.step == -1) & table.metric.isin(KEPT)]
    print(whole.pivot_table(index="arm", columns="metric", values="value")[list(ENDS)].round(3).to_string())
    # Where a run ends is judged like its area; the ends are exploratory, so not corrected for their number.
    judged = ("aues", "forget_extraction_strength", "holdout_extraction_strength")
    verdicts = pd.concat([locus.verdict(table, metric=m, bound=plan.bound).rows.assign(metric=m) for m in judged])
    print(verdicts[["metric", "verdict", "n", "difference", "low95", "high95"]].round(3).to_string(index=False))
    whole.to_csv(RESULTS / "match_mlp_runs.csv", index=False)
    verdicts.to_csv(RESULTS / "match_mlp_verdicts.csv", index=False)


if __name__ == "__main__":
    main()
