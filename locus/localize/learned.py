"""Learned masks: a factor on each component, trained so that few are kept and the answer is still given.

The model's weights are frozen. Each fact has its own mask, trained beside the others in one batch: rows do not mix, so
a fact's mask does not depend on which facts it is trained with.

Left out: masks with one factor for all facts (that is a mask of the facts' mean loss), and their straight-through form.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.interventions import ALL_KINDS, Places, places, targets
from locus.progress import tqdm

# Louizos, Welling & Kingma 2018: gates are stretched to (GAMMA, ZETA), then cut to [0, 1].
GAMMA, ZETA = -0.1, 1.1


@dataclass(frozen=True, eq=False)
class Learned:
    """What training ended with.

    scores: as `score` of the method returns them.
    losses: -metric with the mask on, of each step, without the penalty.
    """

    scores: Float[Tensor, "fact component"]
    losses: Float[Tensor, "step fact"]


class Trained(ABC):
    """A method whose scores are what training ends with."""

    penalty: float

    def __post_init__(self) -> None:
        for field in ("lr", "steps", "batch_size"):
            if not (value := getattr(self, field)) > 0:
                raise ValueError(f"{type(self).__name__} got {field}={value}; expected more than 0")
        if self.penalty < 0:
            raise ValueError(f"{type(self).__name__} got penalty={self.penalty}; expected 0 or more")

    @abstractmethod
    def fit(self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool = False) -> Learned:
        """Train the masks, and keep what the losses were."""

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        return self.fit(model, pairs, components, metric, progress).scores


@dataclass(frozen=True)
class Slimming(Trained):
    """A factor m_u on each component's activation, at 1 at first, with an L1 penalty: the score is m_u at the end.

        min over m   -metric(m) + penalty · Σ_u |m_u|

    The components that the answer does not need go to 0; a negative score works against the answer. Not in units of the
    metric. The paper cuts m to [0, 1], which only makes ties; its penalty is λ · mean |m|, with λ / (number of
    components) about 0.25 on GPT-2, and its metric is `log_probability`. The steps are few on purpose: once most of m
    is gone the loss is that of a broken model. Defaults chosen by INJ recall of four sentences on `tiny`.

    Chang, Thomason & Jia 2024 (arXiv 2311.09060), section 4, after Liu et al. 2017 (arXiv 1708.06519).

    Attributes:
        penalty: metric units a component.
        lr: of Adam.
        steps: of Adam.
        batch_size: facts in one pass at the most.
    """

    penalty: float = 0.5
    lr: float = 0.01
    steps: int = 60
    batch_size: int = 32
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "learned mask"

    def fit(self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool = False) -> Learned:
        return _train(
            model,
            pairs,
            components,
            metric,
            self,
            start=1.0,
            gate=lambda m: m,
            size=lambda m: m.abs(),
            score=lambda m: m,
            progress=progress,
        )


@dataclass(frozen=True)
class HardConcrete(Trained):
    """A random gate on each component's activation, exactly 0 or 1 with some probability: P(kept) is learned.

        s_u = sigmoid((log n - log(1 - n) + a_u) / β),  n ~ U(0, 1)          gate_u = clip(1.2 s_u - 0.1, 0, 1)
        min over a   -metric(gate) + penalty · Σ_u sigmoid(a_u - β log(0.1 / 1.1))       score: sigmoid(a_u), in (0, 1)

    The second term is the expected number of gates that are not 0. Not in units of the metric. Each step has one draw
    n for each component, the same for all facts. The paper's λ / (number of components) is about 0.003 to 0.006 on
    GPT-2 and Pythia, its β 1/3 or 2/3, its metric `log_probability`. Defaults chosen as those of `Slimming`; with
    keep = 0.5 half of the components are off at first, and the gradients are those of a broken model.

    Louizos, Welling & Kingma 2018 (arXiv 1712.01312), section 2.2; Chang, Thomason & Jia 2024 (arXiv 2311.09060),
    section 4.

    Attributes:
        penalty: metric units a component.
        beta: temperature of the gates.
        keep: sigmoid(a) at first.
        lr: of Adam.
        steps: of Adam.
        seed: of the draws.
        batch_size: facts in one pass at the most.
    """

    penalty: float = 0.1
    beta: float = 1 / 3
    keep: float = 0.9
    lr: float = 0.01
    steps: int = 200
    seed: int = 0
    batch_size: int = 32
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "learned mask"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.keep < 1 and self.beta > 0):
            raise ValueError(f"keep must be in (0, 1) and beta positive, got {self.keep} and {self.beta}")

    def fit(self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool = False) -> Learned:
        generator = torch.Generator().manual_seed(self.seed)

        def gate(a: Tensor) -> Tensor:
            noise = torch.rand(a.shape[1], generator=generator, dtype=torch.float64).clamp(1e-6, 1 - 1e-6).logit()
            return (((noise.to(a) + a) / self.beta).sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)

        shift = self.beta * math.log(-GAMMA / ZETA)
        return _train(
            model,
            pairs,
            components,
            metric,
            self,
            start=math.log(self.keep / (1 - self.keep)),
            gate=gate,
            size=lambda a: (a - shift).sigmoid(),
            score=torch.sigmoid,
            progress=progress,
            before=lambda: generator.manual_seed(self.seed),
        )


def _train(
    model: Any,
    pairs: Any,
    components: Components,
    metric: Callable,
    method: Any,
    *,
    start: float,
    gate: Callable[[Tensor], Tensor],
    size: Callable[[Tensor], Tensor],
    score: Callable[[Tensor], Tensor],
    progress: bool,
    before: Callable[[], Any] = lambda: None,
) -> Learned:
    """Adam on one number a fact and component; every entry has its own step, so facts do not mix."""
    scores, losses, where = [], [], places(components)
    n_batches = math.ceil(len(pairs) / method.batch_size)
    name = type(method).__name__
    with tqdm(total=n_batches * method.steps, desc=name, unit="step", disable=not progress) as bar:
        for first in range(0, len(pairs), method.batch_size):
            some = pairs[first : first + method.batch_size]
            before()
            shape = (len(some), len(components))
            learned = torch.full(shape, start, dtype=model.dtype, device=model.device, requires_grad=True)
            optimizer = torch.optim.Adam([learned], lr=method.lr)
            curve = []
            for _ in range(method.steps):
                with torch.enable_grad():
                    loss = -masked_metric(model, some, where, gate(learned), metric)
                    total = loss.sum() + method.penalty * size(learned).sum()
                    (learned.grad,) = torch.autograd.grad(total, [learned])
                optimizer.step()
                curve.append(loss.detach())
                bar.update()
            scores.append(score(learned.detach()))
            losses.append(torch.stack(curve))
    return Learned(torch.cat(scores), torch.cat(losses, dim=1))


def masked_metric(
    model: Any, pairs: Any, where: Places, mask: Float[Tensor, "fact component"], metric: Callable
) -> Float[Tensor, " fact"]:
    """The metric of the clean run with each component's activation multiplied by its factor, at all positions."""
    padding = ~pairs.attention_mask.to(model.device)

    def scaled(members: list[int], index: Int[Tensor, " _"] | None) -> hooks.Edit:
        def edit(activation: Tensor) -> Tensor:
            shape = activation.shape
            cells = activation.reshape(*padding.shape, *shape[-1:]) if activation.ndim == 2 else activation
            # Activations at padding mean nothing, and may be NaN.
            cells = cells.masked_fill(padding.reshape(*padding.shape, *[1] * (cells.ndim - 2)), 0)
            factor = mask[:, members]
            if index is not None:
                factor = mask.new_ones(len(mask), cells.shape[2]).index_copy(1, index.to(mask.device), factor)
            return (cells * factor.reshape(len(mask), 1, -1, *[1] * (cells.ndim - 3))).reshape(shape)

        return edit

    edits = [(name, scaled(members, index)) for name, members, index in where]
    with model.frozen(), hooks.edits(model, edits), hooks.read_only(model, pairs.read):
        return metric(model.logits(pairs.clean, pairs.attention_mask), targets(pairs))
