"""Charts of scores and sweeps: by layer and head, by layer and position, rankings, densities, overlap of masks."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from locus.components import LABELS
from locus.evaluate import interval
from locus.localize.tracing import CausalTrace
from locus.masks import Mask
from locus.scores import Scores
from locus.view.show import POSITIVE, Panel, View, chart_of, diverging, wide

BINS = 40
MOST_CELLS = 10_000


def grid(scores: Scores, *, kind: str | None = None) -> View:
    """Mean scores by layer and index, e.g. (layer × head). Zero is neutral, positive orange, negative blue.

    kind: of components, by default the first that the scores have
    """
    kind = kind or scores.components.kinds[0]
    values = scores.grid(kind)
    return _heat(
        values,
        [str(i) for i in range(values.shape[1])],
        kind,
        lambda layer, index: f"L{layer}{LABELS[kind]}" + ("" if kind in ("mlp", "attn") else str(index)),
        title=f"{_named(scores)} by layer and {kind}",
        caption=f"n = {len(scores.values)} facts, mean of {_metric(scores)} by {scores.method!r}",
    )


def sweep(
    values: Float[Any, "layer pos"],
    tokens: Sequence[str] | None = None,
    *,
    metric: str = "metric",
    method: str = "activation patching",
    n: int = 1,
    axis: str = "position",
) -> View:
    """Results of a sweep by layer and position (or any other axis), such as `locus.patching` returns.

    values: [layer, position], mean over the prompts where there are several; NaN is left blank
    tokens: what stands at each position
    n: how many prompts the values are the mean of
    """
    array = torch.as_tensor(values).float().cpu()
    if array.ndim != 2:
        raise ValueError(f"a sweep has the axes layer and {axis}, and these values have shape {tuple(array.shape)}")
    if tokens is not None and len(tokens) != array.shape[1]:
        raise ValueError(f"{len(tokens)} tokens for {array.shape[1]} positions; give one token a position")
    names = [str(i) for i in range(array.shape[1])]
    if tokens is not None:
        names = [f"{token.strip() or '␣'} {i}" for i, token in enumerate(tokens)]
    return _heat(
        array,
        names,
        axis,
        lambda layer, index: f"layer {layer}, {names[index]}",
        title=f"{metric} by layer and {axis}",
        caption=f"n = {n} prompt{'s' * (n != 1)}, {metric} of {method}",
    )


def trace(traced: CausalTrace, *, fact: int | None = None) -> View:
    """Effects of a causal trace by layer and token: of one fact, or the mean by role of token over all of them.

    fact: its number; None = all
    """
    n = len(traced.facts)
    if fact is not None and not (isinstance(fact, int) and not isinstance(fact, bool) and 0 <= fact < n):
        raise ValueError(f"fact must be from 0 to {n - 1} or None, got {fact!r}")
    what = {"resid": "the residual stream", "mlp": "MLP outputs", "attn": "attention outputs"}[traced.kind]
    if fact is None:
        chosen, said = slice(None), f"n = {n} fact{'s' * (n != 1)}, mean"
        roles = traced.by_role()
        values, names = torch.tensor(roles.to_numpy().T), list(roles.index)
    else:
        chosen, said = slice(fact, fact + 1), f"{traced.facts[fact]!r}, n = 1 fact,"
        at = [i for i, word in enumerate(traced.tokens[fact]) if word]
        values, names = traced.effect[fact][:, at].cpu(), [f"{traced.tokens[fact][i]} {i}" for i in at]
    return _heat(
        values.float(),
        names,
        "token",
        lambda layer, index: f"layer {layer}, {names[index]}",
        title=f"Restoring {what} by layer and token",
        caption=f"{said} m(restored) - m(noised); m(clean) {traced.clean[chosen].mean():.3g}, m(noised) "
        f"{traced.corrupted[chosen].mean():.3g}",
    )


def ranking(scores: Scores, *, top: int = 20) -> View:
    """The largest mean scores of any kind of component, with 95% intervals over the facts."""
    order = torch.argsort(scores.mean(), descending=True, stable=True)[:top].tolist()
    found = [
        (str(scores.components[i]), float(scores.values[:, i].mean()), *interval(scores.values[:, i])) for i in order
    ]
    rows = pd.DataFrame(found, columns=["component", "score", "low", "high"])
    largest = float(rows.score.abs().max())
    base = chart_of(rows).encode(
        y=alt.Y("component:N", sort=None, title=None),
        tooltip=["component:N", *(alt.Tooltip(name, format="+.4~g") for name in ("score:Q", "low:Q", "high:Q"))],
    )
    chart = alt.layer(
        base.mark_bar().encode(
            x=alt.X("score:Q", title=_metric(scores), axis=alt.Axis(format="~g", tickCount=6)),
            color=alt.Color("score:Q", scale=diverging(largest), legend=None),
        ),
        base.mark_rule(color="#808080").encode(x=alt.X("low:Q"), x2="high:Q"),
    )
    n = len(scores.values)
    said = "lines: 95% intervals over facts" if n > 1 else "one fact has no interval"
    return View(
        f"{_named(scores)}: the top {len(rows)}",
        f"n = {n} facts, mean of {_metric(scores)} by {scores.method!r}; {said}. Chosen by their rank among "
        f"{len(scores.components):,}, so the largest are overestimated. Positive: it supports the answer.",
        "Largest mean scores: " + ", ".join(f"{r.component} {r.score:+.3g}" for r in rows.head(8).itertuples()) + ".",
        (Panel(wide(chart, 18 * len(rows))),),
    )


def density(scores: Scores, *, kind: str | None = None, top: float = 0.01) -> View:
    """How the scores of neurons are distributed in each layer, and which layers have the `top` fraction."""
    kinds = scores.components.kinds
    kind = kind or kinds[0]
    keep = torch.tensor([k == kind for k in kinds])
    if not keep.any() or not 0 < top <= 1:
        raise ValueError(
            f"got kind={kind!r} and top={top}; there is {', '.join(sorted(set(kinds)))}, and top is in (0, 1]"
        )
    values, layers = scores.mean()[keep].double().numpy(), scores.components.layers[keep].numpy()
    edges = np.histogram_bin_edges(values, BINS)
    counts = [
        (layer, low, high, int(n))
        for layer in np.unique(layers).tolist()
        for low, high, n in zip(edges, edges[1:], np.histogram(values[layers == layer], edges)[0], strict=False)
        if n
    ]
    rows = pd.DataFrame(counts, columns=["layer", "low", "high", "n"])
    best = np.argsort(-values, kind="stable")[: max(1, round(top * len(values)))]
    shares = pd.DataFrame({"layer": np.unique(layers)})
    shares["share"] = [float((layers[best] == layer).mean()) for layer in shares.layer]
    height = max(90, 14 * len(shares))
    layer_axis = alt.Y("layer:O", sort="descending", title="layer")
    spread = (
        chart_of(rows)
        .mark_rect()
        .encode(
            x=alt.X("low:Q", title=_metric(scores), axis=alt.Axis(format="~g", tickCount=6)),
            x2="high:Q",
            y=layer_axis,
            color=alt.Color("n:Q", scale=alt.Scale(type="log", scheme="viridis"), title=f"{kind}s"),
            tooltip=["layer:O", alt.Tooltip("low:Q", format=".3~g"), alt.Tooltip("high:Q", format=".3~g"), "n:Q"],
        )
    )
    bars = (
        chart_of(shares)
        .mark_bar(color=POSITIVE)
        .encode(
            x=alt.X("share:Q", title=f"share of the top {top * 100:.3g}%", axis=alt.Axis(format="%", tickCount=6)),
            y=layer_axis,
            tooltip=["layer:O", alt.Tooltip("share:Q", format=".1%")],
        )
    )
    most = shares.sort_values("share", ascending=False).head(3)
    return View(
        f"{_named(scores)}: density by layer",
        f"n = {len(values):,} {kind}s, mean over {len(scores.values)} facts of {_metric(scores)} by {scores.method!r}. "
        f"Above: how many {kind}s of each layer have which score (colors on a log scale). Below: where the "
        f"{len(best):,} largest are; equal shares would be {1 / len(shares):.1%} a layer.",
        f"Layers with the largest shares of the top {top * 100:.3g}%: "
        + ", ".join(f"layer {r.layer:.0f} {r.share:.0%}" for r in most.itertuples())
        + ".",
        (Panel(wide(spread, height)), Panel(wide(bars, height))),
    )


def overlap(masks: Mapping[str, Mask]) -> View:
    """Overlap of masks in parameters: both / either (Jaccard), beside what masks of these sizes share by chance.

    masks: name → mask, all of the same components (or all `ParameterMask`s, then without the chance level)
    """
    if len(masks) < 2:
        raise ValueError(f"an overlap needs at least two masks by name, got {len(masks)}")
    found = []
    for a, one in masks.items():
        for b, other in masks.items():
            found.append((a, b, one.overlap(other).jaccard, _by_chance(one, other) if a != b else np.nan))
    rows = pd.DataFrame(found, columns=["a", "b", "jaccard", "chance"])
    names = list(masks)
    base = chart_of(rows).encode(
        x=alt.X("a:N", sort=names, title=None, axis=alt.Axis(labelAngle=-35, labelLimit=140)),
        y=alt.Y("b:N", sort=names, title=None, axis=alt.Axis(labelLimit=140)),
        tooltip=["a:N", "b:N", alt.Tooltip("jaccard:Q", format=".3f"), alt.Tooltip("chance:Q", format=".3f")],
    )
    scale = alt.Scale(range=["#f4f4f6", POSITIVE], domain=[0, 1], interpolate="rgb")
    ink = alt.condition("datum.jaccard > 0.6", alt.value("white"), alt.value("#1c1c1e"))
    chart = alt.layer(
        base.mark_rect().encode(color=alt.Color("jaccard:Q", scale=scale, title="both / either")),
        base.mark_text(fontSize=11).encode(text=alt.Text("jaccard:Q", format=".2f"), color=ink),
    ).properties(width=max(120, 58 * len(names)), height=max(100, 44 * len(names)))
    pairs = rows[rows.a < rows.b]
    sizes = ", ".join(f"{name} {mask.n_parameters:,}" for name, mask in masks.items())
    return View(
        "Overlap of masks",
        f"n = {len(masks)} masks; parameters in both / parameters in either. Sizes: {sizes} parameters. "
        "The chance level of each pair is in its tooltip.",
        "; ".join(
            f"{r.a} and {r.b}: {r.jaccard:.2f}" + (f" (by chance {r.chance:.2f})" if r.chance == r.chance else "")
            for r in pairs.itertuples()
        )
        + ".",
        (Panel(chart),),
    )


def _by_chance(one: Any, other: Any) -> float:
    """Expected share of both in either, if one were drawn at random: ab / (a + b - ab) of the shares a and b."""
    if not isinstance(one, Mask) or not isinstance(other, Mask):
        return np.nan
    total = int(one.components.sizes.sum())
    a, b = one.n_parameters / total, other.n_parameters / total
    return a * b / (a + b - a * b)


def _heat(values: Any, columns: list[str], axis: str, label: Any, *, title: str, caption: str) -> View:
    array = values.numpy()
    where = np.argwhere(np.isfinite(array))
    if not len(where):
        raise ValueError(f"{title}: there is no finite value to draw")
    if len(where) > MOST_CELLS:
        raise ValueError(f"{len(where):,} cells are more than {MOST_CELLS:,}, and none would be seen; draw a density")
    found = [(int(i), columns[j], label(int(i), int(j)), float(array[i, j])) for i, j in where]
    rows = pd.DataFrame(found, columns=["layer", "column", "label", "value"])
    largest = float(rows.value.abs().max())
    chart = (
        chart_of(rows)
        .mark_rect()
        .encode(
            x=alt.X(
                "column:N",
                sort=columns,
                title=axis,
                # Slanted words of a few columns have room; numbers, and many columns, leave some out.
                axis=alt.Axis(
                    labelAngle=-45 if _worded(columns) else 0,
                    labelLimit=90,
                    labelOverlap=len(columns) > 16 or not _worded(columns),
                ),
            ),
            y=alt.Y("layer:O", sort="descending", title="layer"),
            color=alt.Color(
                "value:Q",
                scale=diverging(largest),
                title=None,
                legend=alt.Legend(orient="top", gradientLength=140),
            ),
            tooltip=[alt.Tooltip("label:N", title=axis), alt.Tooltip("value:Q", format="+.4~g")],
        )
    )
    height = max(70, min(18 if array.shape[0] <= 16 else 13, 26) * array.shape[0])
    chart = (
        wide(chart, height) if len(columns) > 16 else chart.properties(width=max(90, 30 * len(columns)), height=height)
    )
    best = rows.reindex(rows.value.abs().sort_values(ascending=False).index).head(5)
    return View(
        title,
        f"{caption}. Positive orange, 0 neutral, negative blue, at most {largest:.3g} in size.",
        "Largest: " + ", ".join(f"{r.label} {r.value:+.3g}" for r in best.itertuples()) + ".",
        (Panel(chart),),
    )


def _worded(columns: Sequence[str]) -> bool:
    return any(len(column) > 3 for column in columns)


def _metric(scores: Scores) -> str:
    return scores.unit.replace("_", " ")


def _named(scores: Scores) -> str:
    return f"{type(scores.method).__name__ if not hasattr(scores.method, 'name') else scores.method.name} scores"
