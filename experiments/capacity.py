"""When does location matter? Width, size of the region, number of facts, and how entangled retain and forget are.

    python experiments/capacity.py --seeds 12

The controlled experiment of `controlled.py` on tiny with NPO, varying one thing at a time: the width of the model (256
instead of 128, trained from scratch on tiny's facts; 96 is too narrow to learn them all); p, the share of the value
vectors that hold the facts (3% are too few for 24 facts with some seeds); the number of facts; and replay (without it,
learning the facts damages what is to be kept, which only V can repair). Oracle − random AUES, one row a setting:
exploratory, not corrected for their number.
Writes results/capacity.csv, after each setting.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
from controlled import RESULTS

import locus
from locus.plans import planted_facts, planting_plan
from locus.study import compare
from locus.worlds import tiny

SETTINGS = {
    "width 128, p = 10%, 24 facts, replay": {},
    "width 256": {"width": 256},
    "p = 5%": {"share": 0.05},
    "p = 30%": {"share": 0.3},
    "12 facts": {"forget": 12},
    "48 facts": {"forget": 48},
    "no replay": {"replay": False},
}


def setting(seeds, out, *, width=128, forget=24, **planting):
    """The row of one setting."""
    (facts, known), base = planted_facts("tiny"), planting_plan("tiny")
    place = replace(base.planting, arms=("oracle", "random", "revert"), attacks=(), **planting)
    plan = replace(base, objectives=(locus.NPO(),), planting=place, seeds=tuple(range(seeds)), forget=forget)
    table = compare(locus.load(tiny(width=width)), facts, plan, out=out, other=known)
    whole = table[table.step == -1].set_index(["arm", "metric"]).value
    means = {arm: whole[arm, "aues"].mean() for arm in ("oracle", "random", "revert")}
    kept = {f"holdout {arm}": whole[arm, "holdout_extraction_strength"].mean() for arm in ("retain", "none")}
    row = locus.verdict(table).rows.iloc[0]
    return means | kept | row[["n", "difference", "sd", "low95", "high95", "verdict"]].to_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/capacity"))
    options = parser.parse_args()
    found = []
    for i, (name, change) in enumerate(SETTINGS.items()):
        print(name, flush=True)
        found.append({"setting": name} | setting(options.seeds, options.out / str(i), **change))
        pd.DataFrame(found).to_csv(RESULTS / "capacity.csv", index=False)
    print(pd.DataFrame(found).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
