"""Measure what was forgotten and what was kept.

Everything is measured for each fact first and averaged last. A fact that a metric cannot score (no paraphrase, no
other answer of its relation, no original to compare with) is NaN and is left out of means: never 0.

Left out: generated answers (ROUGE and the like); an answer is scored under teacher forcing, where greedy decoding
and the arg-max of every position agree as long as the answer is right.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor

from locus import hooks
from locus.facts import Fact, FactSplit, encode
from locus.metrics import Batch, harmonic_mean, log_probability
from locus.metrics import exact as whole_answer
from locus.metrics import extraction_strength as strength_of
from locus.models import HookedModel

PARTS = ("forget", "retain", "holdout", "other")
METRICS = (
    "extraction_strength",
    "probability",
    "relative_probability",
    "exact",
    "truth_ratio",
    "paraphrase_probability",
    "paraphrase_extraction",
)
Strength = Literal["extraction", "probability"]
_STRENGTH_METRIC = {"extraction": "extraction_strength", "probability": "relative_probability"}

# The better direction of every number that a study writes; "" where neither is better by itself.
DIRECTION: dict[str, str] = {
    **{f"{part}_{metric}": "higher" for part in PARTS for metric in METRICS},
    **{f"forget_{metric}": "lower" for metric in METRICS},
    **{f"{part}_truth_ratio": "lower" for part in PARTS},
    "forget_truth_ratio": "higher",
    **{
        f"{side}_strength{form}": "higher"
        for side in ("forget", "retain")
        for form in ("", "_extraction", "_probability")
    },
    **{f"aues{form}": "higher" for form in ("", "_extraction", "_probability", "_trapezoid", "_common", "_halved")},
    "forget_at_95": "higher",
    "utility": "higher",
    "forget_quality": "higher",
    "mu95": "higher",
    "distance_to_retained": "lower",
    **{f"{what}{point}": "lower" for what in ("attacked", "recovery") for point in ("", "_matched", "_best")},
    "drift": "lower",
    "update_norm": "",
    "n_parameters": "",
    "n_changed": "",
    "learning_rate": "",
}

# Numbers that cannot leave a range, whatever an interval of their mean says.
_UNBOUNDED = ("truth_ratio", "relative_probability", "drift", "norm", "n_parameters", "n_changed", "distance", "rate")


def limits(metric: str) -> tuple[float, float]:
    """The range that a number of a study lies in."""
    if metric not in DIRECTION or metric == "mu95" or metric.startswith("recovery"):
        return -math.inf, math.inf
    return 0.0, math.inf if any(part in metric for part in _UNBOUNDED) else 1.0


# ------------------------------------------------------------------------------------------------ one answer


@dataclass(frozen=True, eq=False)
class Answers:
    """How a model does on some answers, one row a fact.

    log_probability: mean over the answer's tokens of log p(token | prompt, answer so far), in nats.
    extraction_strength: 1 - k*/T (metrics.extraction_strength).   exact: 1 where the whole answer is greedily right.
    """

    log_probability: Float[Tensor, " fact"]
    extraction_strength: Float[Tensor, " fact"]
    exact: Float[Tensor, " fact"]


@torch.no_grad()
def score(model: HookedModel, batch: Batch, *, rows: int = 32) -> Answers:
    """Score encoded answers, `rows` prompts a forward pass; float64, on the CPU."""
    if rows < 1:
        raise ValueError(f"rows must be 1 or more, got {rows}")
    parts = []
    for start in range(0, len(batch.tokens), rows):
        chunk = batch[start : start + rows]
        read, targets = chunk.reads()
        with hooks.read_only(model, read):  # the vocabulary is large and answers are short
            logits = model.logits(chunk.tokens, chunk.attention_mask).cpu()
        correct = (logits.argmax(-1) == targets.answer) & targets.mask
        # The arg-max of NaN is a token like any other: a broken model would look like one that has forgotten.
        broken = (logits.isnan().any(-1) & targets.mask).any(-1)
        strength = strength_of(correct, targets.mask).double().masked_fill(broken, math.nan)
        whole = whole_answer(correct, targets.mask).double().masked_fill(broken, math.nan)
        parts.append((log_probability(logits, targets).double(), strength, whole))
    return Answers(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


# ------------------------------------------------------------------------------------------------ Evaluation


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Per-fact values of every metric on every part of a split.

    per_fact[part, metric] has one value a fact, in the order of facts[part]; NaN = not scored.
    """

    model: str
    facts: dict[str, tuple[Fact, ...]]
    per_fact: dict[tuple[str, str], Float[Tensor, " fact"]]

    def __repr__(self) -> str:
        numbers = [
            f"{part} ({len(facts)} facts) "
            + " ".join(
                f"{metric.replace('_', ' ')} {self.mean(part, metric):.3f}"
                for metric in ("probability", "extraction_strength")
                if (part, metric) in self.per_fact
            )
            for part, facts in self.facts.items()
            if facts
        ]
        return f"Evaluation of {self.model}: {'; '.join(numbers)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from locus.view import evaluation

        # None: nothing to draw, and a notebook shows the text.
        scored = any((~values.isnan()).any() for values in self.per_fact.values())
        return evaluation(self)._repr_mimebundle_() if scored else None

    def values(self, part: str, metric: str) -> Float[Tensor, " fact"]:
        if (part, metric) not in self.per_fact:
            known = ", ".join(f"{p} {m}" for p, m in self.per_fact)
            raise ValueError(f"There is no metric {metric!r} on {part!r} here. There is: {known}.")
        return self.per_fact[part, metric]

    def mean(self, part: str, metric: str) -> float:
        """Mean over the scored facts; NaN when there is none."""
        values = self.values(part, metric)
        return float(values[~values.isnan()].mean()) if (~values.isnan()).any() else math.nan

    def n(self, part: str, metric: str) -> int:
        """How many facts were scored."""
        return int((~self.values(part, metric).isnan()).sum())

    def interval(
        self, part: str, metric: str, *, level: float = 0.95, method: Literal["t", "bootstrap"] | None = None
    ) -> tuple[float, float]:
        """Interval of the mean over facts: a t interval below 20 facts, a bootstrap over facts from 20 on.

        Paraphrases and wrong answers are averaged within their fact beforehand, so facts are the clusters.
        """
        return interval(self.values(part, metric), level=level, method=method)

    def strength(self, part: str, kind: Strength) -> float:
        """How much of a part is there, 0 to 1: mean extraction strength, or mean of min(1, p / p of the original)."""
        values = self.values(part, _STRENGTH_METRIC[kind])
        values = values[~values.isnan()].clamp(0, 1)
        return float(values.mean()) if len(values) else math.nan

    def forget_strength(self, kind: Strength = "extraction") -> float:
        """1 - strength of the forget facts. Higher is better."""
        return 1 - self.strength("forget", kind)

    def retain_strength(self, kind: Strength = "extraction", *, part: str = "holdout") -> float:
        """Strength of facts that are in no loss (part="holdout": the same relations). Higher is better."""
        return self.strength(part, kind)

    def utility(self) -> float:
        """Harmonic mean of probability, extraction strength and max(0, 1 - truth ratio) on retain and both holdouts.

        Nine numbers; those that could not be scored (a part without facts) are left out, and NaN is left if all are.
        """
        numbers = []
        for part in ("retain", "holdout", "other"):
            numbers += [self.mean(part, "probability"), self.mean(part, "extraction_strength")]
            ratio = self.values(part, "truth_ratio")
            ratio = ratio[~ratio.isnan()]
            numbers.append(float((1 - ratio).clamp(min=0).mean()) if len(ratio) else math.nan)
        scored = [x for x in numbers if not math.isnan(x)]
        return float(harmonic_mean(torch.tensor(scored, dtype=torch.float64))) if scored else math.nan

    def forget_quality(self, retained: "Evaluation | None" = None) -> float:
        """p-value of a two-sample Kolmogorov-Smirnov test of the forget facts' truth ratios against those of θ_r,
        a model trained without the forget facts (TOFU, Maini et al. 2024). Higher = harder to tell apart."""
        if retained is None:
            raise ValueError(
                "Forget quality compares with a model that was trained without the forget facts, and none was given. "
                "Pass its Evaluation: forget_quality(evaluate(retained_model, split)); without such a model, "
                "read forget_strength() and the truth ratio instead."
            )
        ours, theirs = (e.values("forget", "truth_ratio") for e in (self, retained))
        ours, theirs = ours[~ours.isnan()], theirs[~theirs.isnan()]
        if not len(theirs):
            raise ValueError(
                "Forget quality needs truth ratios, and no forget fact has another answer of its relation."
            )
        if not len(ours):  # the model's numbers are not finite
            return math.nan
        return float(stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue)

    def rows(self) -> pd.DataFrame:
        """Tidy: part, metric, n, mean, low, high (95%), better."""
        rows = []
        for part, metric in self.per_fact:
            low, high = self.interval(part, metric)
            name = f"{part}_{metric}"
            rows.append((part, metric, self.n(part, metric), self.mean(part, metric), low, high, DIRECTION[name]))
        return pd.DataFrame(rows, columns=["part", "metric", "n", "mean", "low", "high", "better"])


