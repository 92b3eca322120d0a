"""Localizers that look at the weights: a score for every parameter entry, from the gradients of some facts.

Each method has its original unit, the single weight (`localize_weights`), and scores components by **the sum over the
entries that a component owns** (`locus.components`), after the absolute value. Lee et al. (EMNLP 2025) score value
vectors by such methods too; how they add up the entries is not known to us.
All gradients are of the metric, ∂m/∂θ; the loss of the papers is -m with m = `log_probability`. Gradients of one fact
at a time (or of all together, `pooled`) are in memory, never those of several facts apart.

Left out: Hessians (OBD, OBS), and weights found one by one with the earlier ones removed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from locus import hooks
from locus.components import Components, owned, totals
from locus.entries import ParameterMask, matrices
from locus.facts import Facts, FactSplit, encode
from locus.localize.interventions import ALL_KINDS, targets
from locus.metrics import Targets, log_probability
from locus.progress import tqdm

BATCH = 16  # facts in one pass where their gradients are added up

Entries = dict[str, Float[Tensor, "..."]]  # full-shape tensors by Hugging Face name


@dataclass(frozen=True, eq=False)
class Texts:
    """Teacher-forced texts, and what is read off them."""

    tokens: Int[Tensor, "fact pos"]
    attention_mask: Bool[Tensor, "fact pos"]
    read: Int[Tensor, "fact read"]
    targets: Targets

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, some: slice) -> "Texts":
        t = self.targets
        return Texts(
            self.tokens[some],
            self.attention_mask[some],
            self.read[some],
            Targets(t.answer[some], t.distractor[some], t.mask[some]),
        )


def clean_texts(pairs: Any) -> Texts:
    """The clean side of contrast pairs."""
    return Texts(pairs.clean, pairs.attention_mask, pairs.read, targets(pairs))


def fact_texts(model: Any, facts: Facts) -> Texts:
    """Prompts and answers of facts."""
    batch = encode(model, facts)
    return Texts(batch.tokens, batch.attention_mask, *batch.reads())


def gradient(model: Any, texts: Texts, names: list[str], metric: Callable) -> Entries:
    """∂/∂θ of the mean metric of some texts, in the shapes of the stored parameters."""
    asked = set(names)
    lives = [live for live in model.live if live.name in asked]
    tensors = [live.tensor for live in lives]
    found = {name: torch.zeros_like(model.weights[name], requires_grad=False) for name in names}
    for first in range(0, len(texts), BATCH):
        some = texts.rows(slice(first, first + BATCH))
        with torch.enable_grad(), model.frozen(but=tensors), hooks.read_only(model, some.read):
            total = metric(model.logits(some.tokens, some.attention_mask), some.targets).sum() / len(texts)
            parts = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
        for live, part in zip(lives, parts, strict=True):
            found[live.name].add_(_stored(live, part, found[live.name]))
    return found


def gradients(model: Any, texts: Texts, names: list[str], metric: Callable, pooled: bool) -> Iterator[Entries]:
    """`gradient` of one fact after another, or of all together."""
    if pooled:
        yield gradient(model, texts, names, metric)
        return
    for i in range(len(texts)):
        yield gradient(model, texts.rows(slice(i, i + 1)), names, metric)


class ByEntries(ABC):
    """A method that scores every parameter entry, and a component by the sum over its entries."""

    @abstractmethod
    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        """Scores of the entries of the named parameters: of one fact after another, or once for all of them."""

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        found = self.entries(model, clean_texts(pairs), owned(model, components), metric)
        name = type(self).__name__
        bar = tqdm(found, total=len(pairs), desc=name, unit="fact", disable=not progress)
        rows = torch.stack([totals(model, entries, components) for entries in bar])
        return rows.expand(len(pairs), -1) if len(rows) == 1 else rows


@dataclass(frozen=True)
class GradientSaliency(ByEntries):
    """|∂m/∂θ|: how much the metric feels a weight. In units of the metric per unit of weight; never negative.

    Fan et al. 2024 (SalUn, arXiv 2310.12508); theirs is of all facts together (`pooled`).

    Attributes:
        pooled: the gradient of the facts' mean metric, the same scores for every fact; else each fact's own.
    """

    pooled: bool = False
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "|gradient|"

    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        for found in gradients(model, texts, names, metric, self.pooled):
            yield {name: g.abs_() for name, g in found.items()}


@dataclass(frozen=True)
class SNIP(ByEntries):
    """|θ ∂m/∂θ|, or signed: θ ∂m/∂θ, the first-order estimate of m - m(weight set to 0). In units of the metric.

    The signed sum over a component estimates its knockout by weights; the paper's is the absolute one, of all facts
    together (`pooled`). Lee, Ajanthan & Torr 2019 (arXiv 1810.02340), without their normalization.

    Attributes:
        signed: keep the sign.
        pooled: the gradient of the facts' mean metric, the same scores for every fact; else each fact's own.
    """

    signed: bool = False
    pooled: bool = False
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "|weight × gradient|"

    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        weights = {name: model.stored(name) for name in names}
        for found in gradients(model, texts, names, metric, self.pooled):
            products = {name: g.mul_(weights[name]) for name, g in found.items()}
            yield products if self.signed else {name: p.abs_() for name, p in products.items()}


@dataclass(frozen=True)
class Fisher(ByEntries):
    """(∂m/∂θ)², averaged over the facts: with m = `log_probability` the diagonal of the empirical Fisher information.

    Of the answers as they are, not of answers drawn from the model. Never negative.
    Kirkpatrick et al. 2017 (arXiv 1612.00796); Foster, Schoepf & Brintrup 2024 (arXiv 2308.07702).
    """

    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "squared gradient"

    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        for found in gradients(model, texts, names, metric, pooled=False):
            yield {name: g.square_() for name, g in found.items()}


@dataclass(frozen=True)
class Magnitude(ByEntries):
    """|θ|, whatever the facts: a baseline. In units of the weights."""

    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "size of the weights"

    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        yield {name: model.stored(name).abs_() for name in names}


@dataclass(frozen=True)
class Wanda(ByEntries):
    """|θ_ij| · ||x_j||₂, x_j the j-th input of the linear layer at the tokens of the clean prompt: what flows through.

    Biases and norms score 0. Never negative, and blind to the answer. Sun et al. 2024 (arXiv 2306.11695); they
    compare within each output, here (and in WAGLE's code) all weights are compared.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("head", "kv", "neuron", "value", "mlp", "attn")
    UNIT: ClassVar[str] = "|weight| × activation"

    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        asked = set(names)
        lives = [live for live in model.live if live.name in asked and live.tensor.ndim > 1]
        if others := [live.name for live in lives if not isinstance(live.module, nn.Linear | Conv1D)]:
            raise ValueError(f"Wanda needs the input of a linear layer, and {others[0]} is read by none")
        for i in range(len(texts)):
            some = texts.rows(slice(i, i + 1))
            with torch.no_grad(), hooks.inputs([live.module for live in lives]) as found:
                model.logits(some.tokens, some.attention_mask)
            here = some.attention_mask.flatten().to(model.device)
            made = {name: torch.zeros_like(model.weights[name], requires_grad=False) for name in names}
            for live in lives:
                x = found[live.module].flatten(0, -2)[here].norm(dim=0)
                scaled = live.tensor.detach().abs() * (x if isinstance(live.module, nn.Linear) else x[:, None])
                made[live.name].add_(_stored(live, scaled, made[live.name]))
            yield made


@dataclass(frozen=True)
class WAGLE(ByEntries):
    """|(θ - g_r / γ) g_f|: what removing a weight does to the facts if the retain loss is then minimized again.

    g_f, g_r: gradients of the loss on the facts (-m) and on the retain facts (-`log_probability`, their mean). Never
    negative: the published ranking is by the absolute value, of all facts together (`pooled`). Their gradients are sums
    over the data and ours are means, so their γ is ours times the number of retain facts; at this γ the second term,
    |g_r g_f|, decides nearly alone.

    Jia et al. 2024 (WAGLE, arXiv 2410.17509), with the constant of their code.

    Attributes:
        retain: facts to keep; None = those of the split, in a study and in `localize_weights`.
        gamma: stands for the diagonal of the Hessian of the retain loss.
        pooled: the gradient of the facts' mean metric, the same scores for every fact; else each fact's own.
    """

    retain: Facts | None = None
    gamma: float = 1e-6
    pooled: bool = False
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "effect on the facts with retain at its optimum"

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"WAGLE got gamma={self.gamma}; expected more than 0")

    def entries(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Iterator[Entries]:
        kept = gradient(model, _retained(self, model), names, log_probability)
        factor = {name: model.stored(name).add_(g, alpha=1 / self.gamma) for name, g in kept.items()}  # g = -g_r
        for found in gradients(model, texts, names, metric, self.pooled):
            yield {name: g.mul_(factor[name]).abs_() for name, g in found.items()}


@dataclass(frozen=True)
class MemFlex:
    """Mean |G_f| of a component's entries where cos(G_f, G_r) < mu, else 0: felt by the facts, and not by others.

    G: the gradient with random labels, where about half of the answer's tokens (drawn with replacement) are random
    ones, in the text and in what is read off it; the mean of `copies` draws. G_f is of -m, G_r of -`log_probability` on
    the retain facts. In units of the metric per unit of weight.

    Tian et al. 2024 (KnowUnDo, arXiv 2407.01920), whose units are LoRA tensors; a budget takes the place of
    their threshold on the magnitude. A single weight has no direction, so there is no score of one.

    Attributes:
        retain: facts to keep; None = those of the split, in a study.
        mu: from this cosine on a component counts as entangled.
        copies: draws of random labels.
        seed: of the draws.
        pooled: the gradient of the facts' mean metric, the same scores for every fact; else each fact's own.
    """

    retain: Facts | None = None
    mu: float = 0.92
    copies: int = 5
    seed: int = 0
    pooled: bool = False
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "|gradient| where unentangled"

    def __post_init__(self) -> None:
        if not (-1 < self.mu <= 1 and self.copies > 0):
            raise ValueError(f"MemFlex needs -1 < mu <= 1 and copies > 0, got mu={self.mu}, copies={self.copies}")

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        names, texts = owned(model, components), clean_texts(pairs)
        kept = self._gradient(model, _retained(self, model), names, log_probability)
        sizes = components.sizes.to(model.device)
        size = totals(model, {name: g.square() for name, g in kept.items()}, components).sqrt()
        rows = []
        n = 1 if self.pooled else len(texts)
        for i in tqdm(range(n), desc="MemFlex", unit="fact", disable=not progress):
            found = self._gradient(model, texts if self.pooled else texts.rows(slice(i, i + 1)), names, metric)
            dot = totals(model, {name: g * kept[name] for name, g in found.items()}, components)
            length = totals(model, {name: g.square() for name, g in found.items()}, components).sqrt()
            magnitude = totals(model, {name: g.abs() for name, g in found.items()}, components) / sizes
            # Compared without dividing: a gradient of 0 has no direction, and no magnitude either.
            rows.append(magnitude.where(dot < self.mu * length * size, torch.zeros_like(magnitude)))
        return torch.stack(rows).expand(len(pairs), -1)

    def _gradient(self, model: Any, texts: Texts, names: list[str], metric: Callable) -> Entries:
        # Anew for every fact, so that its labels do not depend on which others are there.
        generator = torch.Generator().manual_seed(self.seed)
        total: Entries = {}
        for _ in range(self.copies):
            labels = random_labels(texts, model.cfg.d_vocab, generator)
            for name, g in gradient(model, labels, names, metric).items():
                total[name] = total[name].add_(g, alpha=1 / self.copies) if name in total else g / self.copies
        return total


def random_labels(texts: Texts, d_vocab: int, generator: torch.Generator) -> Texts:
    """About half of each answer's tokens, drawn with replacement, replaced by random ones in text and targets."""
    answer, tokens = texts.targets.answer.clone(), texts.tokens.clone()
    for row in range(len(texts)):
        places = texts.targets.mask[row].nonzero().flatten().cpu()
        n = max(1, len(places) // 2)
        drawn = places[torch.randint(len(places), (n,), generator=generator)]
        for k, token in zip(drawn.tolist(), torch.randint(d_vocab, (n,), generator=generator).tolist(), strict=True):
            at = int(texts.read[row, k]) + 1
            # The last token of an answer is read off and not in the text.
            if at < tokens.shape[1] and texts.tokens[row, at] == texts.targets.answer[row, k]:
                tokens[row, at] = token
            answer[row, k] = token
    return replace(texts, tokens=tokens, targets=replace(texts.targets, answer=answer))


def given(method: Any, retain: Facts) -> Any:
    """The method, with these facts to keep where it needs some and has none."""
    return replace(method, retain=retain) if getattr(method, "retain", retain) is None else method


def localize_weights(
    model: Any, split: FactSplit, method: Any, *, budget: float = 0.05, select: str = "top"
) -> ParameterMask:
    """The single weights that matter most for `split.forget`, in one ranking of all attention and MLP matrices.

    Args:
        model: a `HookedModel`.
        split: facts; those to forget are located, and those to retain are what `WAGLE` keeps unless it has its own.
        method: `GradientSaliency`, `SNIP`, `Fisher`, `WAGLE`, `Magnitude` or `Wanda`, with `log_probability` as metric;
            `pooled=True` gives the published forms, else an entry's score is the mean over the facts.
        budget: share of the entries, as in `ParameterMask.random`; biases and norms are left out.
        select: "top", or "bottom" for the lowest scores.

    Raises:
        ValueError: the method scores no single weights, needs retain facts and has none, or the budget selects nothing.
    """
    method = given(method, split.retain)
    if not isinstance(method, ByEntries):
        raise ValueError(
            f"{type(method).__name__} scores no single weights; GradientSaliency, SNIP, Fisher, WAGLE, Magnitude and "
            "Wanda do. Take one of them, or localize components."
        )
    if select not in ("top", "bottom"):
        raise ValueError(f"select must be 'top' or 'bottom', got {select!r}")
    scores: Entries = {}
    for found in method.entries(model, fact_texts(model, split.forget), matrices(model), log_probability):
        # A sum ranks as a mean does.
        scores = {name: scores[name].add_(values) if scores else values for name, values in found.items()}
    if select == "bottom":
        scores = {name: values.neg_() for name, values in scores.items()}
    recipe = {"method": repr(method), "metric": "log_probability", "select": select, "facts": len(split.forget)}
    return ParameterMask.top(scores, budget, recipe=recipe | {"model": model.fingerprint})


def _stored(live: Any, part: Tensor, like: Tensor) -> Tensor:
    """A live parameter's values in the stored parameter's shape, 0 where they are others'."""
    if live.index is None:
        return part
    whole = torch.zeros_like(like)
    live.put(whole, part)
    return whole


def _retained(method: Any, model: Any) -> Texts:
    if not method.retain:
        name = type(method).__name__
        raise ValueError(f"{name} weighs the facts against facts to keep: give some, {name}(retain=facts)")
    return fact_texts(model, method.retain)
