"""Charts of a study, as functions of its tables: Altair charts, each with a caption and an alternative text.

In a notebook, show `figure.chart`; the report embeds the same charts.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy import stats

from locus.evaluate import limits
from locus.verdict import Verdict, tidy

ARMS = {
    "top": "located (top)",
    "oracle": "true location (oracle)",
    "random": "random, same size",
    "random-uniform": "random, any layers",
    "decoy": "decoy",
    "revert": "set back (revert)",
    "bottom": "lowest scored (bottom)",
    "complement": "all but the location",
    "kind": "all of the kind",
    "all": "all parameters",
    "none": "before unlearning",
    "retain": "never taught them (θ_r)",
    "pretrained": "before all teaching (θ_p)",
}
# Okabe and Ito's colors that can be told apart by the color-blind, on light and on dark ground; then some of Tol's.
COLORS = {
    "top": "#D55E00",
    "oracle": "#0072B2",
    "random": "#8E8E8E",
    "random-uniform": "#B09FC0",
    "decoy": "#999933",
    "revert": "#AA4499",
    "bottom": "#4AA3DF",
    "complement": "#A6761D",
    "kind": "#CC79A7",
    "all": "#009E73",
    "none": "#E69F00",
    "retain": "#2E8B40",
    "pretrained": "#8A6FDF",
}
# Models that nothing is edited in: a point in a trade-off, a number in a caption.
UNEDITED = ("none", "retain", "pretrained")
DRAWN = ("random", "random-uniform")
# Names of rows; on a narrow page in two lines.
LABELS = alt.Axis(
    labelLimit=220,
    ticks=False,
    labelExpr="width < 330 ? split(datum.label, / · |: /) : datum.label",
    labelBaseline={
        "condition": {"test": "width < 330 && test(/ · |: /, datum.label)", "value": "bottom"},
        "value": "middle",
    },
)
LEGEND = alt.Legend(orient="bottom", columns=2, labelLimit=180, symbolOpacity=1)
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


def place(arm: str) -> int:
    """Where an arm stands in charts and tables; unknown ones are last."""
    return list(ARMS).index(arm) if arm in ARMS else len(ARMS)


def whole_runs(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers of whole runs, attacked ones too, with the settings filled in."""
    wanted = ("localizer", "arm", "objective", "seed", "draw", "step", "metric", "value", "status", "attack")
    whole = table.reindex(columns=[*wanted, *(c for c in table.columns if c not in wanted)])
    whole = tidy(whole.assign(status=whole.status.astype(object).where(whole.status.notna(), "")))
    return whole[whole.step == -1]


