"""The circuit graph: components by depth, edges by what they carry."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from locus.components import Component
from locus.edges import EMBED, EdgeScores, readers
from locus.view.show import Panel, View, chart_of, diverging

MOST_EDGES = 400
BOX = "M-1,-0.38H1V0.38H-1Z"


def circuit(
    edges: EdgeScores | Sequence[tuple[str, str, float]] | Mapping[str, Any],
    *,
    nodes: Sequence[str] = (),
    title: str = "Circuit",
    metric: str = "metric",
    method: str = "edge scores",
    n: int = 1,
) -> View:
    """A graph of components, the input at the bottom and the logits at the top; thicker = larger in size.

    edges: of `locus.circuit`, which say their metric, method and n; or (source, target, score), positive = removing the
        edge lowers the metric; or as JSON,
        {"nodes": ["L0H1", …], "edges": [{"source": "L0H1", "target": "L2MLP", "score": 0.3}, …]}
    nodes: also those without an edge. Names are labels such as L9H6 or L4MLP; a name with a part after a dot (L9H6.q)
        is drawn at its component. Whatever is no label stands at the bottom if edges leave it, and at the top if not.
    n: how many prompts the scores are the mean of

    Raises:
        ValueError: there is no edge, or there are more than 400.
    """
    ties: list[tuple[str, str]] = []  # from a key/value group to the heads that read it
    if isinstance(edges, EdgeScores):
        groups = {e.receiver for e in edges.edges if e.receiver.component and e.receiver.component.kind == "kv"}
        ties = sorted({(str(g.component), str(head)) for g in groups for head in readers(edges.edges, g)})
        metric, method, n = edges.metric.replace("_", " "), repr(edges.method), len(edges.values)
        labels = [(str(edge.sender or EMBED), str(edge.receiver)) for edge in edges.edges]
        edges = [(a, b, score) for (a, b), score in zip(labels, edges.mean().tolist(), strict=True)]
    elif isinstance(edges, Mapping):
        nodes = [*nodes, *(node if isinstance(node, str) else node["name"] for node in edges.get("nodes", ()))]
        edges = [(edge["source"], edge["target"], edge["score"]) for edge in edges["edges"]]
    found = [(str(a), str(b), float(score)) for a, b, score in edges]
    if not 1 <= len(found) <= MOST_EDGES:
        raise ValueError(f"got {len(found)} edges, expected 1 to {MOST_EDGES}; keep the largest in size")
    names = list(dict.fromkeys(_of(name) for name in [*nodes, *(a for a, _, _ in found), *(b for _, b, _ in found)]))
    ties = [(a, b) for a, b in ties if b in names]
    place = _places(names, [*ties, *((_of(a), _of(b)) for a, b, _ in found)])
    # Small ones first, so that large ones lie above them.
    found.sort(key=lambda edge: abs(edge[2]))
    largest = abs(found[-1][2])
    lines = pd.DataFrame(
        [
            (f"{a} → {b}", score, abs(score), step, x, y)
            for a, b, score in found
            for step, (x, y) in enumerate(_curve(place[_of(a)], place[_of(b)]))
        ],
        columns=["edge", "score", "size", "step", "x", "y"],
    )
    points = pd.DataFrame([(name, *place[name]) for name in names], columns=["name", "x", "y"])
    rows = int(points.y.max()) + 1
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.06, 1.06]))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.5, rows - 0.5]))
    strokes = (
        chart_of(lines)
        .mark_line(opacity=0.85, interpolate="basis")
        .encode(
            x=x,
            y=y,
            detail="edge:N",
            order="step:Q",
            color=alt.Color("score:Q", scale=diverging(largest), title=metric),
            strokeWidth=alt.StrokeWidth("size:Q", scale=alt.Scale(domain=[0, largest], range=[0.8, 7]), legend=None),
            tooltip=["edge:N", alt.Tooltip("score:Q", format="+.4~g")],
        )
    )
    boxes = chart_of(points).encode(x=x, y=y, tooltip=["name:N"])
    gray = pd.DataFrame([(*place[a], *place[b]) for a, b in ties], columns=["x", "y", "x2", "y2"])
    dashed = chart_of(gray).mark_rule(color="#b8b8b8", strokeDash=[2, 2]).encode(x=x, y=y, x2="x2:Q", y2="y2:Q")
    chart = alt.layer(
        *([dashed] if ties else []),
        strokes,
        boxes.mark_point(shape=BOX, size=1500, filled=True, fill="#ffffff", stroke="#5f6368", opacity=1),
        boxes.mark_text(fontSize=10, color="#1c1c1e").encode(text="name:N"),
    ).properties(
        width=max(260, min(640, 76 * int(points.groupby("y").size().max()))),
        height=max(160, 46 * rows),
        view=alt.ViewBackground(strokeOpacity=0),
    )
    return View(
        title,
        f"n = {n} prompt{'s' * (n != 1)}; {len(names)} nodes, {len(found)} edges; {metric} by {method}. Positive "
        f"orange, negative blue, thicker = larger, at most {largest:.3g} in size. Depth goes upwards."
        + " Dashed: the heads that read a group's keys and values."
        * bool(ties),
        "Largest edges: " + ", ".join(f"{a} → {b} {score:+.3g}" for a, b, score in found[:-7:-1]) + ".",
        (Panel(chart),),
    )


def _of(name: str) -> str:
    return name.split(".")[0]


def _curve(a: tuple[float, float], b: tuple[float, float]) -> list[tuple[float, float]]:
    """From a to b; an edge that passes other rows bends around what stands there."""
    bend = 0.09 * min(abs(b[1] - a[1]) - 1, 4) * (1 if b[0] >= a[0] else -1)
    return [a, ((a[0] + b[0]) / 2 + bend, (a[1] + b[1]) / 2), b]


def _places(names: list[str], edges: list[tuple[str, str]]) -> dict[str, tuple[float, float]]:
    """Where each node stands: (0..1, row), rows in the order of the computation without gaps."""
    leaves = {a for a, _ in edges}
    depth = {}
    for name in names:
        try:
            c = Component.parse(name)
            depth[name] = 3 * c.layer + {"kv": 1, "head": 2, "attn": 2}.get(c.kind, 3)
        except ValueError:
            depth[name] = 0 if name in leaves else 10**6
    order = sorted(set(depth.values()))
    row = {name: float(order.index(d)) for name, d in depth.items()}
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
