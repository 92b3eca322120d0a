"""The top edges as a graph: which they are, as JSON, and in a file."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from locus import view
from locus.components import Component
from locus.edges import EMBED, LOGITS, Edges, EdgeScores, readers
from locus.folder import write
from locus.scores import method_record


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
        return (-1.0, 0, 0) if name == EMBED else (float("inf"), 0, 0)
    return float(component.layer), ("kv", "head", "mlp").index(component.kind), component.index or 0


def save_circuit(scores: EdgeScores, path: str | Path) -> Path:
    """Write a circuit: `.json` for the graph (`node_link`), `.svg`, `.png`, `.pdf` or `.html` for the picture.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix != ".json":
        return view.circuit(scores).save(path)
    text = json.dumps(node_link(scores), indent=1, default=repr)
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return path
