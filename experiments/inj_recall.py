"""INJ recall beside the published ones (Chang, Thomason & Jia, NAACL 2024, arXiv 2311.09060, GPT-2 124M, r = 1%).

    python experiments/inj_recall.py --model tiny --sentences 20
    python experiments/inj_recall.py --model smollm2 --sentences 10

Writes results/inj_MODEL.csv.
"""

import argparse
from pathlib import Path

from controlled import RESULTS

import locus
from locus.inj import inj, sentences, summary

# Recall at 1%, 2% and 5%, layer by layer; Zero-Out is a knockout by zero.
PUBLISHED = {
    "Knockout": (0.249, 0.375, 0.538),
    "Activations": (0.030, 0.052, 0.133),
    "Random": (0.01, 0.02, 0.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sentences", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = locus.load(options.model)
    methods = [locus.AttributionPatching(), locus.Activations(), locus.Random()]
    if options.model == "tiny":
        methods.insert(0, locus.Knockout())  # one exact run a value vector: hours on a real model
    out = options.out or Path("runs") / f"inj-{options.model}"
    table = inj(model, sentences(model, options.sentences), methods, r=0.01, out=out)
    found = summary(table)
    ks = sorted(found.k.unique())
    found["published"] = [
        PUBLISHED[row.localizer][ks.index(row.k)] if row.scope == "layer" and row.localizer in PUBLISHED else None
        for row in found.itertuples()
    ]
    print(found.round(3).to_string(index=False))
    print("sentences learned:", table.drop_duplicates("sentence").status.value_counts().to_dict())
    found.to_csv(RESULTS / f"inj_{options.model}.csv", index=False)


if __name__ == "__main__":
    main()
