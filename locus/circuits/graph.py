"""The top edges as a graph: which they are, as JSON, and as a picture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from locus.charts import Figure
from locus.components import Component
from locus.edges import EMBED, LOGITS, Edges, EdgeScores, Receiver
from locus.folder import write
from locus.scores import method_record

POSITIVE, NEGATIVE = "#D55E00", "#0072B2"
FORMATS = ("json", "svg", "png", "pdf", "html")


def circuit(scores: EdgeScores, n: int = 30, *, by: str = "magnitude", connected: bool = True) -> EdgeScores:
    """The scores of the top n edges; if `connected`, only those on a path from the embedding to the logits.

    An edge that is on no such path within the circuit carries nothing, so leaving it out changes no prediction.

    Raises:
        ValueError: no edge is left.
    """
    chosen = scores.order(by)[:n]
    if connected:
        chosen = chosen[_on_a_path(scores.edges.take(chosen))]
    if not len(chosen):
        raise ValueError(
            f"the top {n} edges hold no path from the embedding to the logits; take more, or connected=False"
        )
    return EdgeScores(scores.values[:, chosen], scores.edges.take(chosen), scores.method, scores.metric, scores.facts)


def _on_a_path(graph: Edges) -> Bool[Tensor, " edge"]:
    """Which edges are on a path from the embedding to the logits."""
    alive = torch.ones(len(graph), dtype=torch.bool)
    while True:
        kept = [edge for edge, here in zip(graph, alive.tolist(), strict=True) if here]
        fed = {None, *(c for edge in kept for c in readers(graph, edge.receiver))}
        heard = {edge.sender for edge in kept}
        new = torch.tensor(
            [
                edge.sender in fed
                and (edge.receiver.component is None or bool(heard & set(readers(graph, edge.receiver))))
                for edge in graph
            ],
            dtype=torch.bool,
        )
        new &= alive
        if torch.equal(new, alive):
            return alive
        alive = new


def readers(graph: Edges, receiver: Receiver) -> tuple[Component, ...]:
    """The senders whose output depends on an input: the component itself, or all heads of a key/value group."""
    component = receiver.component
    if component is None:
        return ()
    if component.kind != "kv":
        return (component,)
    heads = sum(s is not None and s.kind == "head" and s.layer == component.layer for s in graph.senders)
    groups = sum(r.input == "k" and r[0] is not None and r[0].layer == component.layer for r in graph.receivers)
    share = heads // groups
    assert component.index is not None
    return tuple(Component(component.layer, "head", component.index * share + i) for i in range(share))


def node_link(scores: EdgeScores) -> dict[str, Any]:
    """A circuit as JSON values: nodes, and edges with their scores; `networkx.node_link_graph` reads it.

    A key/value group is a node of its own, and `groups` says which heads read it.
    """
    pairs = len(scores.values)
    error = scores.values.std(0) / pairs**0.5 if pairs > 1 else torch.full((len(scores.edges),), torch.nan)
    method, fields = method_record(scores.method)
    rows: list[dict[str, Any]] = []
    names: dict[str, Component | None] = {}
    groups: dict[str, list[str]] = {}
    for edge, score, spread in zip(scores.edges, scores.mean().tolist(), error.tolist(), strict=True):
        source, target = str(edge.sender or EMBED), str(edge.receiver.component or LOGITS)
        names |= {source: edge.sender, target: edge.receiver.component}
        if edge.receiver.component is not None and edge.receiver.component.kind == "kv":
            groups[target] = [str(head) for head in readers(scores.edges, edge.receiver)]
        rows.append(
            {
                "source": source,
                "target": target,
                "input": edge.receiver.input,
                "key": str(edge),
                "score": score,
                "standard_error": None if spread != spread else spread,
            }
        )
    nodes = [
        {"id": name, "layer": c and c.layer, "kind": c.kind if c else name, "index": c and c.index}
        for name, c in sorted(names.items(), key=lambda item: _depth(item[0], item[1]))
    ]
    record = {"model": scores.edges.model, "method": method, "settings": fields, "metric": scores.metric, "n": pairs}
    return {
        "directed": True,
        "multigraph": True,
        "graph": record | {"groups": groups},
        "nodes": nodes,
        "edges": rows,
    }


def _depth(name: str, component: Component | None) -> tuple[float, int, int]:
    """Where a node stands from the bottom: layer, then key/value groups, heads, MLP."""
    if component is None:
        return (-1, 0, 0) if name == EMBED else (float("inf"), 0, 0)
    return component.layer, ("kv", "head", "mlp").index(component.kind), component.index or 0


def save_circuit(scores: EdgeScores, path: str | Path) -> Path:
    """Write a circuit: `.json` for the graph (`node_link`), `.svg`, `.png`, `.pdf` or `.html` for the picture.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    ending = path.suffix.removeprefix(".")
    if ending not in FORMATS:
        raise ValueError(
            f"{path}: a circuit is saved as {', '.join(FORMATS)}, not as {ending or 'a file without ending'}"
        )
    if ending == "json":
        text = json.dumps(node_link(scores), indent=1, default=repr)
        write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    else:
        chart: Any = picture(scores).chart
        write(path, lambda temporary: chart.save(str(temporary), format=ending))
    return path


