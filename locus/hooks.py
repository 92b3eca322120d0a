"""Capture, patch and continue forward passes. The only file that registers hooks.

The fast paths rest on one observation: a decoder block is a function of the residual stream and of inputs that do
not depend on it (masks, positions). So one recorded forward pass (`trace`) is enough to continue from any layer with
any number of changed rows, each of which is computed only from the layer at which it was changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Edit = Callable[[Tensor], Tensor]


@contextmanager
def edits(model: Any, hooks: Sequence[tuple[str, Edit]]) -> Iterator[None]:
    """Within the block, the activation at each named hook is replaced by what its function returns.

    Activations come in TransformerLens' shapes (`hook_z`: [batch, pos, head, d_head]). The hooks are removed at the
    end, also after an error, and no hook of the user's is touched.
    """
    handles = []
    try:
        for name, edit in hooks:
            point = _point(model, name)
            handles.append(point.register_forward_hook(_edit_hook(point, edit, name.endswith("hook_resid_mid"))))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture(model: Any, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within the block, fills a dictionary with the activations at the named hooks, inside the autograd graph."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Edit:
        def edit(activation: Tensor) -> Tensor:
            # Returned, so that the rest of the pass is computed from the captured tensor and not from the one
            # that it is a view of: else its gradient would be None.
            found[name] = activation
            return activation

        return edit

    with edits(model, [(name, keep(name)) for name in names]):
        yield found


@torch.no_grad()
def states(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Bool[Tensor, "batch pos"],
    names: Sequence[str],
    chunk: int = 64,
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """Activations at the named hooks, in the order of the names, without gradients; `chunk` rows a forward pass."""
    parts: list[dict[str, Tensor]] = []
    for rows in torch.arange(len(tokens)).split(chunk):
        first = torch.zeros(len(rows), 1, dtype=torch.long)  # logits are not needed
        with capture(model, names) as found, read_only(model, first):
            model.logits(tokens[rows], attention_mask[rows])
        parts.append(found)
    return {name: torch.cat([part[name] for part in parts]) for name in names}


@contextmanager
def linear_edit(module: nn.Module, edit: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Within the block, the module's output is `edit(input, output)`."""
    handle = module.register_forward_hook(lambda _, args, output: edit(args[0], output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def read_only(model: Any, read: Int[Tensor, "batch read"]) -> Iterator[None]:
    """Within the block, the model's logits are those at the positions `read` of each row, and no others."""
    # After the final norm, not before: GPT-2 gives its output the shape of its input there.
    handle = model.bridge.unembed.register_forward_pre_hook(lambda _, args: (gather(args[0], read), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


class Passes:
    """How many forward and backward passes of one prompt ran, in units of the whole model: see `passes`."""

    def __init__(self) -> None:
        self.forward = 0.0
        self.backward = 0.0

    def __repr__(self) -> str:
        return f"{self.forward:,.1f} forward and {self.backward:,.1f} backward passes of one prompt"


@contextmanager
def passes(model: Any) -> Iterator[Passes]:
    """Within the block, counts the passes through the model's blocks.

    One = one prompt through all blocks; a row that starts at layer l of L counts (L - l) / L. So a sweep that grows
    its batch and a loop over whole passes are counted by the work that they are, whatever their batches.
    """
    found = Passes()
    blocks = list(model.bridge.blocks)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        residual = output[0] if isinstance(output, tuple) else output
        share = residual.shape[0] / len(blocks)
        found.forward += share
        if residual.requires_grad:
            residual.register_hook(lambda gradient: _count_backward(found, share))

    handles = [block.register_forward_hook(hook) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _count_backward(found: Passes, share: float) -> None:
    found.backward += share


@dataclass(frozen=True, eq=False)
class Start:
    """Rows that begin at one layer of a sweep.

    Attributes:
        rows: Int[" row"], the batch row of the trace that each one is a copy of.
        edits: hook inside this layer, or inside a later one → function of the activations of these rows, [row, pos, …].
        enter: function of the residual stream with which these rows enter the layer.
    """

    rows: Int[Tensor, " row"]
    edits: dict[str, Edit] = field(default_factory=dict)
    enter: Edit | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded forward pass that can be continued from any layer.

    Attributes:
        model: the `HookedModel`.
        inputs: residual stream entering each block, and last the final norm: [layer + 1][batch, pos, d_model].
        calls: the other arguments of each block.
    """

    model: Any
    inputs: tuple[Float[Tensor, "batch pos d_model"], ...]
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]

    def __len__(self) -> int:
        return self.inputs[0].shape[0]

    def block(
        self, layer: int, residual: Float[Tensor, "row pos d_model"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, "row pos d_model"]:
        """One block on any rows; `rows` says which row of the trace each has its mask and positions from."""
        args, kwargs = self.calls[layer]
        batch = len(self)
        out = self.model.bridge.blocks[layer](residual, *_select(args, rows, batch), **_select(kwargs, rows, batch))
        return out[0] if isinstance(out, tuple) else out

    def resume(
        self,
        layer: int,
        residual: Float[Tensor, "row pos d_model"],
        rows: Int[Tensor, " row"],
        read: Int[Tensor, "row read"],
    ) -> Float[Tensor, "row read d_vocab"]:
        """Logits at the positions `read`, from the residual stream that enters block `layer`."""
        for i in range(layer, len(self.calls)):
            residual = self.block(i, residual, rows)
        return unembed(self.model, gather(residual, read))

    def grow(self, starts: dict[int, Start], read: Int[Tensor, "batch read"]) -> Float[Tensor, "row read d_vocab"]:
        """A whole sweep in one pass: rows join the batch at the layer at which they are changed.

        Args:
            starts: layer → the rows that begin there.
            read: positions to read of each row of the trace.

        Returns:
            Logits of all rows, layer by layer in the order of `starts[layer].rows`.
        """
        device = self.inputs[0].device
        rows = torch.empty(0, dtype=torch.long, device=device)
        residual = self.inputs[0][:0]
        joined: list[tuple[int, int, Start]] = []
        for layer in range(min(starts), len(self.calls)):
            start = starts.get(layer)
            if start is not None:
                new_rows = start.rows.to(device)
                new = self.inputs[layer].index_select(0, new_rows)
                if start.enter is not None:
                    new = start.enter(new)
                joined.append((len(rows), len(rows) + len(new_rows), start))
                rows = torch.cat([rows, new_rows])
                residual = torch.cat([residual, new])
            with edits(self.model, _edits_at(layer, joined, len(rows))):
                residual = self.block(layer, residual, rows)
        return unembed(self.model, gather(residual, read.to(device)[rows]))

    def logits(self) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of the recorded pass itself."""
        return unembed(self.model, self.inputs[-1])


def trace(
    model: Any, tokens: Int[Tensor, "batch pos"], attention_mask: Bool[Tensor, "batch pos"] | None = None
) -> Trace:
    """Run a batch once and record what is needed to continue it from any layer. Autograd is off."""
    blocks = list(model.bridge.blocks)
    inputs: list[Tensor] = []
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.dtype == torch.float64:
            args, kwargs = _finite(args), _finite(kwargs)
        kwargs = dict(kwargs)
        residual = args[0] if args else kwargs.pop("hidden_states")
        inputs.append(residual.detach())
        calls.append((tuple(args[1:]), kwargs))

    def before_norm(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0].detach())

    handles = [b.register_forward_pre_hook(before_block, with_kwargs=True) for b in blocks]
    handles.append(model.bridge.ln_final.register_forward_pre_hook(before_norm))
    try:
        with torch.no_grad():
            model.logits(tokens, attention_mask)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(model, tuple(inputs), tuple(calls))


@dataclass(frozen=True, eq=False)
class Prefix:
    """The part of a forward pass below a layer, computed once; see `prefix`."""

    trace: Trace
    layer: int

    def run(self, rows: Int[Tensor, " row"], positions: Int[Tensor, "row read"]) -> Float[Tensor, "row read d_vocab"]:
        """Logits at `positions` of some rows of the batch, with autograd on, from `layer` upwards."""
        residual = self.trace.inputs[self.layer].index_select(0, rows.to(self.trace.inputs[0].device))
        return self.trace.resume(self.layer, residual, rows, positions)


def prefix(
    model: Any, tokens: Int[Tensor, "batch pos"], attention_mask: Bool[Tensor, "batch pos"] | None, layer: int
) -> Prefix:
    """Run the blocks below `layer` once, without gradients, to continue from there as often as wanted.

    `layer` 0 is the output of the embeddings; `n_layers` is the input of the final norm.
    """
    recorded = trace(model, tokens, attention_mask)
    # The other layers' inputs are given back; a view of one zero holds their shape.
    kept = tuple(x if i == layer else x.new_zeros(()).expand_as(x) for i, x in enumerate(recorded.inputs))
    return Prefix(Trace(model, kept, recorded.calls), layer)


def unembed(model: Any, residual: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
    """Final norm, unembedding and the model's soft cap of logits, if it has one."""
    logits = model.bridge.unembed(model.bridge.ln_final(residual))
    cap = getattr(model.bridge.original_model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def gather(
    residual: Float[Tensor, "row pos d_model"], read: Int[Tensor, "row read"]
) -> Float[Tensor, "row read d_model"]:
    """The residual stream at the positions `read` of each row."""
    index = read.to(residual.device)[:, :, None].expand(-1, -1, residual.shape[-1])
    return residual.gather(1, index)


def count(model: Any) -> int:
    """Number of hooks registered anywhere in the model (every public call leaves it as it was)."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.bridge.modules()
    )


def _point(model: Any, name: str) -> nn.Module:
    point = model.bridge.hook_dict.get(name)
    if point is None:
        raise ValueError(f"{model.name} has no hook {name!r}; `locus sites` lists the ones it has")
    return point


def _edit_hook(point: Any, edit: Edit, in_place: bool) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        conversion = point.hook_conversion
        if conversion is None:
            new = edit(output)
        else:
            new = conversion.revert(edit(conversion.convert(output)), output)
        # Inside a block the residual stream goes on past this hook too, in the same tensor.
        return output.copy_(new) if in_place and new is not output else new

    return hook


@contextmanager
def finite_masks(model: Any) -> Iterator[None]:
    """Within the block, attention masks stay finite in float32, in which softmax is taken.

    Else a query that may attend to nothing (left padding), masked with float64's minimum, is -inf everywhere in
    float32, its pattern NaN, and the NaN spreads through the values to every real token.
    """

    def before_block(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _finite(args), _finite(kwargs)

    handles = [b.register_forward_pre_hook(before_block, with_kwargs=True) for b in model.bridge.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(value: Any) -> Any:
    """Block arguments with their [batch, head, query, key] masks in additive, finite form."""
    if isinstance(value, Tensor) and value.ndim == 4:
        floor = torch.finfo(torch.float32).min / 2
        if value.dtype == torch.bool:
            return torch.zeros(value.shape, dtype=torch.float64, device=value.device).masked_fill(~value, floor)
        return value.clamp(min=floor) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_finite(v) for v in value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return value


def _edits_at(layer: int, joined: Sequence[tuple[int, int, Start]], total: int) -> list[tuple[str, Edit]]:
    """The edits inside one layer of all rows that have joined the batch; each has (first row, end, start)."""
    by_name: dict[str, list[tuple[float, float, Edit]]] = {}
    for first, end, start in joined:
        for name, edit in start.edits.items():
            if name.startswith(f"blocks.{layer}."):
                by_name.setdefault(name, []).append((first / total, end / total, edit))
    return [(name, _parts(parts)) for name, parts in by_name.items()]


def _parts(parts: Sequence[tuple[float, float, Edit]]) -> Edit:
    """An edit that applies others to parts of the first axis, each between two shares of its length, in order.

    Shares, and not numbers, because a router flattens batch and position into one axis.
    """

    def apply(activation: Tensor) -> Tensor:
        n, done, pieces = activation.shape[0], 0, []
        for first, end, edit in parts:
            begin, stop = round(n * first), round(n * end)
            pieces += [activation[done:begin], edit(activation[begin:stop])]
            done = stop
        return torch.cat([*pieces, activation[done:]])

    return apply


def _select(value: Any, rows: Tensor, batch: int) -> Any:
    """The argument of a block for other rows: whatever has a batch axis is indexed by `rows`."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows.to(value.device)) if batch > 1 and value.shape[:1] == (batch,) else value
    if isinstance(value, tuple | list):
        return type(value)(_select(v, rows, batch) for v in value)
    if isinstance(value, dict):
        return {k: _select(v, rows, batch) for k, v in value.items()}
    return value
