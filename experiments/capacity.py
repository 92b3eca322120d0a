"""When does location matter? The size of the region, the number of facts, and how entangled retain and forget are.

    python experiments/capacity.py --seeds 3

The controlled experiment of `controlled.py` on tiny with NPO, varying one thing at a time: p, the share of the value
vectors that hold the facts; the number of facts; and replay (without it, learning the facts damages what is to be
kept, which only V can repair). Oracle − random AUES, one row a setting: exploratory, not corrected for their number.
Writes results/capacity.csv.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
from controlled import RESULTS

import locus
from locus.plans import planted_facts, planting_plan
from locus.study import compare

SETTINGS = {
    "p = 10%, 24 facts, replay": {},
    "p = 3%": {"share": 0.03},
    "p = 30%": {"share": 0.3},
    "12 facts": {"forget": 12},
    "48 facts": {"forget": 48},
    "no replay": {"replay": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/capacity"))
    options = parser.parse_args()
    model, (facts, known), base = locus.load("tiny"), planted_facts("tiny"), planting_plan("tiny")
    found = []
    for i, (name, change) in enumerate(SETTINGS.items()):
        print(name, flush=True)
        place = {k: v for k, v in change.items() if k != "forget"}
        place = replace(base.planting, arms=("oracle", "random", "revert"), attacks=(), **place)
        plan = replace(base, objectives=(locus.NPO(),), planting=place, seeds=tuple(range(options.seeds)))
        plan = replace(plan, forget=change.get("forget", plan.forget))
        table = compare(model, facts, plan, out=options.out / str(i), other=known)
        whole = table[table.step == -1].set_index(["arm", "metric"]).value
        row = locus.verdict(table).rows.iloc[0][["n", "difference", "sd", "low95", "high95", "verdict"]]
        means = {arm: whole[arm, "aues"].mean() for arm in ("oracle", "random", "revert")}
        kept = {f"holdout {arm}": whole[arm, "holdout_extraction_strength"].mean() for arm in ("retain", "none")}
        found.append({"setting": name} | means | kept | row.to_dict())
    result = pd.DataFrame(found)
    print(result.round(3).to_string(index=False))
    result.to_csv(RESULTS / "capacity.csv", index=False)


if __name__ == "__main__":
    main()
