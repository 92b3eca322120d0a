"""Checks, once a model, that the fast ways to run it give what the slow ones give."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locus.hooks import Start, record
from locus.reads import unembed_normed


def continues(model: Any, tokens: Int[Tensor, "batch pos"]) -> bool:
    """Whether the run of a batch can be made again from its trace, with every row twice, to the same logits."""
    recorded, logits = record(model, tokens)
    rows = torch.arange(len(tokens), device=logits.device).repeat(2)
    start = Start(rows, enter=lambda residual: residual)
    try:
        with torch.no_grad():
            end = recorded.grown({0: start}, torch.arange(tokens.shape[1]).expand(len(tokens), -1))
            again = unembed_normed(model, model.bridge.ln_final(end))
    except RuntimeError:  # what a block is given beside the residual stream is not by row
        return False
    return _same(again, logits[rows])


def packs(model: Any, tokens: Int[Tensor, "batch pos"]) -> bool:
    """Whether a causal change from the middle on gives the same logits when only changed positions are computed.

    Not so where attention has no separate projections of queries, keys, values and output, or looks ahead.
    """
    recorded, _ = record(model, tokens, keys=True)
    if recorded.keys is None or any(not hasattr(block.attn, name) for block in model.bridge.blocks for name in "qkvo"):
        return False
    middle = tokens.shape[1] // 2
    noise = torch.linspace(-1, 1, recorded.inputs[0][0, middle:].numel(), device=recorded.inputs[0].device)

    def enter(residual: Tensor) -> Tensor:
        residual = residual.clone()
        residual[:, middle:] += noise.to(residual).reshape(residual[0, middle:].shape)
        return residual

    rows = torch.arange(len(tokens), device=noise.device)
    start = {0: Start(rows, enter=enter)}
    read = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    try:
        with torch.no_grad():
            whole = replace(recorded, keys=None).grow(start, read)
            packed = recorded.grow(start, read)
    except RuntimeError:  # what it is given beside the residual stream is of whole rows
        return False
    return _same(packed, whole)


def _same(found: Float[Tensor, "..."], expected: Float[Tensor, "..."]) -> bool:
    return bool(((found - expected).abs().max() <= 1e-3 * max(1.0, float(expected.abs().max()))).item())
