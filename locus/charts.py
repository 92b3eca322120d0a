"""Charts of a study, as functions of its tables: Altair charts, each with a caption and an alternative text.

In a notebook, show `figure.chart`; the report embeds the same charts.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy import stats

ARMS = {
    "top": "located (top)",
    "random": "random, same size",
    "bottom": "lowest scored (bottom)",
    "kind": "all of the kind",
    "all": "all parameters",
    "none": "original model",
}
# Okabe and Ito's colors that can be told apart by the color-blind, on light and on dark ground.
COLORS = ["#D55E00", "#8E8E8E", "#4AA3DF", "#CC79A7", "#009E73", "#E69F00"]
# Without the ends that vanish on dark and on light ground.
VIRIDIS = alt.SchemeParams(name="viridis", extent=[0.2, 0.93])
MOST_POINTS = 4000
MOST_STEPS = 60


@dataclass(frozen=True)
class Figure:
    """A chart with its title, its caption (n, seeds, interval) and words for those who cannot see it."""

    title: str
    chart: alt.Chart | alt.LayerChart
    caption: str
    alt: str


def whole_runs(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers of whole runs, with the settings filled in."""
    wanted = ("localizer", "arm", "objective", "seed", "draw", "step", "metric", "value", "status")
    whole = table.reindex(columns=[*wanted, *(c for c in table.columns if c not in wanted)])
    for name in ("localizer", "objective", "status"):
        whole[name] = whole[name].astype(object).where(whole[name].notna(), "")
    return whole[whole.step == -1]


def tradeoffs(table: pd.DataFrame) -> Iterator[Figure]:
    """One chart an objective and localizer: forget against retain strength, each arm's mean over seeds."""
    rows = table.reindex(columns=["localizer", "arm", "objective", "seed", "draw", "step", "metric", "value"])
    rows = rows[rows.metric.isin(["forget_strength", "retain_strength"]) & (rows.step >= 0)]
    rows = rows.fillna({"localizer": "", "objective": ""})
    if rows.empty:
        return
    wide = rows.pivot_table(
        index=["objective", "localizer", "arm", "draw", "step", "seed"], columns="metric", values="value"
    )
    if set(wide.columns) != {"forget_strength", "retain_strength"}:
        return
    wide = wide.dropna()
    n_seeds = wide.index.get_level_values("seed").nunique()
    # Like with like: a draw's mean over the seeds beside an arm's. Where a run ended early the mean would
    # jump to that of the others, so the line ends there.
    groups = wide.groupby(level=["objective", "localizer", "arm", "draw", "step"], sort=False)
    mean = groups.mean().assign(seeds=groups.size()).reset_index()
    most = mean.groupby(["objective", "localizer", "arm", "draw"], sort=False).seeds.transform("max")
    mean = mean[mean.seeds == most]
    every = math.ceil(mean.step.nunique() / MOST_STEPS)
    mean = mean[mean.step.isin(np.sort(mean.step.unique())[::every])]
    for objective in [o for o in mean.objective.unique() if o]:
        for localizer in [n for n in mean.localizer.unique() if n] or [""]:
            own = mean[mean.objective.isin([objective, ""]) & mean.localizer.isin([localizer, ""])]
            yield _tradeoff(own, f"{localizer} · {objective}".strip(" ·"), n_seeds)


def _tradeoff(rows: pd.DataFrame, title: str, n_seeds: int) -> Figure:
    rows = rows.assign(shown=rows.arm.map(ARMS).fillna(rows.arm), line=rows.arm + rows.draw.astype(str))
    pick = alt.selection_point(fields=["shown"], bind="legend")
    scale = alt.Scale(domain=[0, 1], clamp=True)
    channels: dict[str, Any] = {
        "x": alt.X("retain_strength:Q", title="retain strength (higher is better)", scale=scale),
        "y": alt.Y("forget_strength:Q", title="forget strength (higher is better)", scale=scale),
        "color": _color(rows.arm),
        "detail": "line:N",
        "tooltip": [
            alt.Tooltip("shown:N", title="arm"),
            *(alt.Tooltip(name, format=".4~g") for name in ("draw:Q", "step:Q", "seeds:Q")),
            alt.Tooltip("retain_strength:Q", format=".3f", title="retain"),
            alt.Tooltip("forget_strength:Q", format=".3f", title="forget"),
        ],
    }
    columns = ["shown", "line", "draw", "step", "seeds", "retain_strength", "forget_strength"]

    def layer(some: pd.Series, opacity: float) -> alt.Chart:
        picked = alt.condition(pick, alt.value(opacity), alt.value(0.05))
        return alt.Chart(_data(rows.loc[some, columns])).encode(**channels, opacity=picked)

    random, original = rows.arm == "random", rows.arm == "none"
    order = alt.Order("step:Q")
    chart = alt.layer(
        layer(random, 0.4).encode(order=order).mark_line(strokeWidth=1).add_params(pick),
        layer(~random & ~original, 0.95).encode(order=order).mark_line(point=alt.OverlayMarkDef(size=12)),
        layer(original, 0.95).mark_point(filled=True, size=70, shape="diamond"),
    )
    ends = rows.sort_values("step").groupby("shown")[["retain_strength", "forget_strength"]].last()
    return Figure(
        title,
        _sized(chart, 340),
        f"n = {n_seeds} seed{'s' * (n_seeds != 1)}; a line is the mean over the seeds at each step, "
        "as far as every seed goes, and has no interval of its own: the "
        f"{rows.draw[random].nunique()} thin lines, one a random draw, show the spread. "
        "The upper right corner is best. Click an arm in the legend to see it alone.",
        "Forget strength against retain strength while unlearning. Last points: "
        + "; ".join(f"{name}: retain {r:.2f}, forget {f:.2f}" for name, r, f in ends.itertuples()),
    )


