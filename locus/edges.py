"""Edges of the residual stream: who writes what another component reads.

A sender is the embedding, a head or an MLP; its output is added to the residual stream. A receiver is an input: the
query of a head, the key or value of a key/value group (of a head where they are not grouped), an MLP, or the logits.
It reads the sum of all outputs before it, through a norm. So patching one edge is exact and local: the receiver's
input moves by a_u(source) - a_u(base), and nothing else that reads u sees it.

With grouped-query attention several heads read one key and one value, so those inputs belong to the group
(`L3H2->L5KV0.k`), as their parameters do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locus import hooks
from locus.components import Component, n_kv
from locus.scores import checked_rows, method_record, read_tensors, recorded_method, write_tensors

EMBED, LOGITS = "embed", "logits"


class Receiver(NamedTuple):
    """An input: that of a component (None = the logits), and which one of an attention head: "q", "k" or "v"."""

    component: Component | None
    input: str | None = None

    def __str__(self) -> str:
        return str(self.component or LOGITS) + (f".{self.input}" if self.input else "")


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge, e.g. `L3H2->L5H1.q`, `embed->L0MLP`, `L4MLP->logits`. A sender of None is the embedding."""

    sender: Component | None
    receiver: Receiver

    def __str__(self) -> str:
        return f"{self.sender or EMBED}->{self.receiver}"

    @staticmethod
    def parse(label: str) -> "Edge":
        """Inverse of `str`.

        Raises:
            ValueError: not of the form L3H2->L5H1.q, embed->L0MLP or L4MLP->logits.
        """
        sender, arrow, receiver = label.partition("->")
        if not arrow:
            raise ValueError(f"{label!r} is not an edge; write L3H2->L5H1.q, embed->L0MLP or L4MLP->logits")
        return Edge(parse_sender(sender), parse_receiver(receiver))


def parse_sender(label: str) -> Component | None:
    return None if label == EMBED else Component.parse(label)


def parse_receiver(label: str) -> Receiver:
    name, _, which = label.partition(".")
    return Receiver(None if name == LOGITS else Component.parse(name), which or None)


@dataclass(frozen=True, eq=False)
class Edges(Sequence[Edge]):
    """Edges of one model in a fixed order.

    Attributes:
        senders: the embedding (None), heads and MLPs, layer by layer; all of the model's, whether an edge has them
            or not.
        receivers: all inputs, the logits last.
        sender: the number of each edge's sender.
        receiver: the number of each edge's receiver.
        model: fingerprint of the model's weights.
    """

    senders: tuple[Component | None, ...]
    receivers: tuple[Receiver, ...]
    sender: Int[Tensor, " edge"]
    receiver: Int[Tensor, " edge"]
    model: str

    def __len__(self) -> int:
        return len(self.sender)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Edge(self.senders[int(self.sender[index])], self.receivers[int(self.receiver[index])])

    def __iter__(self) -> Iterator[Edge]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        senders, receivers = [str(s or EMBED) for s in self.senders], [str(r) for r in self.receivers]
        pairs = zip(self.sender.tolist(), self.receiver.tolist(), strict=True)
        return tuple(f"{senders[s]}->{receivers[r]}" for s, r in pairs)

    def take(self, chosen: Int[Tensor, " some"]) -> "Edges":
        """The edges at these places."""
        return Edges(self.senders, self.receivers, self.sender[chosen], self.receiver[chosen], self.model)

    def select(self, labels: Sequence[str | Edge]) -> "Edges":
        """The edges of these labels, in their order.

        Raises:
            ValueError: one of them is no edge here.
        """
        place = {label: i for i, label in enumerate(self.labels)}
        wanted = [str(label) for label in labels]
        if absent := [label for label in wanted if label not in place]:
            near = [label for label in self.labels if label.split("->")[0] == absent[0].split("->")[0]][:4]
            raise ValueError(
                f"there is no edge {absent[0]!r}: "
                + (
                    f"that sender has {', '.join(near)}, …"
                    if near
                    else f"senders are {', '.join(str(s or EMBED) for s in self.senders[:4])}, …"
                )
            )
        return self.take(torch.tensor([place[label] for label in wanted], dtype=torch.long))

    def __repr__(self) -> str:
        return f"Edges({len(self)} of {len(self.senders)} senders and {len(self.receivers)} inputs, model {self.model})"


def edges(model: Any) -> Edges:
    """All edges of a model, receiver by receiver from the bottom.

    Raises:
        ValueError: what its heads write is normed before it enters the residual stream (olmo2, gemma), or attention
            and MLP read one and the same norm, so that edges of heads are not defined.
    """
    _require_additive(model)
    senders, receivers = nodes(model)
    allowed = torch.tensor([[precedes(s, r, model) for s in senders] for r in receivers])
    receiver, sender = allowed.nonzero(as_tuple=True)
    return Edges(senders, receivers, sender, receiver, model.fingerprint)


