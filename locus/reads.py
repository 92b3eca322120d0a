"""Which positions' logits a metric reads, and the logits there alone: the vocabulary is large."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PAST_TORCH = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage"}


def positions_read(
    evaluate: Callable[[Tensor], Tensor], logits: Float[Tensor, "batch pos d_vocab"]
) -> Int[Tensor, " read"]:
    """The positions that a function of logits reads in any row, or can read where others are; else all of them."""
    logits = logits.clone()  # which it may write to
    with torch.no_grad(), _Reads(logits) as reads, _PastTorch(reads):
        evaluate(logits)
    # Nothing seen means that nothing is known.
    read = reads.found or set(range(logits.shape[1]))
    return torch.tensor(sorted(read), device=logits.device)


def unembed(model: Any, residual: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
    """Final norm, unembedding and the model's soft cap of logits, if it has one.

    Raises:
        ValueError: that is not how the model makes its logits.
    """
    if not model.fast:
        raise ValueError(
            f"{model.name} makes its logits in another way than by final norm and unembedding, so they cannot be "
            "computed from its residual stream; take a method of whole forward passes, such as Knockout"
        )
    return unembed_normed(model, model.bridge.ln_final(residual))


def unembed_normed(model: Any, normed: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
    """`unembed` without the final norm."""
    logits = model.bridge.unembed(normed)
    cap = getattr(model.bridge.original_model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def gather(
    residual: Float[Tensor, "row pos d_model"], read: Int[Tensor, "row read"]
) -> Float[Tensor, "row read d_model"]:
    """The residual stream at the positions `read` of each row."""
    index = read.to(residual.device)[:, :, None].expand(-1, -1, residual.shape[-1])
    return residual.gather(1, index)


class _Reads(TorchDispatchMode):
    """Watches what is computed from some logits. Views are free, indexing reads what it takes, all else the whole view.

    Once a number computed from them has left torch, it may choose what is read next, on each run another position.

    Trying it with NaN at the other positions would not do: the arg-max of NaN is a token like any other.
    """

    def __init__(self, logits: Float[Tensor, "batch pos d_vocab"]) -> None:
        super().__init__()
        positions = torch.arange(logits.shape[1], dtype=torch.int16, device=logits.device)
        self.position = positions[:, None].expand(logits.shape).contiguous()
        self.storage = _storage(logits)
        self.derived = {self.storage: logits}  # kept, so that no storage is taken for another one
        self.left = False
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and _storage(t) in self.derived]
        made = {_storage(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        if given:
            self.derived |= made
        if func._schema.is_mutable or self.storage not in made:
            by = args[1] if func is torch.ops.aten.index.Tensor else []
            # What is chosen by the data may be another position on another run.
            fixed = by and not any(t is chosen for t in given for chosen in by)
            for t in given:
                self.read(t, (lambda place: func(place, *args[1:])) if fixed and t is args[0] else None)
        self.left |= func is torch.ops.aten._local_scalar_dense.default and bool(given)
        return result

    def read(self, t: Tensor, part: Callable[[Tensor], Tensor] | None = None) -> None:
        if _storage(t) != self.storage:
            return
        place = self.position.as_strided(t.shape, t.stride(), t.storage_offset())
        place = self.position if self.left else place if part is None else part(place)
        self.found |= set(place.unique().tolist())


class _PastTorch(TorchFunctionMode):
    """Sees what leaves torch as a whole, which no dispatch shows."""

    def __init__(self, reads: _Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in PAST_TORCH and _storage(args[0]) in self.reads.derived:
            self.reads.read(args[0])
            self.reads.left = True
        return func(*args, **(kwargs or {}))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