def interval(
    values: Float[Tensor, " fact"], *, level: float = 0.95, method: Literal["t", "bootstrap"] | None = None
) -> tuple[float, float]:
    """(low, high) for the mean of the values that are not NaN; NaN below two of them."""
    x = values[~values.isnan()].double().numpy()
    if len(x) < 2:
        return math.nan, math.nan
    if (method or ("t" if len(x) < 20 else "bootstrap")) == "t":
        half = stats.t.ppf((1 + level) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
        return float(x.mean() - half), float(x.mean() + half)
    draws = np.random.default_rng(0).integers(len(x), size=(4000, len(x)))
    low, high = np.quantile(x[draws].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def evaluate(
    model: HookedModel,
    split: FactSplit,
    *,
    reference: Evaluation | None = None,
    metrics: Sequence[str] = METRICS,
    parts: Sequence[str] = PARTS,
    wrong: int = 4,
    seed: int = 0,
    rows: int = 32,
) -> Evaluation:
    """Measure a model on every part of a split, or on some `parts` of it.

    model: evaluated as it is now, so inside `with update.applied(model):` it is the edited one.
    reference: the original model's Evaluation on the same split, for relative_probability = p / p of the original.
    wrong: how many wrong answers the truth ratio compares with: answers of other subjects to the same relation,
        the fact's own if it has some, else chosen by `seed`. truth_ratio = geometric mean of p(wrong) / p(answer), both
        length-normalized (TOFU, Maini et al. 2024, with the answer itself in the place of its paraphrase).
    """
    unknown = set(metrics) - set(METRICS)
    if unknown:
        raise ValueError(f"Unknown metrics {sorted(unknown)}. The metrics are: {', '.join(METRICS)}.")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"Unknown parts {sorted(unknown)}. The parts are: {', '.join(PARTS)}.")
    whole: dict[str, tuple[Fact, ...]] = {part: tuple(getattr(split, part)) for part in PARTS}
    if reference is not None and any(reference.facts.get(part) != whole[part] for part in parts):
        raise ValueError("The reference was measured on other facts. Measure it on this split: evaluate(model, split).")
    pool = [fact for facts in whole.values() for fact in facts]
    per_fact: dict[tuple[str, str], Float[Tensor, " fact"]] = {}
    for part in parts:
        facts = whole[part]
        columns = _columns(model, facts, pool, metrics=metrics, wrong=wrong, seed=seed, rows=rows)
        if "relative_probability" in metrics:
            columns["relative_probability"] = (
                torch.full((len(facts),), math.nan, dtype=torch.float64)
                if reference is None
                else relative(columns["probability"], reference.values(part, "probability"))
            )
        keep = [m for m in METRICS if m in metrics or (m == "probability" and "relative_probability" in metrics)]
        per_fact |= {(part, metric): columns[metric] for metric in keep}
    return Evaluation(model.name, {part: whole[part] for part in parts}, per_fact)


def relative(p: Float[Tensor, " fact"], original: Float[Tensor, " fact"]) -> Float[Tensor, " fact"]:
    """p / original; NaN where the original is 0, since a ratio to nothing measures nothing."""
    return torch.where(original > 0, p / original, torch.nan)


def _columns(
    model: HookedModel,
    facts: Sequence[Fact],
    pool: Sequence[Fact],
    *,
    metrics: Sequence[str],
    wrong: int,
    seed: int,
    rows: int,
) -> dict[str, Float[Tensor, " fact"]]:
    if not facts:
        return {metric: torch.zeros(0, dtype=torch.float64) for metric in METRICS}
    answers = score(model, encode(model, facts), rows=rows)
    columns = {
        "probability": answers.log_probability.exp(),
        "extraction_strength": answers.extraction_strength,
        "exact": answers.exact,
    }
    if "truth_ratio" in metrics:
        choices = [_wrong_answers(fact, pool, wrong, seed) for fact in facts]
        (log_p,) = _grouped(model, facts, answers=choices, fields=("log_probability",), rows=rows)
        columns["truth_ratio"] = (log_p - answers.log_probability).exp()
    if {"paraphrase_probability", "paraphrase_extraction"} & set(metrics):
        probability, extraction = _grouped(
            model,
            facts,
            prompts=[fact.paraphrases for fact in facts],
            fields=("probability", "extraction_strength"),
            rows=rows,
        )
        columns |= {"paraphrase_probability": probability, "paraphrase_extraction": extraction}
    return columns


def _wrong_answers(fact: Fact, pool: Sequence[Fact], n: int, seed: int) -> tuple[str, ...]:
    if fact.wrong:
        return fact.wrong[:n]
    others = sorted({f.answer for f in pool if f.relation == fact.relation} - {fact.answer})
    return tuple(random.Random(f"{seed} {fact.prompt}").sample(others, min(n, len(others))))


def _grouped(
    model: HookedModel,
    facts: Sequence[Fact],
    *,
    prompts: Sequence[Sequence[str]] | None = None,
    answers: Sequence[Sequence[str]] | None = None,
    fields: Sequence[str],
    rows: int,
) -> list[Float[Tensor, " fact"]]:
    """Score several prompts, or several answers, a fact and average within the fact; NaN for a fact with none."""
    groups = prompts if prompts is not None else answers
    assert groups is not None
    owner = torch.tensor([i for i, group in enumerate(groups) for _ in group], dtype=torch.long)
    if not len(owner):
        return [torch.full((len(facts),), math.nan, dtype=torch.float64) for _ in fields]
    texts = [text for group in groups for text in group]
    repeated = [facts[i] for i in owner.tolist()]
    batch = encode(model, repeated, prompts=texts) if prompts is not None else encode(model, repeated, answers=texts)
    scored = score(model, batch, rows=rows)
    count = torch.bincount(owner, minlength=len(facts)).double()
    out = []
    for field in fields:
        values = scored.log_probability.exp() if field == "probability" else getattr(scored, field)
        total = torch.zeros(len(facts), dtype=torch.float64).index_add(0, owner, values)
        out.append(torch.where(count > 0, total / count, torch.nan))
    return out


# ------------------------------------------------------------------------------------------------ trade-off


def aues(
    points: Sequence[tuple[float, float]] | Float[np.ndarray, "step 2"],
    *,
    form: Literal["envelope", "trapezoid"] = "envelope",
    between: tuple[float, float] = (0.0, 1.0),
) -> float:
    """Area under the envelope of a run's checkpoints. Higher is better.

    envelope: ∫ max{FS : RS >= r} dr, what the run can forget while it keeps at least r (0 where it keeps less).
    trapezoid: the same corners joined by straight lines instead of steps (what finer checkpoints might have reached).

    points: (retain strength, forget strength) of each checkpoint, in any order, clipped to [0, 1].
    between: the range of r; divided by its length, so that a common range of several runs compares with [0, 1].
    After Lee et al., EMNLP 2025 ("Does Localization Inform Unlearning?"), whose interpolation is not published.
    """
    low, high = between
    p = np.asarray(points, dtype=float).reshape(-1, 2)
    if not len(p) or not np.isfinite(p).all() or not 0 <= low < high <= 1:
        raise ValueError(
            f"AUES needs at least one checkpoint, finite strengths and a range inside [0, 1]; got {len(p)} checkpoints "
            f"({int((~np.isfinite(p)).any(-1).sum())} not finite) and the range {between}."
        )
    p = p.clip(0, 1)
    retain = np.unique(p[:, 0])  # ascending
    best = np.array([p[p[:, 0] >= r, 1].max() for r in retain])  # falls as r grows
    if form == "trapezoid":
        reach = min(high, retain[-1])
        if reach <= low:
            return 0.0
        grid = np.unique(np.concatenate([retain[(retain > low) & (retain < reach)], [low, reach]]))
        return float(np.trapezoid(np.interp(grid, retain, best), grid) / (high - low))
    edges = np.concatenate([[0.0], retain]).clip(low, high)
    return float((np.diff(edges) * best).sum() / (high - low))


# ------------------------------------------------------------------------------------------------ general drift


@dataclass(frozen=True, eq=False)
class DriftText:
    """Text and the original model's log-probabilities on it, in nats; what drift() compares an edited model with."""

    tokens: Int[Tensor, "text pos"]
    log_probs: Float[Tensor, "text pos d_vocab"]


@torch.no_grad()
def drift_text(
    model: HookedModel, *, text: str | Path | None = None, n: int = 8, length: int = 24, seed: int = 0
) -> DriftText:
    """Text for drift(), taken from the ORIGINAL model: call it before any edit.

    text: a text file of yours, cut into windows of `length` tokens (the first n full ones); None = n texts of `length`
    tokens that the model samples itself from its start token, at temperature 1, always the same for one seed.
    """
    if n < 1 or length < 1:
        raise ValueError(f"drift needs at least one text of at least one token, got n={n} and length={length}.")
    if text is None:
        tokens = _sample(model, n, length, seed)
    else:
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"There is no text file {path}. Give the path of a UTF-8 text file, or leave it out.")
        ids = model.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        windows = len(ids) // length
        if not windows:
            raise ValueError(f"{path} has {len(ids)} tokens; at least {length} are needed (or a smaller length=).")
        windows = min(n, windows)
        tokens = torch.tensor(ids[: windows * length], device=model.device).view(windows, length)
    return DriftText(tokens, model.logits(tokens).float().log_softmax(-1))


def _sample(model: HookedModel, n: int, length: int, seed: int) -> Int[Tensor, "text pos"]:
    start = model.tokenizer.bos_token_id
    start = model.tokenizer.eos_token_id if start is None else start
    if start is None:
        raise ValueError("The tokenizer has no start and no end token to sample from. Give a text file: text=PATH.")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((n, 1), start, device=model.device)
    while tokens.shape[1] < length:
        p = model.logits(tokens)[:, -1].float().softmax(-1).cpu()
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator).to(model.device)], dim=1)
    return tokens


@torch.no_grad()
def drift(model: HookedModel, text: DriftText) -> Float[Tensor, " text"]:
    """KL(original ‖ edited) per token of each text, in nats: Σ_v p(v) (log p(v) - log q(v)), averaged over positions.

    0 for the original model. Lower is better.
    """
    edited = model.logits(text.tokens).float().log_softmax(-1)
    # Rounding can leave a KL of identical-in-theory distributions a hair below 0.
    kl = (text.log_probs.exp() * (text.log_probs - edited)).sum(-1)
    return kl.double().mean(-1).clamp(min=0).cpu()
