"""What an update lowers: a forget term on the forget answers and a retain term on the retain answers.

Every objective is a frozen dataclass over pure functions that give one value a fact and average nothing over
facts; the engine takes the mean over the batch:

    loss = forget_weight · mean_f forget(f) + retain_weight · mean_r retain(r)

A new objective is a frozen dataclass with `forget_weight`, `retain_weight`, `retain` and the method `forget` of
`Objective`; it needs no registration. One that needs more than the answer's log-probabilities has another method
in its place: `Preference` (a second answer to each prompt) or `Internal` (hidden states). Formulas follow the
reference implementation in `locuslab/open-unlearning`, except that a mean is over the tokens of each answer first
and over facts second (there: over all tokens at once).
"""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from locus import hooks
from locus.facts import Fact, Facts, FactSplit, encode

Reduce = Literal["sum", "mean"]
Retain = Literal["nll", "kl", "states"]


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
    return -2 / beta * logsigmoid(beta * (nll - reference_nll))


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


def squared_distance(
    states: Float[Tensor, "fact pos d_model"], target: Float[Tensor, "#fact #pos d_model"]
) -> Float[Tensor, "fact pos"]:
    """‖states − target‖² at each token, in float32 at least."""
    wide = torch.promote_types(states.dtype, torch.float32)
    return (states.to(wide) - target.to(wide)).square().sum(-1)


class Answers(NamedTuple):
    """One answer a fact: the log-probability of each token, in nats, under the edited model (with gradient) and
    under the original one, and where there is a token at all."""

    log_probs: Float[Tensor, "fact read"]
    original: Float[Tensor, "fact read"]
    mask: Bool[Tensor, "fact read"]


@dataclass(frozen=True, eq=False)
class Texts:
    """Hidden states of texts (prompt and answer, padded on the right), one a fact.

    states: hook name → activation under the edited model, with gradient where the edit can reach it.
    original: the same under the original model. mask: the tokens that are compared (see `Internal.tokens`).
    """

    facts: tuple[Fact, ...]
    states: Mapping[str, Float[Tensor, "fact pos d_model"]]
    original: Mapping[str, Float[Tensor, "fact pos d_model"]]
    mask: Bool[Tensor, "fact pos"]


class Weighted(Protocol):
    """What every objective has. `retain` says which term holds the retain answers."""

    @property
    def forget_weight(self) -> float: ...
    @property
    def retain_weight(self) -> float: ...
    @property
    def retain(self) -> Retain: ...


@runtime_checkable
class Objective(Weighted, Protocol):
    """An objective on the log-probabilities of the forget answers."""

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


@runtime_checkable
class Preference(Weighted, Protocol):
    """An objective that weighs the forget answers against others to the same prompts."""

    def others(self, facts: Facts) -> list[str]:
        """Another answer to the prompt of each forget fact."""

    def prefer(self, answers: Answers, others: Answers) -> Float[Tensor, " fact"]:
        """The forget term of each fact: lower = the other answer gains on the fact's own."""


@runtime_checkable
class Internal(Weighted, Protocol):
    """An objective on hidden states. With `retain="states"` the retain term is, for each fact, the squared
    distance of its states to the original model's: mean over dimensions and tokens, sum over sites (0 at first)."""

    @property
    def tokens(self) -> Literal["answer", "text"]:
        """The tokens at which states are compared: those of the answer, or all of prompt and answer."""

    def sites(self, n_layers: int) -> tuple[str, ...]:
        """The hooks whose activations [fact pos d_model] are read, named `blocks.<layer>.…`."""

    def forget_states(self, texts: Texts) -> Float[Tensor, " fact"]:
        """The forget term of each fact: lower is more forgotten."""


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


