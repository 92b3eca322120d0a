"""Exact activation-patching sweeps: the functions of `transformer_lens.patching`, many cells to a forward pass.

Same names, arguments, options and result shapes as TransformerLens 4.3, so that a script moves over by changing the
import; also takes a `HookedModel`, padded batches, and `progress=False`. Clean activations are put into the run on the
corrupted tokens (denoising: are they enough for the answer?). For noising (are they needed?) give the clean tokens and
the corrupted cache.

Beyond TransformerLens, as keyword arguments of all of them: instead of a cache, the tokens of the other prompts, or
"zero", "mean" or "resample"; `window`, layers patched at a time; `positions`, sets of positions in the place of single
ones; `resume`, a file that a sweep which was interrupted goes on from. And sweeps of MLP neurons.

One difference: `resid_mid` always patches the residual stream itself. TransformerLens does so under `torch.no_grad()`
only; with autograd on it patches a copy that just the MLP reads.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformer_lens.patching as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.patching import (
    PatchingResult,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
    make_df_from_ranges,
)

from locus import hooks
from locus.cells import Cells, Setter, at_once, check_range, masks
from locus.checked import continues, packs
from locus.progress import tqdm
from locus.require import several
from locus.sweeps import MAX_TOKENS

Metric = Callable[[Tensor], Any]


def generic_activation_patch(
    model: Any,
    corrupted_tokens: Int[Tensor, "batch pos"],
    clean_cache: Any,
    patching_metric: Metric | Mapping[str, Metric],
    patch_setter: Setter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: pd.DataFrame | None = None,
    return_index_df: bool = False,
    *,
    reduce: str = "scalar",
    baseline: bool = False,
    attention_mask: Bool[Tensor, "batch pos"] | None = None,
    window: int = 1,
    positions: Sequence[Sequence[int]] | Bool[Tensor, "set batch pos"] | None = None,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Tensor | tuple[Tensor, pd.DataFrame] | PatchingResult:
    """`transformer_lens.patching.generic_activation_patch`, faster; see there for the shared arguments.

    Args:
        model: a `HookedModel` or a `TransformerBridge`.
        clean_cache: the cache; or the clean tokens [batch, pos], aligned with the corrupted ones; or "zero", "mean"
            (over the tokens of all corrupted prompts) or "resample" (the activation on another corrupted prompt).
        attention_mask: True at tokens, False at padding, on either side.
        window: layers patched at a time, around that of the cell: max(0, l - w//2) to l + ceil(w/2) - 1 (Meng et
            al. 2022, arXiv 2202.05262).
        positions: sets of positions, each patched at once; the axis `pos` then counts sets. As lists, or as masks of
            each prompt's positions.
        seed: of the permutation of prompts, for "resample".
        max_tokens: tokens in one forward pass at the most.
        resume: a file that keeps what is done; the same call goes on from it, to the same numbers bit for bit, once
            some of them have come out again. It may keep several sweeps: one with another model, prompts, cells,
            setter, metric or setting is added to it, as is one whose metric holds what has changed since (a list that
            it logs to) or what cannot be copied (an open file).
        progress: show a bar, and time and memory before a sweep that takes long.

    Returns:
        The metric for each cell: a tensor over the axes, flat when `index_df` is given; or a `PatchingResult`.

    Raises:
        ValueError: a metric has the wrong shape, an argument is not of these, cells or positions are out of range,
            clean and corrupted run differ in length, or `resume` is another kind of file.
    """
    model = _hooked(model)
    if model.bridge.original_model.training:
        raise ValueError(f"{model.name} is in training mode, in which a pass is random; call model.eval() first")
    _check_inputs(model.bridge.cfg, corrupted_tokens, clean_cache, attention_mask)
    _check_options(window, max_tokens, seed, resume)
    max_tokens, seed = int(max_tokens), int(seed)
    corrupted_tokens = corrupted_tokens.to(model.bridge.cfg.device)
    has_metric_axis = isinstance(patching_metric, Mapping)
    metrics = dict(patching_metric) if isinstance(patching_metric, Mapping) else {"metric": patching_metric}
    want_result = has_metric_axis or reduce == "none" or baseline
    _check(metrics, reduce, want_result and return_index_df, (index_df is None) == (index_axis_names is None))
    if not callable(patch_setter):
        raise ValueError(f"patch_setter must be a function of activation, index and clean cache, got {patch_setter!r}")
    shape: list[int] = []
    sets = None if positions is None else masks(positions, corrupted_tokens)
    axes = _axes(model, activation_name, corrupted_tokens.shape[1] if sets is None else len(sets))
    if index_df is None:
        names = index_axis_names
        if not several(names) or not names or len(set(names)) < len(names):
            raise ValueError(f"index_axis_names must be different axes, like ('layer', 'pos'), got {names!r}")
        if unknown := set(names) - set(axes):
            raise ValueError(f"unknown axes {', '.join(sorted(map(str, unknown)))}; the axes are {', '.join(axes)}")
        shape = [axes[name] for name in names]
        index_df = make_df_from_ranges(shape, list(names))
    _check_cells(index_df, axes)
    cells = index_df.to_numpy().tolist()
    job = Cells(model, corrupted_tokens, attention_mask, activation_name, cells, window, max_tokens)
    setter = patch_setter if sets is None else at_once(patch_setter, sets, _pos_axis(index_df))
    evaluate = partial(_evaluate, metrics, reduce, len(corrupted_tokens))
    known = (
        getattr(patch_setter, "__module__", None) == tl.__name__
    )  # one of the user's own may take a cache of any shape
    values, base = job.run(clean_cache, setter, evaluate, seed, known, resume, progress)
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
    patch_setter=layer_pos_patch_setter,
    activation_name="resid_pre",
    index_axis_names=("layer", "pos"),
)
get_act_patch_resid_mid = partial(get_act_patch_resid_pre, activation_name="resid_mid")
get_act_patch_attn_out = partial(get_act_patch_resid_pre, activation_name="attn_out")
get_act_patch_mlp_out = partial(get_act_patch_resid_pre, activation_name="mlp_out")
get_act_patch_attn_head_out_by_pos = partial(
    generic_activation_patch,
    patch_setter=layer_pos_head_vector_patch_setter,
    activation_name="z",
    index_axis_names=("layer", "pos", "head"),
)
get_act_patch_attn_head_q_by_pos = partial(get_act_patch_attn_head_out_by_pos, activation_name="q")
get_act_patch_attn_head_k_by_pos = partial(get_act_patch_attn_head_out_by_pos, activation_name="k")
get_act_patch_attn_head_v_by_pos = partial(get_act_patch_attn_head_out_by_pos, activation_name="v")
get_act_patch_attn_head_pattern_by_pos = partial(
    generic_activation_patch,
    patch_setter=layer_head_pos_pattern_patch_setter,
    activation_name="pattern",
    index_axis_names=("layer", "head_index", "dest_pos"),
)
get_act_patch_attn_head_pattern_dest_src_pos = partial(
    generic_activation_patch,
    patch_setter=layer_head_dest_src_pos_pattern_patch_setter,
    activation_name="pattern",
    index_axis_names=("layer", "head_index", "dest_pos", "src_pos"),
)
get_act_patch_attn_head_out_all_pos = partial(
    generic_activation_patch,
    patch_setter=layer_head_vector_patch_setter,
    activation_name="z",
    index_axis_names=("layer", "head"),
)
get_act_patch_attn_head_q_all_pos = partial(get_act_patch_attn_head_out_all_pos, activation_name="q")
get_act_patch_attn_head_k_all_pos = partial(get_act_patch_attn_head_out_all_pos, activation_name="k")
get_act_patch_attn_head_v_all_pos = partial(get_act_patch_attn_head_out_all_pos, activation_name="v")
get_act_patch_attn_head_pattern_all_pos = partial(
    generic_activation_patch,
    patch_setter=layer_head_pattern_patch_setter,
    activation_name="pattern",
    index_axis_names=("layer", "head_index"),
)


get_act_patch_mlp_neuron_by_pos = partial(
    generic_activation_patch,
    patch_setter=layer_pos_head_vector_patch_setter,
    activation_name="post",
    index_axis_names=("layer", "pos", "neuron"),
)
get_act_patch_mlp_neuron_all_pos = partial(
    generic_activation_patch,
    patch_setter=layer_head_vector_patch_setter,
    activation_name="post",
    index_axis_names=("layer", "neuron"),
)


def get_act_patch_attn_head_all_pos_every(
    model: Any, corrupted_tokens: Int[Tensor, "batch pos"], clean_cache: Any, metric: Any, **kwargs: Any
) -> Float[Tensor, "patch_type layer head"] | PatchingResult:
    """Output, query, key, value and pattern of every head at all positions; grouped keys and values filled with 0."""
    sweeps = [globals()[f"get_act_patch_attn_head_{kind}_all_pos"] for kind in tl._HEAD_TYPES]
    return _every(sweeps, ("layer", "head"), tl._HEAD_TYPES, model, corrupted_tokens, clean_cache, metric, kwargs)


def get_act_patch_attn_head_by_pos_every(
    model: Any, corrupted_tokens: Int[Tensor, "batch pos"], clean_cache: Any, metric: Any, **kwargs: Any
) -> Float[Tensor, "patch_type layer pos head"] | PatchingResult:
    """Output, query, key, value and pattern (by destination) of every head at every position."""
    sweeps = [globals()[f"get_act_patch_attn_head_{kind}_by_pos"] for kind in tl._HEAD_TYPES]
    axes = ("layer", "pos", "head")
    return _every(sweeps, axes, tl._HEAD_TYPES, model, corrupted_tokens, clean_cache, metric, kwargs)


def get_act_patch_block_every(
    model: Any, corrupted_tokens: Int[Tensor, "batch pos"], clean_cache: Any, metric: Any, **kwargs: Any
) -> Float[Tensor, "patch_type layer pos"] | PatchingResult:
    """Residual stream before each block, attention output and MLP output at every position."""
    sweeps = [globals()[f"get_act_patch_{kind}"] for kind in tl._BLOCK_TYPES]
    return _every(sweeps, ("layer", "pos"), tl._BLOCK_TYPES, model, corrupted_tokens, clean_cache, metric, kwargs)


def _every(
    sweeps: Sequence[Callable],
    axes: tuple[str, ...],
    types: Sequence[str],
    model: Any,
    tokens: Tensor,
    clean_cache: Any,
    metric: Any,
    kwargs: dict[str, Any],
) -> Tensor | PatchingResult:
    wants = {"baseline": False, "reduce": "scalar", **kwargs}
    results = [run(model, tokens, clean_cache, metric, **{**kwargs, "baseline": True}) for run in sweeps]
    stacked: Any = tl._stack_patch_types(results, axis_order=axes, n_heads=model.cfg.n_heads, type_names=types)
    if not (wants["baseline"] or wants["reduce"] == "none" or isinstance(metric, Mapping)):
        return stacked.values
    return stacked if wants["baseline"] else replace(stacked, baseline=None)


def get_act_patch_direct_path(
    model: Any,
    corrupted_tokens: Int[Tensor, "batch pos"],
    clean_cache: Any,
    corrupted_cache: Any,
    patching_metric: Metric,
    src_layer: int,
    src_head: int,
    component: str = "q",
    verbose: bool = True,
    **kwargs: Any,
) -> Float[Tensor, "layer head"]:
    """One head's clean write z W_O, added for one later head's queries (or keys, or values) alone.

    All else sees the corrupted write, so a later head's queries are those that its block computes from the corrupted
    residual stream plus the difference of the writes: one block a layer gives those of all its heads, and what is
    left is a sweep over their activations. Wang et al. 2022 (arXiv 2211.00593); same results as TransformerLens,
    0 for layers up to `src_layer`. Keyword arguments: `attention_mask`, `max_tokens`, `progress`, `resume` and
    `reduce` ("scalar" or "mean"), as in `generic_activation_patch`.
    """
    hooked = _hooked(model)
    _check_direct(hooked.bridge.cfg, patching_metric, src_layer, src_head, component, kwargs)
    tl._check_direct_path_support(hooked.bridge, [src_layer], component)
    n_layers, n_heads = hooked.bridge.cfg.n_layers, hooked.bridge.cfg.n_heads
    name = f"blocks.{src_layer}.attn.hook_z"
    write = hooked.bridge.blocks[src_layer].attn.W_O[src_head]
    delta = (clean_cache[name] - corrupted_cache[name])[:, :, src_head] @ write
    recorded = hooks.trace(hooked, corrupted_tokens, kwargs.get("attention_mask"))
    rows = torch.arange(len(recorded), device=delta.device)
    patched: dict[str, Tensor] = {}
    for layer in range(src_layer + 1, n_layers):
        with torch.no_grad(), hooks.capture(hooked, [f"blocks.{layer}.attn.hook_{component}"]) as found:
            recorded.block(layer, recorded.inputs[layer] + delta, rows)
        patched.update(found)
    results = torch.zeros(n_layers, n_heads, dtype=recorded.inputs[0].dtype, device=delta.device)
    if patched:
        frame = make_df_from_ranges([n_layers - src_layer - 1, n_heads], ["layer", "head"])
        frame["layer"] += src_layer + 1
        options = {"progress": verbose, **kwargs}
        setter = layer_head_vector_patch_setter
        flat: Any = generic_activation_patch(
            hooked, corrupted_tokens, patched, patching_metric, setter, component, index_df=frame, **options
        )
        results[src_layer + 1 :] = flat.reshape(-1, n_heads)
    return results


def get_act_patch_direct_path_all_sources(
    model: Any,
    corrupted_tokens: Int[Tensor, "batch pos"],
    clean_cache: Any,
    corrupted_cache: Any,
    patching_metric: Metric,
    component: str = "q",
    verbose: bool = True,
    **kwargs: Any,
) -> Float[Tensor, "src_layer src_head layer head"]:
    """`get_act_patch_direct_path` from every head."""
    hooked = _hooked(model)
    layers, heads = range(hooked.bridge.cfg.n_layers), range(hooked.bridge.cfg.n_heads)
    tl._check_direct_path_support(hooked.bridge, layers, component)
    sources = [(layer, head) for layer in layers for head in heads]
    given = (hooked, corrupted_tokens, clean_cache, corrupted_cache, patching_metric)
    found = [
        get_act_patch_direct_path(*given, layer, head, component, False, **kwargs)
        for layer, head in tqdm(sources, desc=f"direct paths [{component}]", disable=not verbose, file=sys.stderr)
    ]
    return torch.stack(found).unflatten(0, (len(layers), len(heads)))


def _evaluate(metrics: Mapping[str, Metric], reduce: str, batch: int, logits: Tensor) -> Tensor:
    """All metrics of one set of logits, [metric] or [metric, batch]."""
    values = []
    for name, metric in metrics.items():
        value = metric(logits)
        if not isinstance(value, Tensor | np.ndarray | np.generic | bool | int | float):
            raise ValueError(f"metric {name!r} returned {type(value).__name__}; it must return a tensor or a number")
        value = torch.as_tensor(value)
        if value.is_complex():
            raise ValueError(f"metric {name!r} returned complex numbers; it must return real ones")
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())  # as TransformerLens does
        expected = () if reduce == "scalar" else (batch,)
        if value.shape != expected:
            raise ValueError(
                f"metric {name!r} returned shape {tuple(value.shape)}; with reduce={reduce!r} it must return "
                f"{'a scalar' if reduce == 'scalar' else f'one value for each of the {batch} prompts'}"
            )
        values.append(value.detach())
    return torch.stack(values)


def _check(metrics: Mapping[str, Metric], reduce: str, frame_too: bool, axes: bool) -> None:
    if reduce not in ("scalar", "mean", "none"):
        raise ValueError(f"reduce must be 'scalar', 'mean' or 'none', got {reduce!r}")
    for name, metric in metrics.items():
        if not callable(metric):
            raise ValueError(f"metric {name!r} must be a function of the logits, got {metric!r}")
    if not metrics:
        raise ValueError("patching_metric is an empty mapping; give at least one metric")
    if frame_too:
        raise ValueError("return_index_df goes with a tensor; a PatchingResult carries its index_df")
    if axes:
        raise ValueError("give either index_axis_names or index_df")


def _check_direct(cfg: Any, metric: Any, layer: int, head: int, component: str, options: Mapping[str, Any]) -> None:
    if component not in ("q", "k", "v"):
        raise ValueError(f"component must be 'q', 'k' or 'v', got {component!r}")
    check_range("src_layer", [layer], 0, cfg.n_layers)
    check_range("src_head", [head], 0, cfg.n_heads)
    taken = ("attention_mask", "max_tokens", "progress", "reduce", "resume")
    if (unknown := options.keys() - set(taken)) or options.get("reduce") == "none":
        unknown = unknown or {"reduce='none'"}
        raise ValueError(f"a direct path takes {', '.join(taken)}; it does not take {', '.join(sorted(unknown))}")
    if not callable(metric):
        raise ValueError(f"a direct path takes one metric, a function of the logits, got {metric!r}")


def _check_options(window: int, max_tokens: int, seed: int, resume: Any) -> None:
    for name, value, least in (("window", window, 1), ("max_tokens", max_tokens, 1), ("seed", seed, 0)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")
    if not (resume is None or isinstance(resume, str | Path)) or resume == "":
        raise ValueError(f"resume must be the name of a file, got {resume!r}")


def _check_inputs(cfg: Any, tokens: Any, clean: Any, attention_mask: Any) -> None:
    for name, given in (("corrupted_tokens", tokens), ("attention_mask", attention_mask)):
        if not (isinstance(given, Tensor) or given is attention_mask is None):
            raise ValueError(f"{name} must be a tensor [batch, pos], got a {type(given).__name__}")
    if not isinstance(clean, Tensor | str) and not hasattr(clean, "keys"):
        raise ValueError(
            "clean_cache must be a cache, the clean tokens as a tensor, or 'zero', 'mean' or 'resample', got a "
            f"{type(clean).__name__}"
        )
    if tokens.ndim != 2 or not tokens.numel():
        raise ValueError(f"corrupted_tokens are [batch, pos], at least one token, got {list(tokens.shape)}")
    for name, given in (("the clean tokens", clean), ("attention_mask", attention_mask)):
        if isinstance(given, Tensor) and given.shape != tokens.shape:
            raise ValueError(f"{name} must be as the corrupted tokens, {list(tokens.shape)}, got {list(given.shape)}")
    for name, given in (("corrupted_tokens", tokens), ("the clean tokens", clean)):
        if isinstance(given, Tensor):
            whole = not (given.is_floating_point() or given.dtype == torch.bool)
            if not (whole and 0 <= int(given.min()) <= int(given.max()) < cfg.d_vocab):
                raise ValueError(f"{name} must be whole numbers from 0 to {cfg.d_vocab - 1}, got {given}")
    if attention_mask is not None and not attention_mask.any(1).all():
        raise ValueError("attention_mask hides every token of a prompt; True (or 1) is a token, False (or 0) padding")


def _check_cells(index_df: Any, axes: Mapping[str, int]) -> None:
    if not isinstance(index_df, pd.DataFrame):
        raise ValueError(f"index_df must be a DataFrame with a row for each cell, got a {type(index_df).__name__}")
    if not len(index_df) or index_df.columns[0] != "layer":
        columns = ", ".join(map(str, index_df.columns))
        raise ValueError(
            f"index_df needs at least one row, and `layer` as the first column; got {len(index_df)} rows, {columns}"
        )
    for name in index_df.columns.intersection(list(axes)):
        check_range(f"{name} of index_df", index_df[name].tolist(), 0 if name == "layer" else -axes[name], axes[name])


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
    if not (hasattr(model, "bridge") or hasattr(model, "original_model")):
        raise ValueError(f"model must be a HookedModel (see locus.load) or a TransformerBridge, got {model!r:.60}")
    if hasattr(model, "weights") or not hasattr(model, "original_model"):
        return model
    adopted = _Adopted(model)
    probe = torch.arange(16, device=model.cfg.device).reshape(2, 8)
    adopted = replace(adopted, fast=continues(adopted, probe))
    return replace(adopted, packed=adopted.fast and packs(adopted, probe))


def _pos_axis(index_df: pd.DataFrame) -> int:
    names = list(index_df.columns)
    if "pos" not in names:
        raise ValueError(f"sets of positions need an axis 'pos'; this sweep has {', '.join(map(str, names))}")
    return names.index("pos")


def _axes(model: Any, activation: str, positions: int) -> dict[str, int]:
    """Lengths of the axes of a sweep, by TransformerLens' names for them; `neuron` is ours."""
    cfg = model.bridge.cfg
    heads = (activation in ("k", "v") and getattr(cfg, "n_key_value_heads", None)) or cfg.n_heads
    lengths = {"layer": cfg.n_layers, "neuron": cfg.d_mlp}
    return (
        lengths
        | dict.fromkeys(("pos", "src_pos", "dest_pos"), positions)
        | dict.fromkeys(("head", "head_index"), heads)
    )
