"""Capture, patch and continue forward passes. The only file that registers hooks.

The fast paths rest on one observation: a decoder block is a function of the residual stream and of inputs that do
not depend on it (masks, positions). So one recorded forward pass (`trace`) is enough to continue from any layer with
any number of changed rows, each of which is computed only from the layer at which it was changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from locus.arguments import finite, last_positions, select
from locus.components import used_already
from locus.packing import UNPACKED, Keys, Packing, Spans, acts_in, positions_second, share
from locus.reads import gather, unembed

Edit = Callable[[Tensor], Tensor]


@contextmanager
def edits(model: Any, hooks: Sequence[tuple[str, Edit]]) -> Iterator[None]:
    """Within the block, the activation at each named hook is replaced by what its function returns.

    Activations come in TransformerLens' shapes (`hook_z`: [batch, pos, head, d_head]). The hooks are removed at the
    end, also after an error, and no hook of the user's is touched.
    """
    handles = []
    points = model.bridge.hook_dict if hooks else {}  # put together anew each time that it is asked for
    try:
        for name, edit in hooks:
            if name not in points:
                raise ValueError(f"{model.name} has no hook {name!r}; `locus sites` lists the ones it has")
            handles.append(points[name].register_forward_hook(_edit_hook(model, points[name], name, edit)))
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
) -> dict[str, Float[Tensor, "batch ..."]]:
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
def inputs(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Float[Tensor, "... d_in"]]]:
    """Within the block, fills a dictionary with the first argument of each module's latest call."""
    found: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        found[module] = args[0]

    handles = [module.register_forward_pre_hook(keep) for module in dict.fromkeys(modules)]
    try:
        yield found
    finally:
        for handle in handles:
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


