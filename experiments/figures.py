"""Figures of a finished study as SVG.

python experiments/figures.py runs/tiny-biographies experiments/results/tiny
"""

import sys

import pandas as pd

from locus import charts


def main(run: str, prefix: str) -> None:
    table = pd.read_parquet(f"{run}/table.parquet")
    for name, figures in (("tradeoff", charts.tradeoffs(table)), ("areas", charts.areas(table))):
        for i, figure in enumerate(figures):
            path = f"{prefix}_{name}{i or ''}.svg"
            figure.chart.save(path)
            print(path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