def picture(scores: EdgeScores) -> Figure:
    """A circuit from the embedding at the bottom to the logits at the top; thicker edges have larger scores.

    Letters under a head say which of its inputs an edge enters. A key/value group (KV) stands under the heads that
    read it, tied to them in gray.
    """
    data = node_link(scores)
    if len(data["edges"]) > 400:
        raise ValueError(
            f"{len(data['edges'])} edges cannot be told apart in a picture; take at most 400 with circuit()"
        )
    place = _places(data)
    lines = pd.DataFrame([point for edge in data["edges"] for point in _curve(edge, place)])
    points = pd.DataFrame([{"name": name, "x": x, "y": y} for name, (x, y) in place.items()])
    ports = lines[(lines.step == STEPS) & lines.input.notna()].drop_duplicates(["x", "y"])
    ties = [(group, head) for group, heads in data["graph"]["groups"].items() for head in heads if head in place]
    gray = pd.DataFrame(
        [dict(zip(("x", "y", "x2", "y2"), (*place[a], *place[b]), strict=True)) for a, b in ties],
        columns=["x", "y", "x2", "y2"],
    )
    width, height = points.x.max() - points.x.min() + 1.4, points.y.max() + 1.2
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[points.x.min() - 0.7, points.x.max() + 0.7], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.6, points.y.max() + 0.6], nice=False))
    sign = alt.Scale(domain=["supports the answer", "against it"], range=[POSITIVE, NEGATIVE])
    size = alt.Scale(domain=[0, float(lines["size"].max()) or 1.0], range=[0.6, 7])
    nodes = _chart(points).encode(x=x, y=y)
    chart: Any = alt.layer(
        _chart(gray).mark_rule(color="#B8B8B8", strokeDash=[2, 2]).encode(x=x, y=y, x2="x2:Q", y2="y2:Q"),
        _chart(lines)
        .mark_line(interpolate="basis", opacity=0.75)
        .encode(
            x=x,
            y=y,
            order="step:Q",
            detail="edge:N",
            color=alt.Color("sign:N", scale=sign, title=None, legend=alt.Legend(orient="bottom")),
            strokeWidth=alt.StrokeWidth("size:Q", scale=size, legend=None),
            tooltip=["edge:N", alt.Tooltip("score:Q", format="+.4~g")],
        ),
        nodes.mark_point(
            shape="M-1,-0.36H1V0.36H-1Z", size=1500, filled=True, fill="#FFFFFF", stroke="#5F6368", opacity=1
        ),
        nodes.mark_text(fontSize=11, color="#1C1C1E").encode(text="name:N"),
        _chart(ports)
        .mark_text(fontSize=9, fontStyle="italic", color="#1C1C1E", dy=-2)
        .encode(x=x, y=y, text="input:N"),
    ).properties(width=76 * width, height=58 * height)
    record = data["graph"]
    best = sorted(data["edges"], key=lambda edge: -abs(edge["score"]))[:6]
    return Figure(
        "Circuit",
        chart,
        f"n = {record['n']} pairs; {len(place)} nodes, {len(data['edges'])} edges; {record['metric']} by "
        f"{scores.method!r}. Read from bottom to top; the thickest edge has {best[0]['score']:+.3g}.",
        "Largest edges: " + ", ".join(f"{edge['key']} {edge['score']:+.3g}" for edge in best) + ".",
    )


STEPS = 4  # points of an edge's curve, less one


def _places(data: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Where each node stands, in units of a node: a row for each layer and kind that is there, from the bottom.

    In a row, nodes are ordered by the middle of those below that they are tied to, so that edges cross less.
    """
    rows: dict[tuple, list[str]] = {}
    for node in data["nodes"]:
        rows.setdefault((node["layer"] if node["layer"] is not None else node["id"], node["kind"]), []).append(
            node["id"]
        )
    ties = [(edge["source"], edge["target"]) for edge in data["edges"]]
    ties += [(group, head) for group, heads in data["graph"]["groups"].items() for head in heads]
    place: dict[str, tuple[float, float]] = {}
    for y, names in enumerate(rows.values()):

        def middle(name: str) -> float:
            below = [place[a][0] for a, b in ties if b == name and a in place]
            return sum(below) / len(below) if below else 0.0

        ordered = sorted(names, key=middle)
        # Every other row is set off, so that long edges pass between nodes and not through them.
        shift = 0.0 if y in (0, len(rows) - 1) or len(names) > 1 else (0.5 if y % 2 else -0.5)
        for i, name in enumerate(ordered):
            place[name] = (i - (len(names) - 1) / 2 + shift, float(y))
    return place


def _curve(edge: Mapping[str, Any], place: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """The points of an edge: up out of its sender, and up into its receiver's own input."""
    (x0, y0), (x1, y1) = place[edge["source"]], place[edge["target"]]
    x1 += {"q": -0.22, "v": 0.22}.get(edge["input"], 0.0)
    # Long edges swing out to the side of their sender.
    swing = 0.35 * (y1 - y0 - 1) ** 0.5 * (1 if x0 + x1 > 0 or (x0 + x1 == 0 and int(y0) % 2) else -1)
    xs = (x0, x0 + swing / 2, (x0 + x1) / 2 + swing, x1, x1)
    ys = (y0 + 0.14, y0 + 0.4, (y0 + y1) / 2, y1 - 0.45, y1 - (0.3 if edge["input"] else 0.16))
    shared = {
        "edge": edge["key"],
        "input": edge["input"],
        "score": edge["score"],
        "size": abs(edge["score"]),
        "sign": "supports the answer" if edge["score"] >= 0 else "against it",
    }
    return [shared | {"x": x, "y": y, "step": step} for step, (x, y) in enumerate(zip(xs, ys, strict=True))]


def _chart(rows: pd.DataFrame) -> alt.Chart:
    return alt.Chart(alt.Data(values=rows.to_dict("records")))