def nodes(model: Any) -> tuple[tuple[Component | None, ...], tuple[Receiver, ...]]:
    """All senders, the embedding first, and all receivers, the logits last."""
    heads, groups = model.cfg.n_heads, n_kv(model)
    senders: list[Component | None] = [None]
    receivers: list[Receiver] = []
    for layer in range(model.cfg.n_layers):
        mlp = Component(layer, "mlp")
        senders += [*(Component(layer, "head", i) for i in range(heads)), mlp]
        receivers += [Receiver(Component(layer, "head", i), "q") for i in range(heads)]
        kind = "head" if groups == heads else "kv"
        receivers += [Receiver(Component(layer, kind, i), name) for name in "kv" for i in range(groups)]
        receivers.append(Receiver(mlp))
    return tuple(senders), (*receivers, Receiver(None))


def precedes(sender: Component | None, receiver: Receiver, model: Any) -> bool:
    """Whether the receiver reads what the sender writes."""
    if sender is None or receiver.component is None or sender.layer < receiver.component.layer:
        return True
    same_layer = sender.layer == receiver.component.layer
    sequential = not getattr(model.cfg, "parallel_attn_mlp", False)
    return same_layer and sequential and sender.kind == "head" and receiver.component.kind == "mlp"


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


def entrance(receiver: Receiver, n_layers: int) -> str:
    """The hook at which a receiver's input enters: attention's projection, the MLP's norm, or the final norm."""
    if receiver.component is None:
        return "ln_final.hook_in"
    inside = f"attn.hook_{receiver.input}" if receiver.input else "ln2.hook_in"
    return f"blocks.{receiver.component.layer}.{inside}"


def write_hooks(model: Any) -> list[str]:
    """The hooks from which `written` makes the outputs of all senders."""
    layers = range(model.cfg.n_layers)
    return ["blocks.0.hook_resid_pre", *(f"blocks.{i}.{n}" for i in layers for n in ("attn.hook_z", "hook_mlp_out"))]


def written(
    model: Any, name: str, activation: Float[Tensor, "pair pos *part"]
) -> Float[Tensor, "pair sender pos d_model"]:
    """What the senders at one hook write to the residual stream: each head's z W_O, or the activation itself.

    The output bias of attention belongs to no head; it is the same in both runs.
    """
    if not name.endswith("hook_z"):
        return activation[:, None]
    w_o = model.bridge.blocks[int(name.split(".")[1])].attn.W_O
    return torch.einsum("bphe,hed->bhpd", activation, w_o)


@torch.no_grad()
def all_written(
    model: Any, tokens: Int[Tensor, "pair pos"], attention_mask: Bool[Tensor, "pair pos"]
) -> Float[Tensor, "pair sender pos d_model"]:
    """The outputs of all senders, 0 at padding. pair × sender × pos × d_model numbers: take few pairs at a time.

    Raises:
        ValueError: they do not add up to the residual stream.
    """
    names = write_hooks(model)
    with hooks.capture(model, [*names, "ln_final.hook_in"]) as found:
        model.logits(tokens, attention_mask)
    mask = attention_mask.to(model.device)[:, None, :, None]
    out = torch.cat([written(model, name, found[name]) for name in names], dim=1).masked_fill(~mask, 0)
    # The output biases are the same at every token, so they go with the mean over tokens.
    final = found["ln_final.hook_in"].masked_fill(~mask[:, 0], 0)
    rest = (final - out.sum(1))[mask[:, 0, :, 0]].float()
    rest = rest - rest.mean(0)
    size = final[mask[:, 0, :, 0]].float().norm()
    tolerance = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if rest.norm() > tolerance * size:
        raise _not_additive(model, "they do not add up to it")
    return out


def read(
    model: Any, receivers: Sequence[Receiver], residual: Float[Tensor, "*batch receiver d_model"]
) -> Float[Tensor, "*batch receiver d_head"]:
    """What attention inputs of one layer and one kind ("q", "k" or "v") make of residual streams, one each."""
    first = receivers[0]
    assert first.component is not None and first.input is not None
    block = model.bridge.blocks[first.component.layer]
    chosen = torch.tensor([r.component.index for r in receivers if r.component is not None], device=residual.device)
    weight = getattr(block.attn, f"W_{first.input.upper()}")[chosen]
    bias = getattr(block.attn, f"b_{first.input.upper()}")
    out = torch.einsum("...rd,rde->...re", block.ln1.original_component(residual), weight)
    return out if bias is None else out + bias[chosen]


