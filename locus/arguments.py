"""The arguments of a decoder block beside the residual stream: masks, positions, rotations."""

from typing import Any

import torch
from torch import Tensor


def finite(value: Any) -> Any:
    """Block arguments with their [batch, head, query, key] masks in additive, finite form."""
    if isinstance(value, Tensor) and value.ndim == 4:
        floor = torch.finfo(torch.float32).min / 2
        if value.dtype == torch.bool:
            return torch.zeros(value.shape, dtype=torch.float64, device=value.device).masked_fill(~value, floor)
        return value.clamp(min=floor) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(finite(v) for v in value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return value


def select(value: Any, rows: Tensor, batch: int) -> Any:
    """The argument of a block for other rows: whatever has a batch axis is indexed by `rows`."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows.to(value.device)) if batch > 1 and value.shape[:1] == (batch,) else value
    if isinstance(value, tuple | list):
        return type(value)(select(v, rows, batch) for v in value)
    if isinstance(value, dict):
        return {k: select(v, rows, batch) for k, v in value.items()}
    return value


def last_positions(kwargs: dict[str, Any], n: int) -> dict[str, Any]:
    """The arguments of attention for queries at the last n positions; it cuts the mask itself."""
    cut = dict(kwargs)
    if isinstance(kwargs.get("position_embeddings"), tuple):
        cut["position_embeddings"] = tuple(part[:, -n:] for part in kwargs["position_embeddings"])
    if isinstance(kwargs.get("position_ids"), Tensor):
        cut["position_ids"] = kwargs["position_ids"][:, -n:]
    return cut