@dataclass(frozen=True, eq=False)
class Start:
    """Rows that begin at one layer of a sweep.

    Attributes:
        rows: Int[" row"], the batch row of the trace that each one is a copy of.
        edits: hook inside this layer or a later one → function of the activations of these rows, [row, pos, …].
        enter: function of the residual stream with which these rows enter the layer.
        first: Int[" row"], the first position at which each row is changed, if known (`Trace.first_changes`).
    """

    rows: Int[Tensor, " row"]
    edits: dict[str, Edit] = field(default_factory=dict)
    enter: Edit | None = None
    first: Int[Tensor, " row"] | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded forward pass that can be continued from any layer.

    Attributes:
        model: the `HookedModel`.
        inputs: residual stream entering each block, and last the final norm: [layer + 1][batch, pos, d_model].
        calls: the other arguments of each block.
        keys: of this run, where rows of `grow` compute only positions from their first change on (see `checked.packs`).
        sites: activations of this run at other hooks, by name; filled when they are first asked for.
        prompts: tokens and attention mask of this run, for models that cannot be continued.
    """

    model: Any
    inputs: tuple[Float[Tensor, "batch pos d_model"], ...]
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    keys: Keys | None = None
    sites: dict[str, Tensor] = field(default_factory=dict)
    prompts: tuple[Tensor, Tensor | None] | None = None

    def __len__(self) -> int:
        return self.inputs[0].shape[0]

    def site(self, name: str) -> Float[Tensor, "batch *rest"]:
        """The activation of the recorded run at a hook inside a block; a router's flat axis is split."""
        if name not in self.sites:
            layer = int(name.split(".")[1])
            with torch.no_grad(), capture(self.model, [name]) as found:
                self.block(layer, self.inputs[layer], torch.arange(len(self)))
            self.sites[name] = found[name]
        value = self.sites[name]
        return value if value.ndim > 2 else value.unflatten(0, self.inputs[0].shape[:2])

    def block(
        self, layer: int, residual: Float[Tensor, "*laid_out d_model"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, "*laid_out d_model"]:
        """One block on any rows, [row, pos, …]; `rows`: the row of the trace that gives each its mask and positions."""
        args, kwargs = self.calls[layer]
        batch = len(self)
        out = self.model.bridge.blocks[layer](residual, *select(args, rows, batch), **select(kwargs, rows, batch))
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

    def first_changes(self, layer: int, start: Start) -> Int[Tensor, " row"]:
        """The first position at which each row of a start differs from the recorded run; their number for none.

        Exact: an activation that is replaced by equal numbers changes nothing. All 0 where rows are not packed.
        """
        rows = start.rows.to(self.inputs[0].device)
        if self.keys is None:
            return torch.zeros_like(rows)
        pairs = [("hook_resid_pre", self.inputs[layer], start.enter)] if start.enter else []
        pairs += [(name, self.site(name), edit) for name, edit in start.edits.items()]
        positions = self.inputs[0].shape[1]
        changed = torch.zeros(len(rows), positions, dtype=torch.bool, device=rows.device)
        for name, base, edit in pairs:
            before = base.index_select(0, rows)
            changed |= positions_second(name, edit(before) != before).flatten(2).any(-1)
        return torch.where(changed, torch.arange(positions, device=rows.device), positions).amin(-1)

    def grow(self, starts: dict[int, Start], read: Int[Tensor, "batch read"]) -> Float[Tensor, "row read d_vocab"]:
        """A whole sweep in one pass: rows join the batch at the layer at which they are changed.

        Args:
            starts: layer → the rows that begin there.
            read: positions to read of each row of the trace.

        Returns:
            Logits of all rows, layer by layer in the order of `starts[layer].rows`.
        """
        return unembed(self.model, self.grown(starts, read))

    def grown(self, starts: dict[int, Start], read: Int[Tensor, "batch read"]) -> Float[Tensor, "row read d_model"]:
        """What `grow` unembeds: the residual stream that leaves the last block at the positions read.

        Rows may also begin after it, at layer `n_layers`.
        """
        starts = {layer: starts[layer] for layer in sorted(starts)}
        after = starts.pop(len(self.calls), None)
        parts = [self._grown(starts, read)] if starts else []
        if after is not None:
            rows = after.rows.to(self.inputs[0].device)
            new = self.inputs[-1].index_select(0, rows)
            parts.append(gather(new if after.enter is None else after.enter(new), read.to(rows.device)[rows]))
        return torch.cat(parts)

    def _grown(self, starts: dict[int, Start], read: Int[Tensor, "batch read"]) -> Float[Tensor, "row read d_model"]:
        rows = torch.cat([start.rows for start in starts.values()]).to(self.inputs[0].device)
        read = read.to(rows.device)[rows]
        if self.keys is None or any(name.endswith(UNPACKED) for s in starts.values() for name in s.edits):
            return gather(self._grown_whole(starts), read)
        first = torch.cat(
            [self.first_changes(k, s) if s.first is None else s.first.to(rows.device) for k, s in starts.items()]
        )
        lengths = self.inputs[0].shape[1] - first
        token = (lengths.cumsum(0) - lengths - first)[:, None] + read
        found = gather(self.inputs[-1].index_select(0, rows), read)  # what a row is before its first change
        changed = read >= first[:, None]
        if changed.any():
            wanted, where = token[changed].unique(return_inverse=True)
            found[changed] = self._grown_packed(starts, rows, first, wanted)[0, where]
        return found

    def _grown_whole(self, starts: dict[int, Start]) -> Float[Tensor, "row pos d_model"]:
        """Rows of all positions; what `_grown_packed` must equal."""
        rows = torch.empty(0, dtype=torch.long, device=self.inputs[0].device)
        residual = self.inputs[0][:0]
        spans = Spans()
        for layer in range(min(starts), len(self.calls)):
            if start := starts.get(layer):
                new = self.inputs[layer].index_select(0, start.rows.to(rows.device))
                residual = torch.cat([residual, new if start.enter is None else start.enter(new)])
                rows = torch.cat([rows, start.rows.to(rows.device)])
            hooks = [(n, share(span, len(rows), edit)) for n, span, edit in spans.edits(layer, start, len(rows))]
            with edits(self.model, hooks):
                residual = self.block(layer, residual, rows)
        return residual

    def _grown_packed(
        self,
        starts: dict[int, Start],
        rows: Int[Tensor, " row"],
        first: Int[Tensor, " row"],
        wanted: Int[Tensor, " some"],
    ) -> Float[Tensor, "1 some d_model"]:
        """Those wanted among the positions from `first` on of each row, one row after the other."""
        positions = self.inputs[0].shape[1]
        packing = Packing(rows, first, int(first.min()), positions)
        every, packing = packing, packing.select(slice(0, 0))
        residual = self.inputs[0].flatten(0, 1)[None, :0]
        spans, done = Spans(), 0
        drops = all(acts_in(layer, name) for layer, start in starts.items() for name in start.edits)
        for layer in range(min(starts), len(self.calls)):
            changed = packing.first < positions
            if drops and not bool(changed.all()):  # other rows take part in their own layer only, for the edits' sake
                packing = packing.select(changed)
            if start := starts.get(layer):
                n = len(start.rows)
                joining = every.select(slice(done, done + n))
                done += n
                if start.enter is None:
                    new = self.inputs[layer].flatten(0, 1)[joining.rows[joining.row] * positions + joining.position]
                else:
                    new = joining.pack(start.enter(self.inputs[layer].index_select(0, joining.rows)))
                packing = packing.join(joining)
                residual = torch.cat([residual, new[None]], dim=1)
            active = spans.edits(layer, start, len(packing.rows))
            hooks = [(name, packing.edit(name, self.site(name), span, edit)) for name, span, edit in active]
            if layer == len(self.calls) - 1 and not hooks:
                return self._block_packed(layer, residual, packing, wanted)
            with edits(self.model, hooks):
                residual = self._block_packed(layer, residual, packing)
        return residual[:, wanted]

    def _block_packed(
        self,
        layer: int,
        residual: Float[Tensor, "1 token d_model"],
        packing: Packing,
        wanted: Int[Tensor, " some"] | None = None,
    ) -> Float[Tensor, "1 some d_model"]:
        """A block on packed tokens, or on some of them: of the others there are then keys and values only."""
        if not residual.shape[1]:
            return residual
        if wanted is None:
            with _laid_out(self, layer, packing, packing.token, None):
                return self.block(layer, residual, packing.rows)
        every = self._enters_attention(layer, residual, packing.rows)
        with _laid_out(self, layer, packing, packing.token[wanted], every):
            return self.block(layer, residual[:, wanted], packing.rows)

    def _enters_attention(self, layer: int, residual: Tensor, rows: Tensor) -> Tensor:
        def stop(module: nn.Module, args: Any, output: Tensor) -> None:
            raise _Entered(output)

        handle = self.model.bridge.blocks[layer].attn.hook_in.register_forward_hook(stop)
        try:
            self.block(layer, residual, rows)
        except _Entered as entered:
            return entered.args[0]
        finally:
            handle.remove()
        raise ValueError(f"{self.model.name}: block {layer} does not call its attention")

    def logits(self) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of the recorded pass itself."""
        return unembed(self.model, self.inputs[-1])


class _Entered(Exception):
    """Ends a block where its attention begins."""


@contextmanager
def _laid_out(
    recorded: Trace, layer: int, packing: Packing, queries: Int[Tensor, " some"], every: Tensor | None
) -> Iterator[None]:
    """Within the block, the attention of one layer takes and gives packed tokens.

    queries: where the tokens that the block is given are among those laid out. every: the input of attention at all
    tokens, if these are not all of them.
    """
    attn = recorded.model.bridge.blocks[layer].attn
    laid_out = packing.positions - packing.start
    given: list[Tensor] = []
    assert recorded.keys is not None
    cache = recorded.keys.of(packing)

    def arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**last_positions(kwargs, laid_out), "past_key_values": cache}

    def enter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        given.append(output)
        return output[0, :1].expand(len(packing.rows), laid_out, -1)  # only its shape is read

    def lay_out(at: Tensor) -> Callable[..., Tensor]:
        return lambda _, args, output: packing.lay_out(output[0], at)

    handles = [
        attn.register_forward_pre_hook(arguments, with_kwargs=True),
        attn.hook_in.register_forward_hook(enter),
        attn.q.register_forward_pre_hook(lambda _, args: (given[0], *args[1:])),
        attn.q.original_component.register_forward_hook(lay_out(queries)),
    ]
    for linear in (attn.k, attn.v):
        handles.append(
            linear.register_forward_pre_hook(lambda _, args: (given[0] if every is None else every, *args[1:]))
        )
        handles.append(linear.original_component.register_forward_hook(lay_out(packing.token)))
    output = attn.o.original_component
    handles.append(output.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1)[None, queries], *args[1:])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Bool[Tensor, "batch pos"] | None = None,
    sites: Sequence[str] = (),
) -> Trace:
    """Run a batch once and record what is needed to continue it from any layer, without logits. Autograd is off."""
    with read_only(model, torch.zeros(len(tokens), 0, dtype=torch.long)):
        return record(model, tokens, attention_mask, sites, keys=model.packed)[0]


def record(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Bool[Tensor, "batch pos"] | None = None,
    sites: Sequence[str] = (),
    *,
    keys: bool = False,
) -> tuple[Trace, Float[Tensor, "batch _ d_vocab"]]:
    """`trace`, with the activations at some hooks and, if `keys`, what packed rows need; and the logits of the run."""
    inputs: list[Tensor] = []
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.dtype == torch.float64:
            args, kwargs = finite(args), finite(kwargs)
        kwargs = dict(kwargs)
        residual = args[0] if args else kwargs.pop("hidden_states")
        inputs.append(residual.detach())
        calls.append((tuple(args[1:]), kwargs))

    def before_norm(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0].detach())

    blocks, found_keys = list(model.bridge.blocks), Keys()
    handles = [b.register_forward_pre_hook(before_block, with_kwargs=True) for b in blocks]
    # TransformerLens' ways of forking the input of attention, or of splitting its output, are not packed.
    forks = ("use_split_qkv_input", "use_attn_in", "use_attn_result")
    if keys and not any(getattr(model.bridge.cfg, fork, False) for fork in forks):
        cached = lambda _, args, kwargs: (args, {**kwargs, "past_key_values": found_keys})  # noqa: E731
        attentions = [block.attn for block in blocks if hasattr(block, "attn")]
        handles += [attn.register_forward_pre_hook(cached, with_kwargs=True) for attn in attentions]
    handles.append(model.bridge.ln_final.register_forward_pre_hook(before_norm))
    try:
        with torch.no_grad(), capture(model, sites) as found:
            logits = model.logits(tokens, attention_mask)
    finally:
        for handle in handles:
            handle.remove()
    complete = len(found_keys.found) == len(blocks)
    keys_found = found_keys if complete else None
    return Trace(model, tuple(inputs), tuple(calls), keys_found, dict(found), (tokens, attention_mask)), logits


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
    recorded, _ = record(model, tokens, attention_mask)
    # The other layers' inputs are given back; a view of one zero holds their shape.
    kept = tuple(x if i == layer else x.new_zeros(()).expand_as(x) for i, x in enumerate(recorded.inputs))
    return Prefix(replace(recorded, inputs=kept), layer)


def count(model: Any) -> int:
    """Number of hooks registered anywhere in the model (every public call leaves it as it was)."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.bridge.modules()
    )


def _edit_hook(model: Any, point: Any, name: str, edit: Edit) -> Callable[..., Tensor]:
    conversion, in_place, used = point.hook_conversion, name.endswith("hook_resid_mid"), used_already(model, name)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        new = edit(output) if conversion is None else conversion.revert(edit(conversion.convert(output)), output)
        if used and new is not output:
            raise ValueError(f"{model.name} shows {name} after it was used: it can be looked at, and not be changed")
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
        return finite(args), finite(kwargs)

    handles = [b.register_forward_pre_hook(before_block, with_kwargs=True) for b in model.bridge.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
