"""Exact activation-patching sweeps: the functions of `transformer_lens.patching`, many cells to a forward pass.

Same names, arguments, options and result shapes as TransformerLens 4.3, so that a script moves over by changing the
import; also takes a `HookedModel`, padded batches, and `progress=False`. Direction: clean activations are put into
the run on the corrupted tokens (denoising); swap the two for noising.

One difference: `resid_mid` always patches the residual stream itself. TransformerLens does so under `torch.no_grad()`
only; with autograd on it patches a copy that just the MLP reads.

How it is fast: rows patched at layer l begin at layer l (`hooks.Trace.grow`), all cells share one pass up to
`max_tokens` tokens, and only the positions that the metric reads are unembedded. `max_tokens` is a setting, not a
function of free memory, so that results do not depend on the machine (the composition of a batch moves float32
logits by about 1e-5).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
import transformer_lens.patching as tl
import transformer_lens.utilities as tl_utilities
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm
from transformer_lens.patching import PatchingResult

from locus import hooks

MAX_TOKENS = 4096

Metric = Callable[[Tensor], Any]


def sweep(
    recorded: hooks.Trace,
    layers: Sequence[int],
    start: Callable[[list[int]], hooks.Start],
    read: Int[Tensor, "batch read"],
    *,
    max_tokens: int = MAX_TOKENS,
    progress: str | None = None,
) -> Iterator[tuple[list[int], Float[Tensor, "cell batch read d_vocab"]]]:
    """Run many cells (interventions), each on the whole recorded batch, as few passes as `max_tokens` allows.

    Args:
        recorded: the run that is intervened on.
        layers: the layer of each cell.
        start: cells of one layer → the rows they begin with, cell by cell, each with the batch's rows in order.
        read: positions to unembed, for each row of the batch.
        max_tokens: tokens (rows × positions) in one pass at the most.
        progress: label of the progress bar; None for none.

    Yields:
        The numbers of some cells, and their logits.
    """
    batch, positions = recorded.inputs[0].shape[:2]
    with torch.no_grad():
        first = _first_changes(recorded, layers, start, max_tokens)
    tokens = (positions - first).sum(1)
    together = max(1, max_tokens // (8 * read.numel()))  # logits are large: those of a few cells at a time
    passes = _passes(layers, tokens, batch * positions, max_tokens)
    with (
        torch.no_grad(),
        tqdm(total=len(layers), desc=progress, disable=progress is None, file=sys.stderr, leave=False) as bar,
    ):
        same = (tokens == 0).nonzero().flatten().tolist()
        if same:
            base = hooks.unembed(recorded.model, hooks.gather(recorded.inputs[-1], read.to(first.device)))
            for some in _batches(same, together):
                yield some, base.expand(len(some), *base.shape)
            bar.update(len(same))
        for cells in passes:
            by_layer: dict[int, list[int]] = {}
            for cell in cells:
                by_layer.setdefault(layers[cell], []).append(cell)
            starts = {k: replace(start(some), first=first[some].flatten()) for k, some in by_layer.items()}
            residual = recorded.grown(starts, read).unflatten(0, (len(cells), batch))
            for some, part in zip(_batches(cells, together), residual.split(together), strict=True):
                yield some, hooks.unembed(recorded.model, part)
            bar.update(len(cells))


def _first_changes(
    recorded: hooks.Trace, layers: Sequence[int], start: Callable[[list[int]], hooks.Start], max_tokens: int
) -> Int[Tensor, "cell batch"]:
    """The first position that each cell changes in each row of the batch."""
    batch, positions = recorded.inputs[0].shape[:2]
    first = torch.zeros(len(layers), batch, dtype=torch.long, device=recorded.inputs[0].device)
    if not recorded.packed:
        return first
    by_layer: dict[int, list[int]] = {}
    for cell, layer in enumerate(layers):
        by_layer.setdefault(layer, []).append(cell)
    for layer, cells in by_layer.items():
        for some in _batches(cells, max(1, max_tokens // (batch * positions))):
            first[some] = recorded.first_changes(layer, start(some)).unflatten(0, (-1, batch))
    return first


def _batches(cells: list[int], n: int) -> list[list[int]]:
    return [cells[i : i + n] for i in range(0, len(cells), n)]


def _passes(layers: Sequence[int], tokens: Int[Tensor, " cell"], whole: int, max_tokens: int) -> list[list[int]]:
    """Cells that change something, layer by layer, in passes of at most `max_tokens` tokens (but a cell at least).

    `whole`: tokens of a cell of which nothing is left out. Attention lays these out, at about a quarter of the
    memory that a computed token takes.
    """
    sizes = tokens.clamp(min=whole // 4).tolist()
    passes: list[list[int]] = []
    room = 0
    for cell in sorted((tokens > 0).nonzero().flatten().tolist(), key=lambda cell: layers[cell]):
        if sizes[cell] > room:
            passes.append([])
            room = max_tokens
        passes[-1].append(cell)
        room -= sizes[cell]
    return passes


def generic_activation_patch(
    model: Any,
    corrupted_tokens: Int[Tensor, "batch pos"],
    clean_cache: Any,
    patching_metric: Metric | Mapping[str, Metric],
    patch_setter: Callable[[Tensor, Sequence[int], Any], Tensor],
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: pd.DataFrame | None = None,
    return_index_df: bool = False,
    *,
    reduce: str = "scalar",
    baseline: bool = False,
    attention_mask: Bool[Tensor, "batch pos"] | None = None,
    max_tokens: int = MAX_TOKENS,
    progress: bool = True,
) -> Tensor | tuple[Tensor, pd.DataFrame] | PatchingResult:
    """`transformer_lens.patching.generic_activation_patch`, faster; see there for the shared arguments.

    Args:
        model: a `HookedModel` or a `TransformerBridge`.
        attention_mask: True at tokens, False at padding, on either side.
        max_tokens: tokens in one forward pass at the most.
        progress: show a bar.

    Returns:
        The metric for each cell: a tensor over the axes, flat when `index_df` is given; or a `PatchingResult`.

    Raises:
        ValueError: a metric has the wrong shape, `reduce` is unknown, or clean and corrupted run differ in length.
    """
    model = _hooked(model)
    metrics = dict(patching_metric) if isinstance(patching_metric, Mapping) else {"metric": patching_metric}
    has_metric_axis = isinstance(patching_metric, Mapping)
    if reduce not in ("scalar", "mean", "none"):
        raise ValueError(f"reduce must be 'scalar', 'mean' or 'none', got {reduce!r}")
    if not metrics:
        raise ValueError("patching_metric is an empty mapping; give at least one metric")
    want_result = has_metric_axis or reduce == "none" or baseline
    if want_result and return_index_df:
        raise ValueError("return_index_df goes with a tensor; a PatchingResult carries its index_df")
    if (index_df is None) == (index_axis_names is None):
        raise ValueError("give either index_axis_names or index_df")

    corrupted_tokens = corrupted_tokens.to(model.bridge.cfg.device)
    shape: list[int] = []
    if index_df is None:
        assert index_axis_names is not None
        shape = [_axis(model, name, activation_name, corrupted_tokens.shape[1]) for name in index_axis_names]
        index_df = tl.make_df_from_ranges(shape, list(index_axis_names))
    cells = [row.to_list() for _, row in index_df.iterrows()]
    batch = corrupted_tokens.shape[0]

    def evaluate(logits: Tensor) -> Tensor:
        """All metrics of one set of logits, [metric] or [metric, batch]."""
        values = []
        for name, metric in metrics.items():
            value = torch.as_tensor(metric(logits))
            expected = () if reduce == "scalar" else (batch,)
            if value.shape != expected:
                raise ValueError(
                    f"metric {name!r} returned shape {tuple(value.shape)}; with reduce={reduce!r} it must return "
                    f"{'a scalar' if reduce == 'scalar' else f'one value for each of the {batch} prompts'}"
                )
            values.append(value.detach())
        return torch.stack(values)

    names = [tl_utilities.get_act_name(activation_name, layer=layer) for layer in sorted({c[0] for c in cells})]
    sites = [] if activation_name == "resid_pre" else names
    recorded, base_logits = hooks.trace_and_logits(model, corrupted_tokens, attention_mask, sites)
    with torch.no_grad():
        base = evaluate(base_logits)

    def act_name(layer: int) -> str:
        return tl_utilities.get_act_name(activation_name, layer=layer)

    if patch_setter.__module__ == tl.__name__:  # one of the user's own may take a cache of any shape
        axis = 2 if activation_name == "pattern" else 1
        found = clean_cache[act_name(cells[0][0])].shape[axis]
        if found != corrupted_tokens.shape[1]:
            raise ValueError(
                f"the clean cache is of {found} positions and the corrupted tokens have {corrupted_tokens.shape[1]}; "
                "patching needs prompts of the same length, token by token"
            )
    values = torch.zeros(len(metrics), len(cells), *base.shape[1:], dtype=base.dtype, device=base.device)
    if not model.fast:
        print(
            f"{model.name} cannot be continued from an inner layer; sweeping with one whole forward pass a cell",
            file=sys.stderr,
        )
        for c, index in enumerate(tqdm(cells, disable=not progress, file=sys.stderr, leave=False)):
            name = act_name(index[0])

            def whole(activation: Tensor, index: Any = index, name: str = name) -> Tensor:
                return patch_setter(activation.clone(), index, clean_cache[name])

            with torch.no_grad(), hooks.edits(model, [(name, whole)]):
                values[:, c] = evaluate(model.logits(corrupted_tokens, attention_mask))
    else:
        read = _positions_read(evaluate, base_logits.contiguous())
        seen = torch.full_like(base_logits, float("nan"))

        def start(some: list[int]) -> hooks.Start:
            layer = cells[some[0]][0]
            clean = clean_cache[act_name(layer)]

            def edit(activation: Tensor) -> Tensor:
                parts = activation.clone().chunk(len(some))
                return torch.cat([patch_setter(p, cells[c], clean) for p, c in zip(parts, some, strict=True)])

            rows = torch.arange(batch).repeat(len(some))
            if activation_name == "resid_pre":
                return hooks.Start(rows, enter=edit)
            return hooks.Start(rows, edits={act_name(layer): edit})

        layers = [index[0] for index in cells]
        label = f"patching {activation_name}" if progress else None
        every = read.repeat(batch, 1)
        for some, logits in sweep(recorded, layers, start, every, max_tokens=max_tokens, progress=label):
            for c, cell_logits in zip(some, logits, strict=True):
                seen[:, read] = cell_logits
                values[:, c] = evaluate(seen)

    if reduce == "mean":
        values, base = values.mean(dim=-1), base.mean(dim=-1)
    if shape:
        values = values.reshape(len(metrics), *shape, *values.shape[2:])
    if not want_result:
        return (values[0], index_df) if return_index_df else values[0]
    pick = (lambda t: t) if has_metric_axis else (lambda t: t[0])
    return PatchingResult(
        values=pick(values),
        axis_names=list(index_axis_names or []),
        index_df=index_df,
        metric_names=list(metrics),
        reduced=reduce != "none",
        baseline=pick(base) if baseline else None,
        has_metric_axis=has_metric_axis,
    )


get_act_patch_resid_pre = partial(
    generic_activation_patch,
    patch_setter=tl.layer_pos_patch_setter,
    activation_name="resid_pre",
    index_axis_names=("layer", "pos"),
)
get_act_patch_resid_mid = partial(get_act_patch_resid_pre, activation_name="resid_mid")
get_act_patch_attn_out = partial(get_act_patch_resid_pre, activation_name="attn_out")
get_act_patch_mlp_out = partial(get_act_patch_resid_pre, activation_name="mlp_out")
get_act_patch_attn_head_out_by_pos = partial(
    generic_activation_patch,
    patch_setter=tl.layer_pos_head_vector_patch_setter,
    activation_name="z",
    index_axis_names=("layer", "pos", "head"),
)
get_act_patch_attn_head_q_by_pos = partial(get_act_patch_attn_head_out_by_pos, activation_name="q")
get_act_patch_attn_head_k_by_pos = partial(get_act_patch_attn_head_out_by_pos, activation_name="k")
get_act_patch_attn_head_v_by_pos = partial(get_act_patch_attn_head_out_by_pos, activation_name="v")
get_act_patch_attn_head_pattern_by_pos = partial(
    generic_activation_patch,
    patch_setter=tl.layer_head_pos_pattern_patch_setter,
    activation_name="pattern",
    index_axis_names=("layer", "head_index", "dest_pos"),
)
get_act_patch_attn_head_pattern_dest_src_pos = partial(
    generic_activation_patch,
    patch_setter=tl.layer_head_dest_src_pos_pattern_patch_setter,
    activation_name="pattern",
    index_axis_names=("layer", "head_index", "dest_pos", "src_pos"),
)
get_act_patch_attn_head_out_all_pos = partial(
    generic_activation_patch,
    patch_setter=tl.layer_head_vector_patch_setter,
    activation_name="z",
    index_axis_names=("layer", "head"),
)
get_act_patch_attn_head_q_all_pos = partial(get_act_patch_attn_head_out_all_pos, activation_name="q")
get_act_patch_attn_head_k_all_pos = partial(get_act_patch_attn_head_out_all_pos, activation_name="k")
get_act_patch_attn_head_v_all_pos = partial(get_act_patch_attn_head_out_all_pos, activation_name="v")
get_act_patch_attn_head_pattern_all_pos = partial(
    generic_activation_patch,
    patch_setter=tl.layer_head_pattern_patch_setter,
    activation_name="pattern",
    index_axis_names=("layer", "head_index"),
)


@dataclass(frozen=True, eq=False)
class _Adopted:
    """A `TransformerBridge` of the user's, with what the hooks need of a `HookedModel`."""

    bridge: Any
    name: str = "the model"
    fast: bool = False
    packed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(self.bridge.original_model.parameters()).dtype

    def logits(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else attention_mask.long()
        return self.bridge(tokens, attention_mask=mask, return_type="logits", use_cache=False)


def _hooked(model: Any) -> Any:
    if hasattr(model, "weights") or not hasattr(model, "original_model"):
        return model
    adopted = _Adopted(model)
    probe = torch.arange(16, device=model.cfg.device).reshape(2, 8)
    fast = hooks.continues(adopted, probe)
    return replace(adopted, fast=fast, packed=fast and hooks.packs(adopted, probe))


def _axis(model: Any, name: str, activation: str, positions: int) -> int:
    """Length of an axis of a sweep, by TransformerLens' name for it."""
    cfg = model.bridge.cfg
    if name == "layer":
        return cfg.n_layers
    if name in ("pos", "src_pos", "dest_pos"):
        return positions
    if name in ("head", "head_index"):
        return (activation in ("k", "v") and getattr(cfg, "n_key_value_heads", None)) or cfg.n_heads
    raise ValueError(f"unknown axis {name!r}; the axes are layer, pos, head, head_index, src_pos, dest_pos")


def _positions_read(
    evaluate: Callable[[Tensor], Tensor], logits: Float[Tensor, "batch pos d_vocab"]
) -> Int[Tensor, " read"]:
    """The positions that the metrics read: the last one if every operation on the logits takes that alone, else all."""
    with torch.no_grad(), _Reads(logits) as reads:
        evaluate(logits)
    return torch.tensor([logits.shape[1] - 1]) if reads.last_only else torch.arange(logits.shape[1])


class _Reads(TorchDispatchMode):
    """Watches what is computed from some logits. Views of them are free; anything else reads the whole view.

    Trying it with NaN at the other positions would not do: the arg-max of NaN is a token like any other.
    """

    def __init__(self, logits: Float[Tensor, "batch pos d_vocab"]) -> None:
        super().__init__()
        self.storage = logits.untyped_storage().data_ptr()
        self.offset = logits.storage_offset()
        self.last = torch.zeros(logits.shape, dtype=torch.bool)
        self.last[:, -1] = True
        self.found: list[bool] = []

    @property
    def last_only(self) -> bool:
        # Nothing seen means that it was read past torch (as a numpy array), so nothing is known.
        return bool(self.found) and all(self.found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, Tensor)]
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() == self.storage and self.storage not in made:
                place = self.last.as_strided(t.shape, t.stride(), t.storage_offset() - self.offset)
                self.found.append(bool(place.all()))
        return result