@dataclass(frozen=True, kw_only=True)
class SimNPO:
    """NPO without a reference model: −(2/β) log σ(β (NLL − δ)), NLL the mean over the answer's tokens.

    Fan et al. 2024 (arXiv 2410.07163), eq. 4, where δ is a margin γ. Defaults are those of OpenUnlearning.
    """

    beta: float = 4.5
    delta: float = 0.0
    forget_weight: float = 0.125
    retain_weight: float = 1.0
    retain: Retain = "nll"
    reduce: Reduce = "mean"

    def __post_init__(self):
        _check(self)
        if not self.beta > 0:
            raise ValueError(f"SimNPO: beta must be above 0, not {self.beta!r}; its limit is GradientDifference")

    def forget(
        self,
        log_probs: Float[Tensor, "fact read"],
        reference: Float[Tensor, "fact read"],
        mask: Bool[Tensor, "fact read"],
    ) -> Float[Tensor, " fact"]:
        loss = nll(log_probs, mask, self.reduce)
        return npo_loss(loss, torch.full_like(loss, self.delta), self.beta)


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimization of another answer over the one to forget.

    −(2/β) log σ(β [log π/π₀ (other) − log π/π₀ (answer)]), π₀ the original model, log π the sum over the answer's
    tokens (`reduce="mean"`: their mean, where the same β is another objective). Rafailov et al. 2023
    (arXiv 2305.18290), eq. 7; as unlearning Maini et al. 2024 (TOFU, arXiv 2401.06121), there without the factor 2.

    refusal: the other answer, in words that the tokenizer knows. None = a wrong one: of the fact's own, or else,
    chosen by `seed`, another subject's answer to the same relation.
    """

    beta: float = 0.1
    refusal: str | None = "I don't know"
    seed: int = 0
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    retain: Retain = "nll"
    reduce: Reduce = "sum"

    def __post_init__(self):
        _check(self)
        if not self.beta > 0:
            raise ValueError(f"DPO: beta must be above 0, not {self.beta!r}")

    def others(self, facts: Facts) -> list[str]:
        if self.refusal is not None:
            return [self.refusal] * len(facts)
        found = []
        for fact in facts:
            same = {f.answer for f in facts.pool or facts if f.relation == fact.relation}
            choices = sorted(set(fact.wrong or same) - {fact.answer})
            if not choices:
                raise ValueError(
                    f"DPO(refusal=None) finds no wrong answer to {fact.prompt!r}: no other subject has another "
                    f"{fact.relation!r}; give a refusal, or facts with wrong answers"
                )
            found.append(random.Random(f"{self.seed} {fact.prompt}").choice(choices))
        return found

    def prefer(self, answers: Answers, others: Answers) -> Float[Tensor, " fact"]:
        rise = nll(others.original - others.log_probs, others.mask, self.reduce)
        fall = nll(answers.original - answers.log_probs, answers.mask, self.reduce)
        return -2 / self.beta * logsigmoid(self.beta * (rise - fall))


@dataclass(frozen=True, kw_only=True)
class RMU:
    """Representation misdirection: push the residual stream after block `layer` to one random point c·u.

    mean_t ‖h_t − c·u‖² / d_model, u a random direction of length 1 with entries ≥ 0, drawn once by `seed`. Retain
    term: mean_t ‖h_t − h_t of the original model‖² / d_model. Li et al. 2024 (WMDP, arXiv 2403.03218), eq. 1-3.

    layer: 0 is the lowest block; the mask must let something at or below it change.
    coefficient: c, in the units of the residual stream: a multiple of its norm wrecks the model.
    tokens: OpenUnlearning compares those of the answer; WMDP all. A one-token answer is predicted from the prompt's
        tokens alone, which only "text" reaches directly.
    """

    layer: int
    coefficient: float = 2.0
    seed: int = 0
    tokens: Literal["answer", "text"] = "answer"
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    retain: Retain = "states"
    reduce: Reduce = "mean"

    def __post_init__(self):
        _check(self, retain=("states", "nll", "kl"))

    def sites(self, n_layers: int) -> tuple[str, ...]:
        if not 0 <= self.layer < n_layers:
            raise ValueError(f"RMU: layer must be one of 0 to {n_layers - 1}, the model's blocks, not {self.layer!r}")
        return (f"blocks.{self.layer}.hook_resid_post",)

    def forget_states(self, texts: Texts) -> Float[Tensor, " fact"]:
        (states,) = texts.states.values()
        u = torch.rand(states.shape[-1], generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        target = (self.coefficient * u / u.norm()).to(states)
        return over_tokens(squared_distance(states, target[None, None]) / len(u), texts.mask, self.reduce)


@dataclass(frozen=True, kw_only=True)
class MatchMLP:
    """Direct supervision: give every layer's MLP the output on the forget texts that it has in a reference model.

    mean_t Σ_layer ‖MLP_layer(x)_t − reference's‖², over the tokens of prompt and answer; what is compared is what
    the MLP adds to the residual stream (after its own norm, where it has one). Lee et al., EMNLP 2025 (arXiv
    2505.16252), Fig. 1, where the reference is the model θ_r that never learned the forget facts. Make it so:

        with planted.retained.applied(model):  # θ_r
            objective = MatchMLP.towards(model, split)

    reference: fingerprint of `targets`. targets: fact → the outputs; not saved with an update.
    """

    reference: str = ""
    tokens: Literal["answer", "text"] = "text"
    forget_weight: float = 1.0
    retain_weight: float = 0.0
    retain: Retain = "nll"
    reduce: Reduce = "mean"
    targets: Mapping[Fact, Float[Tensor, "layer pos d_model"]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        _check(self, retain=("states", "nll", "kl"))

    @classmethod
    def towards(cls, model: Any, split: FactSplit, **settings: Any) -> "MatchMLP":
        """The objective whose reference is the model as it is now, edits in place included."""
        return cls(**settings).bound(model, split)

    def bound(self, model: Any, split: FactSplit) -> "MatchMLP":
        """This objective with the model as it is now, edits in place included, as its reference."""
        batch = encode(model, split.forget)
        found = hooks.states(model, batch.tokens, batch.attention_mask, _mlp_outputs(model.cfg.n_layers))
        outputs = torch.stack(list(found.values()), dim=1)
        lengths = batch.attention_mask.sum(1).tolist()
        targets = {f: x[:, :n].clone() for f, x, n in zip(split.forget, outputs, lengths, strict=True)}
        digest = hashlib.sha256()
        for fact, target in targets.items():
            digest.update(repr(fact).encode() + target.cpu().double().numpy().tobytes())
        return replace(self, reference=digest.hexdigest()[:12], targets=targets)

    def sites(self, n_layers: int) -> tuple[str, ...]:
        return _mlp_outputs(n_layers)

    def forget_states(self, texts: Texts) -> Float[Tensor, " fact"]:
        if missing := [fact for fact in texts.facts if fact not in self.targets]:
            raise ValueError(
                f"MatchMLP has no target for {missing[0].prompt!r} ({len(self.targets)} facts have one); make it with "
                "MatchMLP.towards(model, split) of the same split, while the reference is applied"
            )
        states = torch.stack(list(texts.states.values()), dim=2)  # fact pos layer d_model
        targets = pad_sequence([self.targets[fact].movedim(0, 1) for fact in texts.facts], batch_first=True)
        n = targets.shape[1]  # texts may be padded further
        distance = squared_distance(states[:, :n].flatten(2), targets.to(states.device).flatten(2))
        return over_tokens(distance, texts.mask[:, :n], self.reduce)


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """The ordinary loss of training, −mean_t log p_t of the forget answers: it teaches them, and forgets nothing.

    To plant facts and to attack an edit. A retain term replays facts that are to be kept meanwhile.
    """

    forget_weight: float = 1.0
    retain_weight: float = 0.0
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
        return nll(log_probs, mask, self.reduce)


def _mlp_outputs(n_layers: int) -> tuple[str, ...]:
    return tuple(f"blocks.{layer}.hook_mlp_out" for layer in range(n_layers))


def _check(objective: Any, retain: tuple[str, ...] = ("nll", "kl")) -> None:
    name = type(objective).__name__
    for field_name in ("forget_weight", "retain_weight"):
        if not getattr(objective, field_name) >= 0:
            raise ValueError(f"{name}: {field_name} must be 0 or above, not {getattr(objective, field_name)!r}")
    if objective.retain not in retain:
        raise ValueError(f"{name}: retain must be one of {', '.join(map(repr, retain))}, not {objective.retain!r}")
    if objective.reduce not in ("sum", "mean"):
        raise ValueError(f"{name}: reduce must be 'sum' or 'mean' over tokens, not {objective.reduce!r}")
    if getattr(objective, "tokens", "text") not in ("answer", "text"):
        raise ValueError(f"{name}: tokens must be 'answer' or 'text', not {objective.tokens!r}")
