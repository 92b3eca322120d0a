"""The circuit graph: components by depth, edges by what they carry."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from locus.components import Component
from locus.view.show import Panel, View, chart_of, diverging

MOST_EDGES = 400


def circuit(
    edges: Sequence[tuple[str, str, float]] | Mapping[str, Any],
    *,
    nodes: Sequence[str] = (),
    title: str = "Circuit",
    metric: str = "metric",
    method: str = "edge scores",
    n: int = 1,
) -> View:
    """A graph of components, the input at the bottom and the logits at the top; thicker = larger in size.

    edges: (source, target, score), positive = removing the edge lowers the metric; or as JSON,
        {"nodes": ["L0H1", …], "edges": [{"source": "L0H1", "target": "L2MLP", "score": 0.3}, …]}
    nodes: also those without an edge. Names are labels such as L9H6 or L4MLP; a name with a part after a dot (L9H6.q)
        is drawn at its component. Whatever is no label stands at the bottom if edges leave it, and at the top if not.
    n: how many prompts the scores are the mean of

    Raises:
        ValueError: there is no edge, or there are more than 400.
    """
    if isinstance(edges, Mapping):
        nodes = [*nodes, *(node if isinstance(node, str) else node["name"] for node in edges.get("nodes", ()))]
        edges = [(edge["source"], edge["target"], edge["score"]) for edge in edges["edges"]]
    found = [(str(a), str(b), float(score)) for a, b, score in edges]
    if not 1 <= len(found) <= MOST_EDGES:
        raise ValueError(f"got {len(found)} edges, expected 1 to {MOST_EDGES}; keep the largest in size")
    names = list(dict.fromkeys(_of(name) for name in [*nodes, *(a for a, _, _ in found), *(b for _, b, _ in found)]))
    place = _places(names, [(_of(a), _of(b)) for a, b, _ in found])
    lines = pd.DataFrame(
        [(a, b, score, abs(score), *place[_of(a)], *place[_of(b)]) for a, b, score in found],
        columns=["source", "target", "score", "size", "x", "y", "x2", "y2"],
    )
    lines = lines.sort_values("size")
    points = pd.DataFrame([(name, *place[name]) for name in names], columns=["name", "x", "y"])
    rows = int(points.y.max()) + 1
    size = {"width": max(260, min(620, 74 * int(points.groupby("y").size().max()))), "height": max(160, 44 * rows)}
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.06, 1.06]))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.5, rows - 0.5]))
    largest = float(lines["size"].max())
    strokes = (
        chart_of(lines)
        .mark_rule(opacity=0.85)
        .encode(
            x=x,
            y=y,
            x2="x2:Q",
            y2="y2:Q",
            color=alt.Color("score:Q", scale=diverging(largest), title=metric),
            strokeWidth=alt.StrokeWidth("size:Q", scale=alt.Scale(domain=[0, largest], range=[0.8, 7]), legend=None),
            tooltip=["source:N", "target:N", alt.Tooltip("score:Q", format="+.4~g")],
        )
    )
    boxes = chart_of(points).encode(x=x, y=y, tooltip=[alt.Tooltip("name:N")])
    chart = alt.layer(
        strokes,
        boxes.mark_point(
            shape="M-1,-0.42H1V0.42H-1Z", size=1100, filled=True, fill="#ffffff", stroke="#5f6368", opacity=1
        ),
        boxes.mark_text(fontSize=11, color="#1c1c1e").encode(text="name:N"),
    ).properties(**size)
    top = lines.sort_values("size", ascending=False).head(6)
    return View(
        title,
        f"n = {n} prompt{'s' * (n != 1)}; {len(names)} nodes, {len(found)} edges; {metric} by {method}. Positive "
        f"orange, negative blue, thicker = larger, at most {largest:.3g} in size. Depth goes upwards.",
        "Largest edges: " + ", ".join(f"{r.source} → {r.target} {r.score:+.3g}" for r in top.itertuples()) + ".",
        (Panel(chart),),
    )


def _of(name: str) -> str:
    return name.split(".")[0]


def _places(names: list[str], edges: list[tuple[str, str]]) -> dict[str, tuple[float, int]]:
    """Where each node stands: (0..1, row), rows in the order of the computation without gaps."""
    leaves = {a for a, _ in edges}
    depth = {}
    for name in names:
        try:
            c = Component.parse(name)
            depth[name] = 2 * c.layer + (1 if c.kind in ("head", "kv", "attn") else 2)
        except ValueError:
            depth[name] = 0 if name in leaves else 10**6
    order = sorted(set(depth.values()))
    row = {name: order.index(d) for name, d in depth.items()}
    x: dict[str, float] = {}
    for level in range(len(order)):
        here = [name for name in names if row[name] == level]

        # A node stands above those that it reads from, so that fewer edges cross.
        def below(name: str) -> float:
            sources = [x[a] for a, b in edges if b == name and a in x]
            return sum(sources) / len(sources) if sources else 0.5

        here.sort(key=below)
        for i, name in enumerate(here):
            x[name] = (i + 0.5) / len(here)
    return {name: (x[name], row[name]) for name in names}
