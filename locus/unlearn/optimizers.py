"""The rule that turns gradients into steps: settings only, the arithmetic is torch's own.

The engine hands an optimizer nothing but the compact values of the masked entries, so its state has the
mask's size, weight decay shrinks masked entries only, and no other entry can move. Any rule that treats every
entry by itself fits; one that mixes the entries of a matrix (Muon, Adafactor's factored moments) would depend
on the shape in which the masked entries happen to lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Optimizer(Protocol):
    """What the engine asks of an optimizer: the settings, and `build` to make torch's optimizer from them."""

    @property
    def lr(self) -> float: ...

    def build(self, values: Sequence[Tensor]) -> torch.optim.Optimizer: ...


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay, v ← v(1 − lr·weight_decay) − lr·m̂/(√n̂ + eps); arXiv 1711.05101."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def build(self, values: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(values, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum and (coupled) weight decay, as `torch.optim.SGD`."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def build(self, values: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(values, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
