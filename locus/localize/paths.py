"""Scores of edges: exact path patching, and its first-order estimate for all edges at once (EAP, EAP-IG)."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locus import hooks
from locus.components import Component, Components
from locus.edges import Edges, EdgeScores, Receiver, all_written, edges, entrance, parse_receiver, parse_sender, read
from locus.localize.interventions import per_example, require_direction, targets
from locus.metrics import logit_difference
from locus.progress import tqdm
from locus.reads import gather, unembed
from locus.sweeps import MAX_TOKENS, sweep


@dataclass(frozen=True)
class EAP:
    """Edge attribution patching: all edges u → v at once, from gradients at the receivers' inputs.

    c(u → v) = Σ_pos,dim (a_u(clean) - a_u(corrupted)) · (1/S) Σ_k ∂m/∂(input of v) at the base run, its embeddings
    moved by k/S of the way to the other run's, k = 0 … S - 1

    One step is EAP: the estimate of `PathPatching` of the same direction, exact where the metric is linear in the
    edge. More are EAP-IG (inputs), which sees past saturation; the sum over the embedding's edges tends to
    m(clean) - m(corrupted). The base run is the corrupted one for "denoising", the clean one for "noising". The
    input of a head is the residual stream before its norm. In units of the metric.

    A component's score is the sum over its outgoing edges: with one step that of `AttributionPatching`.

    Two forward passes and S forward and backward passes, one receiver layer at a time, so that memory is that of
    the outputs of all senders for `batch_size` pairs: pairs × senders × positions × d_model numbers.

    Syed, Rager & Conmy 2023 (arXiv 2310.10348); Hanna, Pezzelle & Belinkov 2024 (arXiv 2403.17806), whose code
    takes the same k.

    Attributes:
        steps: S, 1 for EAP; 5 is enough in the paper on EAP-IG.
        direction: "denoising" or "noising".
        batch_size: pairs in one pass at the most.
    """

    steps: int = 1
    direction: str = "denoising"
    batch_size: int = 8
    KINDS: ClassVar[tuple[str, ...]] = ("head", "mlp")

    def __post_init__(self) -> None:
        require_direction(self.direction)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def score_edges(
        self, model: Any, pairs: Any, chosen: Edges, metric: Callable, progress: bool
    ) -> Float[Tensor, "pair edge"]:
        parts = []
        for some in batches(pairs, self.batch_size, "edge attribution" if progress else None):
            parts.append(self._matrix(model, some, chosen, metric)[:, chosen.sender, chosen.receiver].cpu())
        return torch.cat(parts)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        every = edges(model)
        values = self.score_edges(model, pairs, every, metric, progress)
        sums = values.new_zeros(len(values), len(every.senders)).index_add(1, every.sender, values)
        return sums[:, [every.senders.index(component) for component in components]]

    def _matrix(self, model: Any, pairs: Any, graph: Edges, metric: Callable) -> Float[Tensor, "pair sender receiver"]:
        base, source = _runs(pairs, self.direction)
        start = all_written(model, base, pairs.attention_mask)
        change = all_written(model, source, pairs.attention_mask) - start
        start = start[:, 0].clone()  # of the base run, only the embeddings are needed from here on
        sign = 1 if self.direction == "denoising" else -1
        out = change.new_zeros(len(pairs), len(graph.senders), len(graph.receivers))
        for step in range(self.steps):
            entering = start + step / self.steps * change[:, 0]
            gradients, residuals = _gradients(model, base, entering, pairs, metric)
            for layer in reversed(range(model.cfg.n_layers + 1)):
                places = [i for i, r in enumerate(graph.receivers) if _layer(r, model) == layer]
                before = 1 + sum(s is not None and s.layer <= layer for s in graph.senders)
                some = [graph.receivers[i] for i in places]
                slopes = _at_inputs(model, some, gradients, residuals, layer)
                slopes = slopes.masked_fill(~pairs.attention_mask.to(slopes.device)[:, None, :, None], 0)
                effect = torch.einsum("bspd,brpd->bsr", change[:, :before], slopes)
                out[:, :before, places] += sign * effect / self.steps
        return out


@dataclass(frozen=True)
class PathPatching:
    """Path patching, exact: one edge at a time, every other reader of the sender kept at the base run.

    denoising:  m(corrupted, edge ← clean) - m(corrupted)        is the edge enough?
    noising:    m(clean) - m(clean, edge ← corrupted)            is it needed?

    The receiver's input is recomputed, through its norm, with the sender's output of the other run; what stands
    between the two is not; all that follows the receiver is. In units of the metric.

    A component's score is that of its path to `receiver`; the components that it does not read have 0.

    Wang et al. 2023 (arXiv 2211.00593), section 3.1; Goldowsky-Dill et al. 2023 (arXiv 2304.05969).

    Attributes:
        direction: "denoising" or "noising".
        receiver: for scores of components: "logits", an input ("L5H1.q", "L5KV0.k", "L4MLP"), or a head or key/value
            group with all of its inputs together ("L5H1").
        max_tokens: tokens in one forward pass at the most.
        batch_size: pairs at a time at the most.
    """

    direction: str = "denoising"
    receiver: str = "logits"
    max_tokens: int = MAX_TOKENS
    batch_size: int = 8
    KINDS: ClassVar[tuple[str, ...]] = ("head", "mlp")

    def __post_init__(self) -> None:
        require_direction(self.direction)

    def score_edges(
        self, model: Any, pairs: Any, chosen: Edges, metric: Callable, progress: bool
    ) -> Float[Tensor, "pair edge"]:
        cells = [(s, (r,)) for s, r in zip(chosen.sender.tolist(), chosen.receiver.tolist(), strict=True)]
        return self._patch(model, pairs, chosen, cells, metric, progress)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        graph = edges(model)
        receivers = _inputs(graph, self.receiver)
        readers = {s for s, r in zip(graph.sender.tolist(), graph.receiver.tolist(), strict=True) if r in receivers}
        senders = [graph.senders.index(component) for component in components]
        read_from = [i for i, s in enumerate(senders) if s in readers]
        cells = [(senders[i], receivers) for i in read_from]
        values = self._patch(model, pairs, graph, cells, metric, progress)
        out = values.new_zeros(len(pairs), len(components))
        out[:, read_from] = values
        return out

    def _patch(
        self,
        model: Any,
        pairs: Any,
        graph: Edges,
        cells: Sequence[tuple[int, tuple[int, ...]]],
        metric: Callable,
        progress: bool,
    ) -> Float[Tensor, "pair cell"]:
        """The effect of each cell: a sender, and receivers of one layer that it is patched into together."""
        if not cells:
            return torch.zeros(len(pairs), 0)
        label = f"path patching, {self.direction}" if progress else None
        return torch.cat(
            [self._some(model, some, graph, cells, metric) for some in batches(pairs, self.batch_size, label)]
        )

    def _some(
        self,
        model: Any,
        pairs: Any,
        graph: Edges,
        cells: Sequence[tuple[int, tuple[int, ...]]],
        metric: Callable,
    ) -> Float[Tensor, "pair cell"]:
        base, source = _runs(pairs, self.direction)
        change = all_written(model, source, pairs.attention_mask) - all_written(model, base, pairs.attention_mask)
        recorded = hooks.trace(model, base, pairs.attention_mask)
        read_at, answers = pairs.read.to(model.device), targets(pairs)
        final = gather(recorded.inputs[-1], read_at)
        n_layers = model.cfg.n_layers
        layers = [_layer(graph.receivers[receivers[0]], model) for _, receivers in cells]
        with torch.no_grad():
            before = metric(unembed(model, final), answers)
            out = before.new_zeros(len(pairs), len(cells))
            for c in (c for c, layer in enumerate(layers) if layer == n_layers):
                moved = final + gather(change[:, cells[c][0]], read_at)
                out[:, c] = metric(unembed(model, moved), answers) - before
        inner = [c for c, layer in enumerate(layers) if layer < n_layers]

        def start(some: list[int]) -> hooks.Start:
            chosen = [cells[inner[i]] for i in some]
            return _start(model, recorded, change, [(s, [graph.receivers[r] for r in rs]) for s, rs in chosen])

        inner_layers = [layers[c] for c in inner]
        for some, logits in sweep(recorded, inner_layers, start, read_at, max_tokens=self.max_tokens) if inner else ():
            for i, cell_logits in zip(some, logits, strict=True):
                out[:, inner[i]] = metric(cell_logits, answers) - before
        return (out if self.direction == "denoising" else -out).cpu()


def localize_edges(
    model: Any,
    pairs: Any,
    method: EAP | PathPatching,
    *,
    chosen: Edges | Sequence[str] | None = None,
    metric: Callable = logit_difference,
    progress: bool = True,
) -> EdgeScores:
    """Score edges by how much they matter for the facts of `pairs`.

    Args:
        model: a `HookedModel`.
        pairs: `ContrastPairs`.
        method: `EAP()`, `EAP(steps=5)` for EAP-IG, or `PathPatching()`, which is exact and takes one pass an edge.
        chosen: edges, or their labels, such as `["embed->L0MLP", "L0H1->L2H3.k"]`; default all.
        metric: per-example function of logits, see `locus.metrics`.
        progress: show a bar.

    Raises:
        ValueError: the model has no such edges (see `locus.edges.edges`), or they belong to another model.
    """
    if not hasattr(method, "score_edges"):
        raise ValueError(f"{type(method).__name__} does not score edges; EAP and PathPatching do")
    if not len(pairs):
        raise ValueError("there are no contrast pairs to localize with; take at least one")
    every = edges(model)
    if chosen is None or not isinstance(chosen, Edges):
        chosen = every if chosen is None else every.select(chosen)
    if chosen.model != model.fingerprint:
        raise ValueError(f"the edges belong to model {chosen.model}, not to {model.name} ({model.fingerprint})")
    values = method.score_edges(model, pairs, chosen, per_example(metric), progress)
    name = getattr(metric, "__name__", str(metric))
    return EdgeScores(values, chosen, method, name, tuple(fact.prompt for fact in pairs.facts))


def path_patch(
    model: Any,
    pairs: Any,
    sender: str | Component,
    receiver: str | Component,
    *,
    direction: str = "denoising",
    metric: Callable = logit_difference,
) -> Float[Tensor, " pair"]:
    """Exact effect of one path, for each pair; see `PathPatching` for its formula and sign.

    sender: "embed", a head or an MLP. receiver: "logits", an input such as "L5H1.q", or "L5H1" for all of its
    inputs together.

    Raises:
        ValueError: the receiver does not read the sender.
    """
    graph = edges(model)
    receivers = _inputs(graph, str(receiver))
    source = parse_sender(str(sender))
    place = graph.senders.index(source) if source in graph.senders else None
    readable = set(zip(graph.sender.tolist(), graph.receiver.tolist(), strict=True))
    if place is None or any((place, r) not in readable for r in receivers):
        graph.select([f"{sender}->{graph.receivers[receivers[0]]}"])  # raises, and names edges that exist
    method = PathPatching(direction)
    return method._patch(model, pairs, graph, [(place or 0, receivers)], per_example(metric), False)[:, 0]


def batches(pairs: Any, size: int, label: str | None) -> Iterator[Any]:
    """Some pairs at a time, with a bar."""
    if size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {size}")
    for first in tqdm(range(0, len(pairs), size), desc=label, disable=label is None, file=sys.stderr, leave=False):
        yield pairs[first : first + size]


def _runs(pairs: Any, direction: str) -> tuple[Int[Tensor, "pair pos"], Int[Tensor, "pair pos"]]:
    """Tokens of the run that is intervened on, and of the run that activations come from."""
    return (pairs.corrupted, pairs.clean) if direction == "denoising" else (pairs.clean, pairs.corrupted)


def _layer(receiver: Receiver, model: Any) -> int:
    """The layer of an input; the logits come after the last."""
    return model.cfg.n_layers if receiver.component is None else receiver.component.layer


def _inputs(graph: Edges, label: str) -> tuple[int, ...]:
    """The numbers of the inputs that a label names: one, or all of a component."""
    wanted = parse_receiver(label)
    found = tuple(
        i for i, r in enumerate(graph.receivers) if r == wanted or (wanted.input is None and r[0] == wanted.component)
    )
    if not found:
        raise ValueError(f"there is no receiver {label!r}; receivers are {', '.join(map(str, graph.receivers[:4]))}, …")
    return found


def _gradients(
    model: Any, tokens: Tensor, entering: Float[Tensor, "pair pos d_model"], pairs: Any, metric: Callable
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """∂m/∂ at all entrances of receivers, with these embeddings, and the residual stream that attention reads."""
    blocks = range(model.cfg.n_layers)
    names = [f"blocks.{i}.{n}" for i in blocks for n in ("attn.hook_q", "attn.hook_k", "attn.hook_v", "ln2.hook_in")]
    found: dict[str, Tensor] = {}

    def branch(name: str) -> hooks.Edit:
        def edit(activation: Tensor) -> Tensor:
            # A view of its own: the gradient of this reader, not of all who read the same tensor.
            found[name] = activation.view_as(activation)
            return found[name]

        return edit

    names.append("ln_final.hook_in")
    embedded = ("blocks.0.hook_resid_pre", lambda _: entering.detach().requires_grad_())
    with (
        torch.enable_grad(),
        model.frozen(),
        hooks.edits(model, [embedded, *((name, branch(name)) for name in names)]),
        hooks.capture(model, [f"blocks.{i}.ln1.hook_in" for i in blocks]) as residuals,
        hooks.read_only(model, pairs.read),
    ):
        total = metric(model.logits(tokens, pairs.attention_mask), targets(pairs)).sum()
        gradients = torch.autograd.grad(total, [found[name] for name in names])
    return dict(zip(names, gradients, strict=True)), {name: x.detach() for name, x in residuals.items()}


def _at_inputs(
    model: Any,
    receivers: list[Receiver],
    gradients: dict[str, Tensor],
    residuals: dict[str, Tensor],
    layer: int,
) -> Float[Tensor, "pair receiver pos d_model"]:
    """∂m/∂(residual stream as each receiver of one layer reads it).

    For attention, the gradient at the projection is drawn back through the projection and the norm.
    """
    parts = []
    for name in dict.fromkeys(entrance(r, model.cfg.n_layers) for r in receivers):
        if "attn" not in name:
            parts.append(gradients[name][:, None])
            continue
        some = [r for r in receivers if entrance(r, model.cfg.n_layers) == name]
        with torch.enable_grad(), model.frozen():
            residual = residuals[f"blocks.{layer}.ln1.hook_in"][:, :, None].expand(-1, -1, len(some), -1)
            residual = residual.detach().requires_grad_()
            (slope,) = torch.autograd.grad(read(model, some, residual), residual, gradients[name])
        parts.append(slope.transpose(1, 2))
    return torch.cat(parts, dim=1)


def _start(
    model: Any,
    recorded: hooks.Trace,
    change: Float[Tensor, "pair sender pos d_model"],
    cells: list[tuple[int, list[Receiver]]],
) -> hooks.Start:
    """The rows of cells of one layer, all pairs for each, with each one's receivers' inputs recomputed."""
    n, layer = len(recorded), _layer(cells[0][1][0], model)

    def edit_of(name: str) -> hooks.Edit:
        own = [
            (cell, sender, r)
            for cell, (sender, receivers) in enumerate(cells)
            for r in receivers
            if entrance(r, model.cfg.n_layers) == name
        ]

        def edit(activation: Tensor) -> Tensor:
            rows = activation.clone().reshape(len(cells), n, *activation.shape[1:])
            moves = change[:, [sender for _, sender, _ in own]].transpose(1, 2)
            if "attn" not in name:
                for i, (cell, _, _) in enumerate(own):
                    rows[cell] += moves[:, :, i]
                return rows.reshape(activation.shape)
            new = read(model, [r for _, _, r in own], recorded.inputs[layer][:, :, None] + moves)
            for i, (cell, _, r) in enumerate(own):
                assert r.component is not None
                rows[cell][:, :, r.component.index] = new[:, :, i]
            return rows.reshape(activation.shape)

        return edit

    names = dict.fromkeys(entrance(r, model.cfg.n_layers) for _, receivers in cells for r in receivers)
    return hooks.Start(torch.arange(n).repeat(len(cells)), edits={name: edit_of(name) for name in names})