def unattacked(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs as they were left, without those of a later attack."""
    return table[tidy(table).attack == ""] if "attack" in table.columns else table


def tradeoffs(table: pd.DataFrame) -> Iterator[Figure]:
    """One chart an objective and localizer: forget against retain strength, each arm's mean over seeds.

    In a controlled study one chart an objective has the arms without a localizer, and each localizer's has its own
    arms beside the true location and its random controls.
    """
    columns = ["localizer", "arm", "objective", "seed", "draw", "step", "metric", "value"]
    rows = tidy(unattacked(table).reindex(columns=columns))
    rows = rows[rows.metric.isin(["forget_strength", "retain_strength"]) & (rows.step >= 0)]
    if rows.empty:
        return
    paired = rows.pivot_table(
        index=["objective", "localizer", "arm", "draw", "step", "seed"], columns="metric", values="value"
    )
    if set(paired.columns) != {"forget_strength", "retain_strength"}:
        return
    paired = paired.dropna()
    n_seeds = paired.index.get_level_values("seed").nunique()
    # Like with like: a draw's mean over the seeds beside an arm's. Where a run ended early the mean would
    # jump to that of the others, so the line ends there.
    groups = paired.groupby(level=["objective", "localizer", "arm", "draw", "step"], sort=False)
    mean = groups.mean().assign(seeds=groups.size()).reset_index()
    most = mean.groupby(["objective", "localizer", "arm", "draw"], sort=False).seeds.transform("max")
    mean = mean[mean.seeds == most]
    every = math.ceil(mean.step.nunique() / MOST_STEPS)
    mean = mean[mean.step.isin(np.sort(mean.step.unique())[::every])]
    for objective in [o for o in rows.objective.unique() if o in set(mean.objective) - {""}]:
        here = mean[mean.objective.isin([objective, ""])]
        localizers = [n for n in rows.localizer.unique() if n in set(here.localizer) - {""}]
        controlled = (here.arm == "oracle").any()
        for localizer in ["", *localizers] if controlled else localizers or [""]:
            beside = here.localizer == ""
            if controlled and localizer:
                beside &= here.arm.isin(["oracle", "random", *UNEDITED])
            own = here[beside | (here.localizer == localizer)]
            yield _tradeoff(own, "Trade-off, " + f"{localizer} · {objective}".strip(" ·"), n_seeds)


def _tradeoff(rows: pd.DataFrame, title: str, n_seeds: int) -> Figure:
    rows = rows.assign(arm_name=rows.arm.map(ARMS).fillna(rows.arm), line=rows.arm + rows.draw.astype(str))
    # Named, so that several of these charts can stand in one picture.
    pick = alt.selection_point(name="arm_" + re.sub(r"\W", "_", title), fields=["arm_name"], bind="legend")
    scale = alt.Scale(domain=[0, 1], clamp=True)
    channels: dict[str, Any] = {
        "x": alt.X("retain_strength:Q", title="retain strength (higher is better)", scale=scale),
        "y": alt.Y("forget_strength:Q", title="forget strength (higher is better)", scale=scale),
        "color": _color(rows.arm),
        "detail": "line:N",
        "tooltip": [
            alt.Tooltip("arm_name:N", title="arm"),
            *(alt.Tooltip(name, format=".4~g") for name in ("draw:Q", "step:Q", "seeds:Q")),
            alt.Tooltip("retain_strength:Q", format=".3f", title="retain"),
            alt.Tooltip("forget_strength:Q", format=".3f", title="forget"),
        ],
    }
    columns = ["arm_name", "line", "draw", "step", "seeds", "retain_strength", "forget_strength"]

    def layer(name: str, some: pd.Series, opacity: float) -> alt.Chart:
        picked = alt.condition(pick, alt.value(opacity), alt.value(0.05))
        return alt.Chart(data(rows.loc[some, columns], name)).encode(**channels, opacity=picked)

    random, original = rows.arm.isin(DRAWN), rows.arm.isin(UNEDITED)
    order = alt.Order("step:Q")
    chart = alt.layer(
        layer("random draws", random, 0.4).encode(order=order).mark_line(strokeWidth=1).add_params(pick),
        layer("arms", ~random & ~original, 0.95).encode(order=order).mark_line(point=alt.OverlayMarkDef(size=12)),
        layer("not edited", original, 0.95).encode(shape=_shape(rows.arm)).mark_point(filled=True, size=70),
    )
    ends = rows.sort_values("step").groupby("arm_name")[["retain_strength", "forget_strength"]].last()
    return Figure(
        title,
        wide(chart, 340),
        f"n = {n_seeds} seed{'s' * (n_seeds != 1)}; a line is the mean over the seeds at each step, "
        f"as far as every seed goes, and has no interval of its own: {_thin(rows.line[random].nunique())} "
        "The upper right corner is best. Click an arm in the legend to see it alone.",
        "Forget strength against retain strength while unlearning. Last points: "
        + "; ".join(f"{name}: retain {r:.2f}, forget {f:.2f}" for name, r, f in ends.itertuples()),
    )


def areas(table: pd.DataFrame) -> Iterator[Figure]:
    """One chart an objective: AUES of every arm, with its interval, its seeds and its random draws."""
    whole = unattacked(whole_runs(table))
    rows = whole[(whole.metric == "aues") & whole.value.notna()]
    # Models that are not edited are numbers in the caption: on the axis they would press all else together.
    fixed = rows[rows.arm.isin(UNEDITED)].groupby("arm", sort=False).value.mean()
    beside = ", ".join(f"{ARMS[arm]} has {value:.3f}" for arm, value in fixed.items())
    rows = rows[~rows.arm.isin(UNEDITED)]
    for objective in [o for o in rows.objective.unique() if o] or rows.objective.unique():
        own = rows[rows.objective.isin([objective, ""])]
        own = own.assign(place=own.arm.map(place)).sort_values(["localizer", "place"], kind="stable")
        own = own.assign(arm_name=own.arm.map(ARMS).fillna(own.arm))
        own["row"] = np.where(own.localizer == "", own.arm_name, own.localizer + ": " + own.arm_name)
        seeds = own.groupby(["row", "arm_name", "arm", "seed"], sort=False).value.mean().reset_index()
        found = [
            (*key, *summary(some.value, limits("aues"))) for key, some in seeds.groupby(["row", "arm_name"], sort=False)
        ]
        means = pd.DataFrame(found, columns=["row", "arm_name", "n", "mean", "low", "high"])
        n = seeds.seed.nunique()
        yield Figure(
            f"AUES by arm, {objective}".rstrip(", "),
            _forest(own[own.arm.isin(DRAWN)].head(MOST_POINTS), seeds, means),
            f"Filled: mean over n = {n} seed{'s' * (n != 1)}; line: its 95% interval (Student's t over seeds"
            f"{', none for one seed' if n == 1 else ''}); rings: seeds; ticks: single random draws."
            + (f" Not edited: {beside}." if beside else ""),
            f"AUES by arm, {objective}: "
            + "; ".join(f"{r.row} {r.mean:.3f} {interval(r.low, r.high)}" for r in means.itertuples()),
        )


def _forest(draws: pd.DataFrame, seeds: pd.DataFrame, means: pd.DataFrame) -> alt.LayerChart:
    def layer(name: str, rows: pd.DataFrame, x: str, *more: str, **channels: Any) -> alt.Chart:
        tooltip = [alt.Tooltip("row:N", title="arm"), *(alt.Tooltip(name, format=".4~g") for name in more)]
        return alt.Chart(data(rows[["row", "arm_name", *(field.split(":")[0] for field in more)]], name)).encode(
            x=_along(x, "AUES (higher is better)"),
            y=alt.Y("row:N", title=None, sort=means.row.tolist(), axis=LABELS),
            color=_color(seeds.arm, legend=False),
            tooltip=tooltip,
            **channels,
        )

    bars = means.dropna(subset=["low", "high"])
    chart = alt.layer(
        layer("random draws", draws, "value:Q", "seed:Q", "draw:Q", "value:Q").mark_tick(opacity=0.35, thickness=1),
        layer("intervals", bars, "low:Q", "low:Q", "high:Q", x2="high:Q").mark_rule(strokeWidth=2.5),
        layer("seeds", seeds, "value:Q", "seed:Q", "value:Q").mark_point(opacity=0.7, size=28),
        layer("means", means, "mean:Q", "n:Q", "mean:Q", "low:Q", "high:Q").mark_point(
            filled=True, size=90, opacity=1, shape="diamond"
        ),
    )
    return wide(chart, max(120, 34 * len(means)))


def differences(judged: Verdict) -> Figure:
    """Each comparison of a verdict: the mean difference with its intervals, against the bound that counts as none."""
    rows = judged.rows.dropna(subset=["difference"])
    names = [name for name in ("localizer", "objective", "attack") if name in rows]
    labels = [" · ".join(str(row[name]) for name in names if row[name]) for row in rows.to_dict("records")]
    rows = rows.assign(row=labels, edge=judged.bound)
    metric = judged.metric.upper() if judged.metric == "aues" else judged.metric.replace("_", " ")
    shown = ["row", "verdict", "n", "difference", "low90", "high90", "low95", "high95", "edge"]
    base = alt.Chart(data(rows[shown], "comparisons")).encode(
        y=alt.Y("row:N", title=None, sort=labels, axis=LABELS),
        tooltip=[alt.Tooltip(name, format=".4~g") for name in ("n:Q", "difference:Q", "low95:Q", "high95:Q")],
    )
    ends = alt.Chart(data(pd.DataFrame([{"low": -judged.bound, "high": judged.bound, "none": 0}]), "bound"))
    title = f"{judged.arm} minus {judged.control}, {metric}"
    chart = alt.layer(
        ends.mark_rect(opacity=0.15, color=COLORS["random"]).encode(x=_along("low:Q", title, zero=True), x2="high"),
        ends.mark_rule(strokeDash=[4, 3], color=COLORS["random"]).encode(x="none:Q"),
        base.mark_rule(strokeWidth=1.5, color=COLORS["oracle"]).encode(x="low95:Q", x2="high95:Q"),
        base.mark_rule(strokeWidth=5, opacity=0.6, color=COLORS["oracle"]).encode(x="low90:Q", x2="high90:Q"),
        base.mark_point(filled=True, size=90, opacity=1, color=COLORS["oracle"]).encode(x="difference:Q"),
    )
    looks = ", corrected for the looks" if judged.looks else ""
    return Figure(
        "The difference, and what counts as none",
        wide(chart, max(110, 40 * len(rows))),
        f"Point: mean over n = {_span(rows.n)} seeds; thick: 90% interval, thin: 95% interval{looks}; band: ± "
        f"{judged.bound:g}. Equivalent where the thick line stays inside the band.",
        f"{title}: "
        + "; ".join(f"{r.row} {r.difference:+.3f} {interval(r.low95, r.high95, '+.3f')}" for r in rows.itertuples()),
    )


def paired_seeds(table: pd.DataFrame, judged: Verdict) -> Iterator[Figure]:
    """One chart an objective and localizer: each seed's arm beside the mean of its random draws."""
    whole = unattacked(whole_runs(table))
    rows = whole[(whole.metric == judged.metric) & whole.arm.isin([judged.arm, judged.control]) & whole.value.notna()]
    rows = rows.assign(arm_name=rows.arm.map(ARMS).fillna(rows.arm))
    for (objective, localizer), own in rows[rows.arm == judged.arm].groupby(["objective", "localizer"], sort=False):
        control = rows[(rows.arm == judged.control) & rows.objective.isin([objective, ""])]
        control = control[control.localizer.isin([localizer, ""])]
        draws = control[control.seed.isin(own.seed)]
        pairs = own[["seed", "value"]].merge(draws.groupby("seed").value.mean().rename("control").reset_index())
        if len(pairs):
            title = f"Seed by seed, {localizer} · {objective}".replace(",  · ", ", ").rstrip(", ·")
            yield _paired(title, judged, pd.concat([own, draws]), pairs.assign(difference=pairs.value - pairs.control))


def _paired(title: str, judged: Verdict, rows: pd.DataFrame, pairs: pd.DataFrame) -> Figure:
    metric = judged.metric.upper() if judged.metric == "aues" else judged.metric.replace("_", " ")
    means = rows.groupby(["seed", "arm", "arm_name"], sort=False).value.mean().reset_index()

    def layer(name: str, frame: pd.DataFrame, x: str, *more: str, **channels: Any) -> alt.Chart:
        columns = ["seed", *(field.split(":")[0] for field in more), *(["arm_name"] if "arm_name" in frame else [])]
        return alt.Chart(data(frame[columns], name)).encode(
            x=_along(x, metric),
            y=alt.Y("seed:O", title="seed"),
            tooltip=[alt.Tooltip(name, format=".4~g") for name in ("seed:Q", *more)],
            **channels,
        )

    color = _color(rows.arm)
    chart = alt.layer(
        layer("random draws", rows[rows.arm == judged.control], "value:Q", "draw:Q", "value:Q", color=color).mark_tick(
            opacity=0.4, thickness=1
        ),
        layer("pairs", pairs, "control:Q", "control:Q", "value:Q", "difference:Q", x2="value:Q").mark_rule(
            color=COLORS["random"], strokeWidth=1.5
        ),
        layer("means", means, "value:Q", "value:Q", color=color).mark_point(filled=True, size=60, opacity=1),
    )
    above, n = int((pairs.difference > 0).sum()), len(pairs)
    mean, low, high = summary(pairs.difference)[1:]
    draws = rows[rows.arm == judged.control].groupby("seed").draw.nunique()
    return Figure(
        title,
        wide(chart, max(120, 22 * n)),
        f"n = {n} seed{'s' * (n != 1)}: points are {ARMS.get(judged.arm, judged.arm)} and the mean of "
        f"{_span(draws)} random draw{'s' * bool(draws.max() != 1)} (ticks) of the same seed. {above} of {n} seeds are "
        f"above; mean difference {mean:+.3f}, 95% interval {interval(low, high, '+.3f') or 'none'} (Student's t, for "
        "these seeds alone).",
        f"{metric} of {judged.arm} and {judged.control}, seed by seed: "
        + "; ".join(f"seed {r.seed}: {r.value:.3f} and {r.control:.3f}" for r in pairs.itertuples()),
    )


def _thin(n: int) -> str:
    """What is said of the lines of random draws."""
    few = "there is no random draw." if n == 0 else "the thin line is the one random draw."
    return f"the {n} thin lines, one a random draw, show the spread." if n > 1 else few


def _span(numbers: pd.Series) -> str:
    """The number, or the least and the most of several."""
    low, high = numbers.min(), numbers.max()
    return f"{low}" if low == high else f"{low} to {high}"


def layer_scatter(scan: pd.DataFrame) -> Figure:
    rows = scan.replace([np.inf, -np.inf], np.nan).dropna(subset=["effect", "unlearning"])
    shown = rows if len(rows) <= MOST_POINTS else rows.sample(MOST_POINTS, random_state=0)
    chart = (
        alt.Chart(data(shown[["layer", "fact", "effect", "unlearning"]]))
        .mark_circle(size=36, opacity=0.65)
        .encode(
            x=_along("effect:Q", "causal effect of the layer, by patching"),
            y=alt.Y(
                "unlearning:Q", title="unlearning by editing that layer alone", scale=alt.Scale(zero=False, padding=8)
            ),
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
        wide(chart, 360),
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
            alt.Chart(data(means[["layer", "fact", name]]))
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
                wide(chart, max(120, 16 * means.layer.nunique())),
                f"n = {len(facts)} facts{left} in {means.layer.nunique()} layers, mean over {_seeds(scan)}, "
                f"single values without interval. Largest mean over the facts: layer {best}.",
                f"{title}, mean of each layer: " + "; ".join(f"layer {i}: {v:.3f}" for i, v in by_layer[name].items()),
            )
        )
    return figures


def summary(values: pd.Series, within: tuple[float, float] = (-math.inf, math.inf)) -> tuple[int, float, float, float]:
    """n, mean and the 95% interval of Student's t, cut to what the numbers can be; NaN values are left out."""
    x = values.to_numpy(float)
    x = x[np.isfinite(x)]
    if len(x) < 2:
        return len(x), float(x[0]) if len(x) else math.nan, math.nan, math.nan
    half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return len(x), float(x.mean()), max(float(x.mean() - half), within[0]), min(float(x.mean() + half), within[1])


def interval(low: float, high: float, shape: str = ".3f") -> str:
    return f"[{low:{shape}}, {high:{shape}}]" if math.isfinite(low) and math.isfinite(high) else ""


def _along(field: str, title: str, *, zero: bool = False) -> alt.X:
    """A horizontal axis with as many ticks as have room."""
    few = alt.Axis(tickCount=alt.ExprRef("ceil(width / 70)"))
    return alt.X(field, title=title, scale=alt.Scale(zero=zero, nice=True), axis=few)


def _color(arms: pd.Series, *, legend: bool = True) -> alt.Color:
    return alt.Color("arm_name:N", scale=_scale(arms, COLORS, "#B0B000"), title=None, legend=LEGEND if legend else None)


def _shape(arms: pd.Series) -> alt.Shape:
    """Diamonds for what is not edited; in the legend too."""
    scale = _scale(arms, dict.fromkeys(UNEDITED, "diamond"), "circle")
    return alt.Shape("arm_name:N", scale=scale, title=None, legend=LEGEND)


def _scale(arms: pd.Series, values: dict[str, str], other: str) -> alt.Scale:
    names = sorted(set(arms), key=lambda arm: (place(arm), arm))
    return alt.Scale(domain=[ARMS.get(arm, arm) for arm in names], range=[values.get(arm, other) for arm in names])


def data(frame: pd.DataFrame, name: str | None = None) -> alt.Data:
    """Rows that travel with a chart, numbers with five digits; NaN becomes null.

    name: what the rows are, for charts of several tables
    """
    short = frame.select_dtypes("float").map(lambda x: float(f"{x:.5g}"))
    rows = json.loads(frame.assign(**short).to_json(orient="records", double_precision=15))
    return alt.Data(values=rows, **({"name": name} if name else {}))


def wide(chart: Any, height: int) -> Any:
    """A chart as wide as its place on the page or in the notebook."""
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    return chart.properties(width="container", height=height, autosize=fit)


def _seeds(scan: pd.DataFrame) -> str:
    n = scan.seed.nunique() if "seed" in scan.columns else 1
    return f"{n} seed{'s' * (n != 1)}"
