"""INJ recall of all localizers beside the published one (Chang, Thomason & Jia, NAACL 2024, arXiv 2311.09060, GPT-2).

    python experiments/inj_recall.py --model tiny --sentences 20
    python experiments/inj_recall.py --model tiny --sentences 20 --r 0.001
    python experiments/inj_recall.py --model smollm2 --sentences 10 --methods AttributionPatching Activations Random

Without --methods all that score value vectors; on a real model Knockout and ActivationPatching, one exact run a value
vector, take hours. Writes results/inj_MODEL.csv, or inj_MODEL_rR.csv for other r than 1%; rows that are there of other
methods stay, so that methods can be run one by one.
"""

import argparse
from pathlib import Path

import pandas as pd
from controlled import RESULTS

import locus
from locus.inj import inj, sentences, summary
from locus.localize import METHODS, given

# Recall at r, 2r and 5r, layer by layer, GPT-2 124M; Zero-Out is a knockout by zero.
PUBLISHED = {
    0.01: {
        "HardConcrete": (0.495, 0.702, 0.874),
        "Slimming": (0.481, 0.667, 0.807),
        "Knockout": (0.249, 0.375, 0.538),
        "KnowledgeNeurons": (0.205, 0.321, 0.499),
        "Activations": (0.030, 0.052, 0.133),
        "Random": (0.01, 0.02, 0.05),
    },
    0.001: {
        "HardConcrete": (0.564, 0.796, 0.937),
        "Slimming": (0.589, 0.835, 0.944),
        "Knockout": (0.541, 0.778, 0.909),
        "KnowledgeNeurons": (0.535, 0.741, 0.848),
        "Activations": (0.111, 0.265, 0.515),
        "Random": (0.001, 0.002, 0.005),
    },
}
RETAIN = 24  # facts that the model knows, for the localizers that weigh the sentence against others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {type(method).__name__: method for method in (made() for made in METHODS) if "value" in method.KINDS}
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sentences", type=int, default=20)
    parser.add_argument("--r", type=float, default=0.01)
    parser.add_argument("--methods", nargs="+", choices=list(by_name), default=list(by_name))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = locus.load(options.model)
    known = locus.facts.biographies() if options.model == "tiny" else locus.facts.capitals()
    retain = known.known_by(model)[:RETAIN]
    methods = [given(by_name[name], retain) for name in options.methods]
    name = f"inj_{options.model}" + (f"_r{options.r:g}" if options.r != 0.01 else "")
    out = options.out or Path("runs") / name.replace("_", "-")
    table = inj(model, sentences(model, options.sentences), methods, r=options.r, out=out)
    found = summary(table)
    ks, published = sorted(found.k.unique()), PUBLISHED.get(options.r, {})
    found["published"] = [
        published[row.localizer][ks.index(row.k)] if row.scope == "layer" and row.localizer in published else None
        for row in found.itertuples()
    ]
    print(found.round(3).to_string(index=False))
    print("sentences learned:", table.drop_duplicates("sentence").status.value_counts().to_dict())
    path = RESULTS / f"{name}.csv"
    if path.exists():
        before = pd.read_csv(path)
        found = pd.concat([before[~before.localizer.isin(found.localizer)], found])
    found.to_csv(path, index=False)


if __name__ == "__main__":
    main()