def areas(table: pd.DataFrame) -> Iterator[Figure]:
    """One chart an objective: AUES of every arm, with its interval, its seeds and its random draws."""
    whole = whole_runs(table)
    rows = whole[(whole.metric == "aues") & whole.value.notna()]
    # The original model is a number in the caption: on the axis it would press all else together.
    floor = rows[rows.arm == "none"].value.mean()
    rows = rows[rows.arm != "none"]
    for objective in rows.objective.unique():
        own = rows[rows.objective == objective]
        own = own.assign(shown=own.arm.map(ARMS).fillna(own.arm))
        own["row"] = np.where(own.localizer == "", own.shown, own.localizer + ": " + own.shown)
        seeds = own.groupby(["row", "shown", "arm", "seed"], sort=False).value.mean().reset_index()
        found = [(*key, *summary(some.value)) for key, some in seeds.groupby(["row", "shown"], sort=False)]
        means = pd.DataFrame(found, columns=["row", "shown", "n", "mean", "low", "high"])
        n = seeds.seed.nunique()
        yield Figure(
            str(objective),
            _forest(own[own.arm == "random"].head(MOST_POINTS), seeds, means),
            f"Filled: mean over n = {n} seed{'s' * (n != 1)}; line: its 95% interval (Student's t over seeds"
            f"{', none for one seed' if n == 1 else ''}); rings: seeds; ticks: single random draws."
            + (f" The original model has {floor:.3f}." if math.isfinite(floor) else ""),
            f"AUES by arm, {objective}: "
            + "; ".join(f"{r.row} {r.mean:.3f} {interval(r.low, r.high)}" for r in means.itertuples()),
        )


def _forest(draws: pd.DataFrame, seeds: pd.DataFrame, means: pd.DataFrame) -> alt.LayerChart:
    def layer(rows: pd.DataFrame, x: str, *more: str, **channels: Any) -> alt.Chart:
        scale = alt.Scale(zero=False, nice=True)
        tooltip = [alt.Tooltip("row:N", title="arm"), *(alt.Tooltip(name, format=".4~g") for name in more)]
        return alt.Chart(_data(rows[["row", "shown", *(name.split(":")[0] for name in more)]])).encode(
            x=alt.X(x, scale=scale, title="AUES (higher is better)"),
            y=alt.Y("row:N", title=None, sort=means.row.tolist(), axis=alt.Axis(labelLimit=190)),
            color=_color(seeds.arm, legend=False),
            tooltip=tooltip,
            **channels,
        )

    bars = means.dropna(subset=["low", "high"])
    chart = alt.layer(
        layer(draws, "value:Q", "seed:Q", "draw:Q", "value:Q").mark_tick(opacity=0.35, thickness=1),
        layer(bars, "low:Q", "low:Q", "high:Q", x2="high:Q").mark_rule(strokeWidth=2.5),
        layer(seeds, "value:Q", "seed:Q", "value:Q").mark_point(opacity=0.7, size=28),
        layer(means, "mean:Q", "n:Q", "mean:Q", "low:Q", "high:Q").mark_point(
            filled=True, size=90, opacity=1, shape="diamond"
        ),
    )
    return _sized(chart, max(120, 34 * len(means)))


