"""Which positions' logits a metric reads, and the logits there alone: the vocabulary is large."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def positions_read(
    evaluate: Callable[[Tensor], Tensor], logits: Float[Tensor, "batch pos d_vocab"]
) -> Int[Tensor, " read"]:
    """The positions that a function of logits reads in any row, as far as can be told; else all of them."""
    logits = logits.contiguous()
    with torch.no_grad(), _Reads(logits) as reads:
        evaluate(logits)
    # Nothing seen means that it was read past torch (as a numpy array), so nothing is known.
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

    Trying it with NaN at the other positions would not do: the arg-max of NaN is a token like any other.
    """

    def __init__(self, logits: Float[Tensor, "batch pos d_vocab"]) -> None:
        super().__init__()
        self.storage = logits.untyped_storage().data_ptr()
        self.offset = logits.storage_offset()
        positions = torch.arange(logits.shape[1], dtype=torch.int16, device=logits.device)
        self.position = positions[:, None].expand(logits.shape).contiguous()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, Tensor)]
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() == self.storage and self.storage not in made:
                place = self.position.as_strided(t.shape, t.stride(), t.storage_offset() - self.offset)
                if func is torch.ops.aten.index.Tensor and t is args[0]:
                    place = func(place, *args[1:])
                self.found |= set(place.unique().tolist())
        return result