def _require_additive(model: Any) -> None:
    for block in model.bridge.blocks:
        parts = set(block.submodules)
        if after := parts & {"ln1_post", "ln2_post"}:
            raise _not_additive(model, f"a norm ({min(after)}) stands between them")
        if not {"ln1", "ln2", "attn", "mlp"} <= parts:
            raise ValueError(
                f"{model.name} has no edges that locus can patch: attention and MLP need a norm each before them, "
                f"and its blocks have {', '.join(sorted(parts))}. Score its components instead, e.g. with "
                "ActivationPatching()"
            )


def _not_additive(model: Any, why: str) -> ValueError:
    return ValueError(
        f"{model.name} has no edges from heads: what its heads and MLPs write is not what enters the residual stream "
        f"({why}). Score its components instead, e.g. with ActivationPatching()"
    )


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """Scores of edges, one row a pair, in units of the metric.

    Sign: **positive = cutting the edge lowers the metric**, so it supports the answer.

    values: one row a pair, one column an edge, finite
    method: the frozen method object that made them (`RecordedMethod` after loading)
    metric: name of the metric whose units these are
    facts: labels of the rows, or empty
    """

    values: Float[Tensor, "pair edge"]
    edges: Edges
    method: object
    metric: str
    facts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checked_rows(self.values, self.edges, self.facts, "EdgeScores", "edge"))

    def mean(self) -> Float[Tensor, " edge"]:
        """Mean over the pairs."""
        return self.values.mean(0)

    def order(self, by: str = "magnitude") -> Int[Tensor, " edge"]:
        """The edges from the most to the least important: by |mean score| ("magnitude"), or by the mean score."""
        return ranking(self.mean(), by)

    def top(self, n: int = 10, *, by: str = "magnitude") -> pd.DataFrame:
        """The first n edges of `order(by)`: edge, score, its standard error over pairs."""
        chosen = self.order(by)[:n]
        pairs = len(self.values)
        error = self.values[:, chosen].std(0) / pairs**0.5 if pairs > 1 else torch.full((len(chosen),), torch.nan)
        return pd.DataFrame(
            {
                "edge": list(self.edges.take(chosen).labels),
                "score": self.mean()[chosen].tolist(),
                "standard_error": error.tolist(),
            }
        )

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows: fact, edge, sender, receiver, input, score."""
        n, m = self.values.shape
        table = pd.DataFrame(
            [
                (str(e), str(e.sender or EMBED), str(e.receiver.component or LOGITS), e.receiver.input)
                for e in self.edges
            ],
            columns=["edge", "sender", "receiver", "input"],
        )
        rows = pd.concat([table] * n, ignore_index=True)
        rows.insert(0, "fact", np.repeat(np.array(self.facts or [str(i) for i in range(n)], dtype=object), m))
        return rows.assign(score=self.values.flatten().tolist())

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: values and edges, and all else as JSON in its metadata."""
        record = {
            "method": method_record(self.method),
            "metric": self.metric,
            "facts": list(self.facts),
            "model": self.edges.model,
            "senders": [str(s or EMBED) for s in self.edges.senders],
            "receivers": [str(r) for r in self.edges.receivers],
        }
        tensors = {"values": self.values, "sender": self.edges.sender, "receiver": self.edges.receiver}
        return write_tensors(path, tensors, kind="edge scores", record=record)

    @classmethod
    def load(cls, path: str | Path) -> "EdgeScores":
        """Read what `save` wrote. The method comes back as a `RecordedMethod`."""
        tensors, record = read_tensors(path, kind="edge scores")
        senders = tuple(parse_sender(label) for label in record["senders"])
        receivers = tuple(parse_receiver(label) for label in record["receivers"])
        which = Edges(senders, receivers, tensors["sender"], tensors["receiver"], record["model"])
        return cls(tensors["values"], which, recorded_method(record), record["metric"], tuple(record["facts"]))

    def __repr__(self) -> str:
        best = ", ".join(f"{row.edge} {row.score:+.3g}" for row in self.top(3).itertuples())
        n, m = self.values.shape
        return f"EdgeScores({m} edges x {n} pairs, {self.method!r}, {self.metric}; top: {best})"


def ranking(scores: Float[Tensor, " item"], by: str) -> Int[Tensor, " item"]:
    """Places from the most to the least important, by |score| ("magnitude") or by score."""
    if by not in ("magnitude", "score"):
        raise ValueError(f"by must be 'magnitude' or 'score', got {by!r}")
    return torch.argsort(scores.abs() if by == "magnitude" else scores, descending=True, stable=True)
