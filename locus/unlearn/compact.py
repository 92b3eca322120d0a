"""Compact values: only the entries that may change exist as leaves of autograd, and in the optimizer's state.

For every tensor that the forward pass reads, the masked entries are the whole tensor, whole slices along an
axis, or scattered. In a linear layer y = x Wᵀ + b, selected output units are computed by themselves,
y[..., units] = x Vᵀ + b[units], and selected input units are added as a difference,
y + x[..., units] (V − V₀)ᵀ; scattered entries are put into a copy of the weight that lives for one matrix product,
and their gradient is taken from a few rows of the full one at a time. Whole experts stand in the place of the
original ones when an expert is looked up. So no full gradient is ever made. Everything else (embeddings, norms,
biases, parts of experts) is read from a full tensor that is rebuilt from the compact values at each forward pass, and
its full gradient is made and dropped.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from locus import hooks
from locus.unlearn.update import Entries, pick

Structure = Literal["whole", "slices", "entries"]
TILE = 64  # rows of a full weight gradient that exist at a time, where scattered entries are picked from it


@dataclass(eq=False)
class Leaf:
    """The masked entries of one tensor of the forward pass.

    Attributes:
        live: the tensor (see `LiveParameter`).
        owners: every module that reads it, with the attribute's name; several if it is tied.
        structure: "whole", "slices" along `dim`, or "entries" (`index` is then into the flattened tensor).
        index: the selected slices or entries.
        values: their current values, in float32 even in a bfloat16 model (float64 in a float64 one).
    """

    live: Any
    owners: tuple[tuple[nn.Module, str], ...]
    structure: Structure
    dim: int
    index: Int[Tensor, " selected"]
    values: Float[Tensor, "..."]

    def original(self) -> Float[Tensor, "..."]:
        """The model's own values of the masked entries, in the shape of `values`."""
        return _take(self.live.tensor.detach(), self.structure, self.dim, self.index)

    def of(self, stored: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """The same entries of another tensor of the stored parameter's shape, a mask for instance."""
        return _take(self.live.take(stored), self.structure, self.dim, self.index)

    def dense(self, values: Float[Tensor, "..."] | None = None) -> Float[Tensor, "..."]:
        """The full tensor with the current (or other) values in it, in the model's dtype, inside the autograd graph."""
        tensor = self.live.tensor.detach()
        values = self.values.to(tensor.dtype) if values is None else values
        if self.structure == "whole":
            return values
        if self.structure == "slices":
            return tensor.index_copy(self.dim, self.index, values)
        return tensor.reshape(-1).index_copy(0, self.index, values).reshape(tensor.shape)

    @property
    def module(self) -> nn.Module:
        return self.owners[0][0]

    @property
    def in_linear(self) -> bool:
        """Whether it is the weight of one linear layer, whose output can be edited instead."""
        linear = isinstance(self.module, nn.Linear | Conv1D) and self.owners[0][1] == "weight"
        return linear and len(self.owners) == 1 and self.structure != "whole"

    @property
    def in_experts(self) -> bool:
        """Whether it is whole experts of a fused [expert, …] tensor, which transformers' own forward pass indexes."""
        fused = hasattr(self.module, "has_gate") and hasattr(type(self.module).forward, "__wrapped__")
        return fused and len(self.owners) == 1 and self.structure == "slices" and self.dim == 0

    def edit(self, x: Float[Tensor, "... d_in"], y: Float[Tensor, "... d_out"]) -> Float[Tensor, "... d_out"]:
        """The output of the linear layer with the current values in its weight."""
        module = self.module
        conv = isinstance(module, Conv1D)  # stores [in, out]
        values = self.values.to(y.dtype)
        if (self.dim == 0) != conv:
            new = x @ (values if conv else values.T)
            if isinstance(bias := module.bias, Tensor):
                new = new + bias[self.index]
            return y.index_copy_(-1, self.index, new)  # in place: the layer's own backward needs no output
        change = values - self.original()
        return y.add_(x.index_select(-1, self.index) @ (change if conv else change.T))


def leaves(model: Any, mask: Mapping[str, Bool[Tensor, "..."]]) -> list[Leaf]:
    """Compact values of everything that the mask selects, at the model's current values.

    Raises:
        ValueError: the mask does not fit the model, selects nothing, or selects what no forward pass reads.
    """
    _check_fit(model, mask)
    owners = _owners(model)
    found = []
    for live in model.live:
        if live.name not in mask:
            continue
        selected = live.take(mask[live.name].to(live.tensor.device))
        if selected.any():
            structure, dim, index = _structure(selected)
            values = _take(live.tensor.detach(), structure, dim, index)
            wide = values.dtype if values.dtype == torch.float64 else torch.float32
            values = values.to(wide, copy=True).requires_grad_()
            found.append(Leaf(live, tuple(owners[id(live.tensor)].values()), structure, dim, index, values))
    n, n_masked = sum(leaf.values.numel() for leaf in found), sum(int(m.sum()) for m in mask.values())
    if not n_masked:
        raise ValueError("the mask selects nothing: no entry could change; check how it was made")
    if n != n_masked:
        raise ValueError(
            f"the mask selects {n_masked:,} entries, of which {model.name}'s forward pass reads only {n:,}; "
            "make it from model.components(…) or from names in model.weights"
        )
    return found


def _check_fit(model: Any, mask: Mapping[str, Bool[Tensor, "..."]]) -> None:
    for name, selected in mask.items():
        if name not in model.weights:
            raise ValueError(
                f"the mask names {name!r}, which {model.name} has not; its parameters are named like "
                f"{next(iter(model.weights))!r}"
            )
        if selected.shape != model.weights[name].shape:
            raise ValueError(
                f"the mask of {name} has shape {tuple(selected.shape)}, the model's has "
                f"{tuple(model.weights[name].shape)}; it was made for another model"
            )


def _structure(selected: Bool[Tensor, "..."]) -> tuple[Structure, int, Int[Tensor, " selected"]]:
    """How the selected entries lie: the whole tensor, whole slices along an axis, or scattered."""
    n = int(selected.sum())
    if n == selected.numel():
        return "whole", 0, torch.empty(0, dtype=torch.long, device=selected.device)
    for dim in range(selected.ndim):
        any_in_slice = selected.movedim(dim, 0).flatten(1).any(1) if selected.ndim > 1 else selected
        if int(any_in_slice.sum()) * (selected.numel() // len(any_in_slice)) == n:
            return "slices", dim, any_in_slice.nonzero().flatten()
    return "entries", 0, selected.reshape(-1).nonzero().flatten()


def _take(tensor: Tensor, structure: Structure, dim: int, index: Int[Tensor, " selected"]) -> Tensor:
    if structure == "whole":
        return tensor
    if structure == "slices":
        return tensor.index_select(dim, index)
    return tensor.reshape(-1).index_select(0, index)


def _owners(model: Any) -> dict[int, dict[tuple[int, str], tuple[nn.Module, str]]]:
    """Every module that holds each live tensor, by the tensor's id; each module and attribute once."""
    owners: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    held = [(live.module, live.attribute, live.tensor) for live in model.live]
    held += [(m, attribute, p) for m in model.bridge.modules() for attribute, p in m._parameters.items()]
    for module, attribute, p in held:
        owners.setdefault(id(p), {})[id(module), attribute] = (module, attribute)
    return owners


class _Scattered(torch.autograd.Function):
    """x Wᵀ with scattered entries of W replaced. Neither W nor its gradient outlives the call, the latter in tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, leaf: Leaf) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.leaf = leaf
        weight = leaf.dense(values)
        return x @ (weight if isinstance(leaf.module, Conv1D) else weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x, values), leaf, gradient = ctx.saved_tensors, ctx.leaf, gradients[0]
        conv = isinstance(leaf.module, Conv1D)
        weight = leaf.dense(values)
        below = gradient @ (weight.T if conv else weight) if ctx.needs_input_grad[0] else None
        rows, columns = (t.flatten(0, -2) for t in ((x, gradient) if conv else (gradient, x)))
        starts = torch.arange(0, weight.shape[0], TILE, device=x.device)
        found = []
        for start, entries in zip(starts.tolist(), _tiles(leaf.index, starts * weight.shape[1]), strict=True):
            tile = rows[:, start : start + TILE].T @ columns
            found.append(tile.reshape(-1).index_select(0, entries - start * weight.shape[1]))
        return below, torch.cat(found), None


def _tiles(index: Int[Tensor, " entry"], starts: Int[Tensor, " tile"]) -> tuple[Tensor, ...]:
    """Ascending flat indices, divided where each tile starts."""
    return index.tensor_split(torch.searchsorted(index, starts[1:]).cpu())


class _Experts:
    """A fused tensor of experts to index by expert: the selected ones are compact values, inside the autograd graph."""

    def __init__(self, leaf: Leaf) -> None:
        self._fused = leaf.live.tensor.detach()
        self._edited = dict(zip(leaf.index.tolist(), leaf.values.to(self._fused.dtype).unbind(), strict=True))

    def __getitem__(self, expert: Any) -> Tensor:
        found = self._edited.get(int(expert))
        return self._fused[expert] if found is None else found


@contextmanager
def edited(found: Sequence[Leaf]) -> Iterator[None]:
    """Within the block, forward passes read the current compact values, and autograd reaches them.

    The model's own tensors are not written to.
    """
    with ExitStack() as stack:
        for leaf in found:
            module = leaf.module
            if leaf.in_linear and leaf.structure == "slices":
                stack.enter_context(hooks.linear_edit(module, leaf.edit))
            elif leaf.in_linear:
                stack.enter_context(_instead(module, "forward", partial(_scattered_linear, leaf)))
            elif leaf.in_experts:
                # The plain loop over experts, which looks them up one by one.
                plain = partial(type(module).forward.__wrapped__, module)  # type: ignore[attr-defined]
                stack.enter_context(_instead(module, "forward", plain))
                stack.enter_context(_instead(module, leaf.owners[0][1], _Experts(leaf)))
            else:
                dense = leaf.dense()
                for owner, attribute in leaf.owners:
                    stack.enter_context(_instead(owner, attribute, dense))
        yield


def _scattered_linear(leaf: Leaf, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
    y = _Scattered.apply(x, leaf.values.to(leaf.live.tensor.dtype), leaf)
    return y if leaf.module.bias is None else y + leaf.module.bias


@contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """Within the block, each decoder block keeps only its input for the backward pass, which runs it again.

    The backward pass must run inside too, with every edit of the forward pass still in place. The values are the same,
    bit for bit where the forward pass is deterministic; Chen et al. 2016 (arXiv 1604.06174).
    """
    with ExitStack() as stack:
        for block in model.bridge.blocks:
            stack.enter_context(_instead(block, "forward", partial(checkpoint, block.forward, use_reentrant=False)))
        yield


@contextmanager
def _instead(module: nn.Module, attribute: str, value: Any) -> Iterator[None]:
    """Within the block, `module.attribute` is something else; what is registered in the module stays as it is."""
    own = vars(module)  # found before parameters and methods are
    nothing = object()
    before = own.get(attribute, nothing)
    own[attribute] = value
    try:
        yield
    finally:
        if before is nothing:
            del own[attribute]
        else:
            own[attribute] = before


def lowest_layer(model: Any, found: Sequence[Leaf]) -> int | None:
    """The lowest block that the values act in: n_layers above all blocks, None below them (embeddings)."""
    above = {id(m) for part in (model.bridge.ln_final, model.bridge.unembed) for m in part.modules()}
    layers = []
    for leaf in found:
        number = re.search(r"\.(\d+)\.", leaf.live.name)
        if number is not None:
            layers.append(int(number[1]))
        elif all(id(module) in above for module, _ in leaf.owners):
            layers.append(model.cfg.n_layers)
        else:
            return None
    return min(layers)


@torch.no_grad()
def entries(model: Any, found: Sequence[Leaf], mask: Mapping[str, Bool[Tensor, "..."]]) -> dict[str, Entries]:
    """The current values of the masked entries by Hugging Face name, rounded to the model's dtype."""
    made = {}
    for name in dict.fromkeys(leaf.live.name for leaf in found):
        tensor = model.stored(name)
        for leaf in found:
            if leaf.live.name == name:
                leaf.live.put(tensor, leaf.dense())
        dtype = torch.int32 if tensor.numel() < 2**31 else torch.int64
        selected = mask[name].reshape(-1)
        if selected.all():
            index = torch.arange(len(selected), dtype=dtype)
        else:
            index = selected.nonzero().flatten().to(dtype)
        made[name] = Entries(index, pick(tensor, index))
    return made