def layer_scatter(scan: pd.DataFrame) -> Figure:
    rows = scan.replace([np.inf, -np.inf], np.nan).dropna(subset=["effect", "unlearning"])
    shown = rows if len(rows) <= MOST_POINTS else rows.sample(MOST_POINTS, random_state=0)
    chart = (
        alt.Chart(_data(shown[["layer", "fact", "effect", "unlearning"]]))
        .mark_circle(size=36, opacity=0.65)
        .encode(
            x=alt.X("effect:Q", title="causal effect of the layer, by patching"),
            y=alt.Y("unlearning:Q", title="unlearning by editing that layer alone"),
            color=alt.Color("layer:Q", scale=alt.Scale(scheme=VIRIDIS), title="layer"),
            tooltip=[
                "fact:N",
                "layer:O",
                alt.Tooltip("effect:Q", format=".3f"),
                alt.Tooltip("unlearning:Q", format=".3f"),
            ],
        )
    )
    sample = "" if len(shown) == len(rows) else f" ({len(shown)} of them drawn, chosen at random)"
    return Figure(
        "Localization against unlearning",
        _sized(chart, 360),
        f"n = {len(rows)} pairs of fact and layer{sample}, from {rows.fact.nunique()} facts, "
        f"{rows.layer.nunique()} layers and {_seeds(scan)}; the interval of the correlation resamples "
        "whole facts.",
        "Scatter plot: one point a fact and layer, causal effect across, unlearning up.",
    )


def layer_maps(scan: pd.DataFrame) -> list[Figure]:
    """Layer by fact: the causal effect, and what editing that layer alone unlearned."""
    finite = scan.replace([np.inf, -np.inf], np.nan)
    means = finite.groupby(["layer", "fact"], sort=False)[["effect", "unlearning"]].mean().reset_index()
    facts = means.fact.unique()[:80]
    means = means[means.fact.isin(facts)]
    by_layer = means.groupby("layer")[["effect", "unlearning"]].mean()
    figures = []
    for name, title in (
        ("effect", "Causal effect by patching"),
        ("unlearning", "Unlearning by editing one layer"),
    ):
        largest = float(means[name].abs().max())
        signed = bool((means[name] < 0).any())
        scale = (
            alt.Scale(scheme="blueorange", domain=[-largest, largest])
            if signed and largest > 0
            else alt.Scale(scheme=VIRIDIS)
        )
        chart = (
            alt.Chart(_data(means[["layer", "fact", name]]))
            .mark_rect()
            .encode(
                x=alt.X(
                    "fact:N",
                    sort=None,
                    title="fact",
                    axis=alt.Axis(labels=len(facts) <= 24, ticks=False, labelLimit=90),
                ),
                y=alt.Y("layer:O", sort="descending", title="layer"),
                color=alt.Color(f"{name}:Q", scale=scale, title=None),
                tooltip=["fact:N", "layer:O", alt.Tooltip(f"{name}:Q", format=".3f")],
            )
        )
        best = by_layer[name].idxmax() if by_layer[name].notna().any() else "none"
        left = f" (the first {len(facts)} of {scan.fact.nunique()})" if len(facts) < scan.fact.nunique() else ""
        figures.append(
            Figure(
                title,
                _sized(chart, max(120, 16 * means.layer.nunique())),
                f"n = {len(facts)} facts{left} in {means.layer.nunique()} layers, mean over {_seeds(scan)}, "
                f"single values without interval. Largest mean over the facts: layer {best}.",
                f"{title}, mean of each layer: " + "; ".join(f"layer {i}: {v:.3f}" for i, v in by_layer[name].items()),
            )
        )
    return figures


def summary(values: pd.Series) -> tuple[int, float, float, float]:
    """n, mean and the 95% interval of Student's t; NaN values are left out."""
    x = values.to_numpy(float)
    x = x[np.isfinite(x)]
    if len(x) < 2:
        return len(x), float(x[0]) if len(x) else math.nan, math.nan, math.nan
    half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return len(x), float(x.mean()), float(x.mean() - half), float(x.mean() + half)


def interval(low: float, high: float, shape: str = ".3f") -> str:
    return f"[{low:{shape}}, {high:{shape}}]" if math.isfinite(low) and math.isfinite(high) else ""


def _color(arms: pd.Series, *, legend: bool = True) -> alt.Color:
    names = [arm for arm in ARMS if arm in set(arms)] + sorted(set(arms) - set(ARMS))
    colors = [COLORS[list(ARMS).index(arm)] if arm in ARMS else "#B0B000" for arm in names]
    scale = alt.Scale(domain=[ARMS.get(arm, arm) for arm in names], range=colors)
    shown = alt.Legend(orient="bottom", columns=2, labelLimit=180) if legend else None
    return alt.Color("shown:N", scale=scale, title=None, legend=shown)


def _data(frame: pd.DataFrame) -> alt.Data:
    """Rows as plain JSON values with five decimals; NaN becomes null."""
    return alt.Data(values=json.loads(frame.to_json(orient="records", double_precision=5)))


def _sized(chart: Any, height: int) -> Any:
    """As wide as its place on the page or in the notebook."""
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    return chart.properties(width="container", height=height, autosize=fit)


def _seeds(scan: pd.DataFrame) -> str:
    n = scan.seed.nunique() if "seed" in scan.columns else 1
    return f"{n} seed{'s' * (n != 1)}"
