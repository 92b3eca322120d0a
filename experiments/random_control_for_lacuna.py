"""The control that LACUNA (arXiv 2607.02513) leaves out: random masks as large as the true one.

    python experiments/random_control_for_lacuna.py --seeds 12

On tiny, knowledge is planted in a random 5% of the single weights of attention and MLPs and unlearned by
GradientDifference in the true mask, in random masks of equal size, and in all weights; then what is left is attacked,
by relearning and fine-tuning on other facts. LACUNA reports that the true mask resists resurfacing; does a random one?
Writes results/lacuna_{runs,verdicts}.csv.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
from controlled import KEPT, RESULTS

import locus
from locus.plans import planted_facts, planting_plan
from locus.study import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/lacuna"))
    options = parser.parse_args()
    plan = planting_plan("tiny")
    place = replace(plan.planting, kind="weight", share=0.05, arms=("oracle", "random", "all", "revert"))
    plan = replace(plan, objectives=(locus.GradientDifference(),), planting=place, seeds=tuple(range(options.seeds)))
    facts, known = planted_facts("tiny")
    table = compare(locus.load("tiny"), facts, plan, out=options.out, other=known)
    print(locus.verdict(table))
    # What comes back is judged like what was forgotten, attack by attack: oracle minus random, a bound of 0.05.
    found = []
    for point in ("matched", "best"):
        for attack in ("any", "full", "lora", "unrelated", "paraphrase"):
            some = table[(table.attack == attack) & (table.metric == f"recovery_{point}")].assign(attack="")
            if len(some):
                verdict = locus.verdict(some, metric=f"recovery_{point}", bound=0.05)
                found.append(verdict.rows.assign(attack=attack, point=point))
    verdicts = pd.concat([locus.verdict(table).rows.assign(attack="", point=""), *found])
    shown = ["point", "attack", "verdict", "n", "difference", "low95", "high95"]
    print(verdicts[shown].round(3).to_string(index=False))
    table[(table.step == -1) & table.metric.isin(KEPT)].to_csv(RESULTS / "lacuna_runs.csv", index=False)
    verdicts.to_csv(RESULTS / "lacuna_verdicts.csv", index=False)


if __name__ == "__main__":
    main()
