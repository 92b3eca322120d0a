"""Figures and small tables of a finished study, and the numbers of the log.

python experiments/figures.py runs/tiny-biographies experiments/results/tiny

Writes PREFIX_tradeoff.svg, PREFIX_areas.svg, PREFIX_runs.csv and PREFIX_layers.csv, and prints the verdict, the mean of
every arm and the layer scan in words.
"""

import sys
from pathlib import Path

import pandas as pd

import locus
from locus import charts
from locus.verdict import localization_effect

SHOWN = ["aues", "aues_trapezoid", "forget_at_95", "utility", "drift", "update_norm", "n_parameters", "learning_rate"]


def main(run: str, prefix: str) -> None:
    table = pd.read_parquet(f"{run}/table.parquet")
    for name, figures in (("tradeoff", charts.tradeoffs(table)), ("areas", charts.areas(table))):
        for i, figure in enumerate(figures):
            path = f"{prefix}_{name}{i or ''}.svg"
            figure.chart.save(path)
            print(path)
    whole = table[(table.step == -1) & table.metric.isin([*SHOWN, "aues_common"])]
    whole.drop(columns=["step", "attack"], errors="ignore").to_csv(f"{prefix}_runs.csv", index=False)
    print(locus.verdict(table))
    arms = [name for name in ("localizer", "objective", "arm") if whole[name].nunique() > 1]
    print(whole.pivot_table(index=arms, columns="metric", values="value")[SHOWN].round(4).to_string())
    print(whole[whole.metric == "aues"].groupby(arms).value.agg(["mean", "min", "max", "count"]).round(3).to_string())
    if Path(f"{run}/layer_scan.parquet").is_file():
        scan = pd.read_parquet(f"{run}/layer_scan.parquet")
        scan.to_csv(f"{prefix}_layers.csv", index=False)
        effect = localization_effect(scan)
        print(effect.sentence)
        print(effect.r2.round(3).to_string())


if __name__ == "__main__":
    main(*sys.argv[1:3])
