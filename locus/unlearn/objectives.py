"""What an update lowers: a forget term on the forget answers and a retain term on the retain answers.

Every objective is a frozen dataclass over pure functions of the log-probabilities of the answer tokens. The
functions return one value a fact and average nothing over facts; the engine takes the mean over the batch:

    loss = forget_weight · mean_f forget(f) + retain_weight · mean_r retain(r)

A new objective is a frozen dataclass with `forget_weight`, `retain_weight`, `retain` and the method `forget`;
it needs no registration. Formulas follow the reference implementation in `locuslab/open-unlearning`, except
that a mean is over the tokens of each answer first and over facts second (there: over all tokens at once).
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Reduce = Literal["sum", "mean"]
Retain = Literal["nll", "kl"]


def over_tokens(
    values: Float[Tensor, "fact read"], mask: Bool[Tensor, "fact read"], reduce: Reduce
) -> Float[Tensor, " fact"]:
    """Sum or mean of `values` over the tokens of each answer (`mask` True); a fact without tokens gives 0."""
    total = values.masked_fill(~mask, 0).sum(-1)
    return total if reduce == "sum" else total / mask.sum(-1).clamp(min=1)


def nll(
    log_probs: Float[Tensor, "fact read"], mask: Bool[Tensor, "fact read"], reduce: Reduce
) -> Float[Tensor, " fact"]:
    """Negative log-likelihood of each answer, −Σ_t log p_t or its mean over tokens, in nats, ≥ 0."""
    return -over_tokens(log_probs, mask, reduce)


def npo_loss(nll: Float[Tensor, " fact"], reference_nll: Float[Tensor, " fact"], beta: float) -> Float[Tensor, " fact"]:
    """Negative preference optimization, −(2/β) log σ(β (NLL − NLL_original)), one value a fact.

    Falls as the answer gets less likely than under the original model. Its derivative by NLL is
    −2σ(−β(NLL − NLL_original)), which tends to gradient ascent's −1 as β → 0. Zhang et al. 2024
    (arXiv 2404.05868), eq. 3.
    """
    return -2 / beta * torch.nn.functional.logsigmoid(beta * (nll - reference_nll))


def wga_loss(
    log_probs: Float[Tensor, "fact read"], mask: Bool[Tensor, "fact read"], beta: float, reduce: Reduce
) -> Float[Tensor, " fact"]:
    """Weighted gradient ascent, Σ_t or mean_t of sg(p_t^β) log p_t, one value a fact; sg stops the gradient.

    The weight lets go of a token once it is unlikely. Wang et al. 2025 (arXiv 2502.19301), §4.
    """
    log_probs = log_probs.masked_fill(~mask, 0)
    weight = (beta * log_probs.detach()).exp()
    return over_tokens(weight * log_probs, mask, reduce)


def kl(
    reference: Float[Tensor, "fact read d_vocab"],
    logits: Float[Tensor, "fact read d_vocab"],
    mask: Bool[Tensor, "fact read"],
    reduce: Reduce,
) -> Float[Tensor, " fact"]:
    """KL(original ‖ edited) of the next-token distributions where the answer is predicted, in nats, ≥ 0.

    `reference` are the original model's logits, `logits` the edited one's. Exactly 0 where the two are equal.
    """
    reference, logits = reference.log_softmax(-1), logits.log_softmax(-1)
    return over_tokens((reference.exp() * (reference - logits)).sum(-1), mask, reduce)


@runtime_checkable
class Objective(Protocol):
    """What the engine asks of an objective. `retain` says which term holds the retain answers."""

    @property
    def forget_weight(self) -> float: ...
    @property
    def retain_weight(self) -> float: ...
    @property
    def retain(self) -> Retain: ...

    def forget(
        self,
        log_probs: Float[Tensor, "fact read"],
        reference: Float[Tensor, "fact read"],
        mask: Bool[Tensor, "fact read"],
    ) -> Float[Tensor, " fact"]:
        """The forget term of each fact: lower is more forgotten.

        log_probs: log p of each answer token under the edited model, in nats, with gradient.
        reference: the same under the original model, computed once before the first step, without gradient.
        mask: True where there is an answer token; anything elsewhere must be ignored.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GradientDifference:
    """Gradient ascent on the forget answers and descent on the retain answers: forget term −NLL.

    Unbounded below, so it can wreck the model; `retain_weight=0` is plain gradient ascent. Liu et al. 2022
    (arXiv 2203.12817).
    """

    forget_weight: float = 1.0
    retain_weight: float = 1.0
    retain: Retain = "nll"
    reduce: Reduce = "mean"

    def __post_init__(self):
        _check(self)

    def forget(
        self,
        log_probs: Float[Tensor, "fact read"],
        reference: Float[Tensor, "fact read"],
        mask: Bool[Tensor, "fact read"],
    ) -> Float[Tensor, " fact"]:
        return -nll(log_probs, mask, self.reduce)


@dataclass(frozen=True, kw_only=True)
class NPO:
    """Negative preference optimization; see `npo_loss`.

    `reduce="sum"` is the paper's: the likelihood of the whole answer. Some published code takes the mean over
    tokens, where the same β is another objective.
    """

    beta: float = 0.1
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    retain: Retain = "nll"
    reduce: Reduce = "sum"

    def __post_init__(self):
        _check(self)
        if not self.beta > 0:
            raise ValueError(f"NPO: beta must be above 0, not {self.beta!r}; its limit is GradientDifference")

    def forget(
        self,
        log_probs: Float[Tensor, "fact read"],
        reference: Float[Tensor, "fact read"],
        mask: Bool[Tensor, "fact read"],
    ) -> Float[Tensor, " fact"]:
        return npo_loss(nll(log_probs, mask, self.reduce), nll(reference, mask, self.reduce), self.beta)


@dataclass(frozen=True, kw_only=True)
class WGA:
    """Weighted gradient ascent; see `wga_loss`. β = 0 is gradient ascent."""

    beta: float = 1.0
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    retain: Retain = "nll"
    reduce: Reduce = "mean"

    def __post_init__(self):
        _check(self)
        if not self.beta >= 0:
            raise ValueError(f"WGA: beta must be 0 or above, not {self.beta!r}")

    def forget(
        self,
        log_probs: Float[Tensor, "fact read"],
        reference: Float[Tensor, "fact read"],
        mask: Bool[Tensor, "fact read"],
    ) -> Float[Tensor, " fact"]:
        return wga_loss(log_probs, mask, self.beta, self.reduce)


def _check(objective: GradientDifference | NPO | WGA) -> None:
    name = type(objective).__name__
    for field in ("forget_weight", "retain_weight"):
        if not getattr(objective, field) >= 0:
            raise ValueError(f"{name}: {field} must be 0 or above, not {getattr(objective, field)!r}")
    if objective.retain not in ("nll", "kl"):
        raise ValueError(f"{name}: retain must be 'nll' or 'kl', not {objective.retain!r}")
    if objective.reduce not in ("sum", "mean"):
        raise ValueError(f"{name}: reduce must be 'sum' or 'mean' over tokens, not {objective.reduce!r}")
