"""Per-example functions of logits, shared by localize and evaluate: one value a row or a fact, averaged last.

Two forms of input: logits at the read positions of contrast pairs (`Targets`), and logits of whole
teacher-forced texts (`Batch`). Anything that cannot be scored is NaN, never 0. Left out: metrics that need
generated text.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """What is read off each row: token ids of answer and distractor; `mask` is False where padded."""

    answer: Int[Tensor, "row read"]
    distractor: Int[Tensor, "row read"]
    mask: Bool[Tensor, "row read"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Teacher-forced texts, padded: `answer_mask` is True where the token itself is an answer token."""

    tokens: Int[Tensor, "fact pos"]
    attention_mask: Bool[Tensor, "fact pos"]
    answer_mask: Bool[Tensor, "fact pos"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Int[Tensor, " row"]) -> "Batch":
        rows = rows.to(self.tokens.device) if isinstance(rows, Tensor) else rows
        return Batch(self.tokens[rows], self.attention_mask[rows], self.answer_mask[rows])

    def reads(self) -> tuple[Int[Tensor, "fact read"], Targets]:
        """Positions whose logits predict the answer's tokens (one before each), and those tokens."""
        n = int(self.answer_mask.sum(1).max())
        at = (~self.answer_mask).to(torch.int8).argsort(dim=1, stable=True)[:, :n]
        mask = self.answer_mask.gather(1, at)
        at = torch.where(mask, at, at[:, :1])  # a position that means something: logits at padding may be NaN
        answer = self.tokens.gather(1, at)
        return at - 1, Targets(answer, answer, mask)


def logit_difference(logits: Float[Tensor, "row read d_vocab"], targets: Targets) -> Float[Tensor, " row"]:
    """Mean over the read positions of logit(answer) − logit(distractor).

    Unit: logits. Positive = the model prefers the answer. A position where both have the same token counts
    as 0. Reference: Zhang & Nanda 2024 (arXiv 2309.16042), §2, there for one token.
    """
    difference = _pick(logits, targets.answer) - _pick(logits, targets.distractor)
    return _masked_mean(difference, targets.mask)


def log_probability(logits: Float[Tensor, "row read d_vocab"], targets: Targets) -> Float[Tensor, " row"]:
    """Mean over the answer's tokens of log p(token | all tokens before). Unit: nats; at most 0."""
    return _masked_mean(_pick(_log_softmax(logits), targets.answer), targets.mask)


def probability(logits: Float[Tensor, "row read d_vocab"], targets: Targets) -> Float[Tensor, " row"]:
    """exp of `log_probability`: the answer's length-normalized probability P(a|q)^(1/T), in 0..1."""
    return log_probability(logits, targets).exp()


def answer_log_probs(logits: Float[Tensor, "fact pos d_vocab"], batch: Batch) -> Float[Tensor, "fact pos"]:
    """log p(token_t | tokens before t) at each answer token's own position t, 0 elsewhere. Unit: nats."""
    log_p = _pick(_log_softmax(logits[:, :-1]), batch.tokens[:, 1:])
    log_p = torch.nn.functional.pad(log_p, (1, 0))
    return log_p.where(batch.answer_mask, torch.zeros_like(log_p))


def answer_probability(
    log_probs: Float[Tensor, "fact pos"], answer_mask: Bool[Tensor, "fact pos"]
) -> Float[Tensor, " fact"]:
    """Length-normalized probability exp(mean log p) of each answer, in 0..1, from `answer_log_probs`."""
    return _masked_mean(log_probs, answer_mask).exp()


def answer_correct(logits: Float[Tensor, "fact pos d_vocab"], batch: Batch) -> Bool[Tensor, "fact pos"]:
    """True where an answer token is the most likely one given all true tokens before it; False elsewhere."""
    greedy = logits[:, :-1].argmax(-1) == batch.tokens[:, 1:]
    return torch.nn.functional.pad(greedy, (1, 0)) & batch.answer_mask


def exact(correct: Bool[Tensor, "fact pos"], answer_mask: Bool[Tensor, "fact pos"]) -> Bool[Tensor, " fact"]:
    """True where the whole answer is greedily right (teacher-forced and free decoding agree on that)."""
    return (correct | ~answer_mask).all(-1) & answer_mask.any(-1)


def extraction_strength(
    correct: Bool[Tensor, "fact pos"], answer_mask: Bool[Tensor, "fact pos"], floor: bool = False
) -> Float[Tensor, " fact"]:
    """ES = 1 − k*/T, k* in 0..T the shortest prefix of the answer after which greedy decoding gives the rest.

    1 = the whole answer comes from the prompt alone; 0 = even the last of the T tokens is wrong. `floor`
    gives the form of OpenUnlearning, whose k* ends at T−1, so that ES is at least 1/T. Reference: Carlini
    et al. 2021 (arXiv 2012.07805); Wang et al. 2025 (arXiv 2406.09179).
    """
    length = answer_mask.sum(-1)
    # T − k* is the run of right tokens that ends at the answer's end.
    right = (correct | ~answer_mask).flip(-1).long().cumprod(-1).flip(-1)
    strength = (right * answer_mask).sum(-1) / length.double()
    if floor:
        strength = torch.maximum(strength, 1 / length.double())
    return strength.where(length > 0, torch.nan)


def truth_ratio(right: Float[Tensor, " fact"], wrong: Float[Tensor, "fact wrong"]) -> Float[Tensor, " fact"]:
    """(Π_i P(wrong_i))^(1/n) / P(right), from log probabilities per token. Below 1 = truth is preferred.

    right: log_probability of the right answer (TOFU takes its paraphrase). wrong: the same of wrong answers,
    NaN where a fact has fewer. Reference: Maini et al. 2024 (TOFU, arXiv 2401.06121), §2.2.
    """
    return (wrong.nanmean(-1) - right).exp()


def harmonic_mean(values: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
    """n / Σ 1/x over the last axis; 0 as soon as one value is 0, NaN as soon as one is NaN."""
    if (values < 0).any():
        raise ValueError(f"a harmonic mean needs values of at least 0, got {values.min().item():.4g}")
    return values.shape[-1] / (1 / values).sum(-1)


def _pick(values: Float[Tensor, "row read d_vocab"], tokens: Int[Tensor, "row read"]) -> Float[Tensor, "row read"]:
    return values.gather(-1, tokens.to(values.device)[..., None])[..., 0]


def _log_softmax(logits: Float[Tensor, "row read d_vocab"]) -> Float[Tensor, "row read d_vocab"]:
    # Half precision has 3 digits: probabilities are taken in float32 at least.
    return (logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits).log_softmax(-1)


def _masked_mean(values: Float[Tensor, "row read"], mask: Bool[Tensor, "row read"]) -> Float[Tensor, " row"]:
    """Mean where `mask`, NaN for a row without any."""
    mask = mask.to(values.device)
    return values.where(mask, torch.zeros_like(values)).sum(-1) / mask.sum(-1)
