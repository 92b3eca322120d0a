"""Integrated gradients: contributions that add up to the whole change of the metric, also past saturation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.attribution import ENTRY, gradients_at, summed
from locus.localize.interventions import activations, hook_names, require_direction
from locus.localize.paths import batches


@dataclass(frozen=True)
class IntegratedGradients:
    """Integrated gradients of activations, along one of two straight paths, α from 0 to 1.

    c(u) = Σ_pos,dim (a_u(clean) - a_u(corrupted)) · ∫ ∂m/∂a_u dα

    - over "activations": the hook of u (a layer's heads, key/value groups, neurons, or the output of a block, all
      components of the layer together) goes from its values in one run to those in the other, and all before it is
      the base run. The base run is the corrupted one for "denoising", the clean one for "noising". Complete: over
      all components of a layer, c adds up to m(base run) with the whole layer replaced, minus m(base run), with the
      sign turned for "noising" (not in a mixture of experts, whose metric jumps where a router switches); so c
      estimates `ActivationPatching` of the same direction.
    - over "inputs": the embeddings go from the corrupted prompt's to the clean one's, and all follows. c weighs
      the mean gradient at u with the whole change of u; complete only where u moves in a straight line, as the
      embeddings do. Both directions are the same.

    In units of the metric. Integrals by Gauss-Legendre quadrature. S forward and backward passes over inputs, and S
    for every layer over activations, and two forward passes.

    Sundararajan, Taly & Yan 2017 (arXiv 1703.01365); over inputs as in Hanna, Pezzelle & Belinkov 2024
    (arXiv 2403.17806); over activations as in Marks et al. 2024 (arXiv 2403.19647).

    Attributes:
        over: "activations" or "inputs".
        steps: S, points of the quadrature.
        direction: "denoising" or "noising".
        batch_size: pairs in one pass at the most.
    """

    over: str = "activations"
    steps: int = 10
    direction: str = "denoising"
    batch_size: int = 32
    KINDS: ClassVar[tuple[str, ...]] = ("head", "kv", "neuron", "value", "mlp", "attn")

    def __post_init__(self) -> None:
        if self.over not in ("activations", "inputs"):
            raise ValueError(f"over must be 'activations' or 'inputs', got {self.over!r}")
        _require_steps(self.steps)
        require_direction(self.direction)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        some = batches(pairs, self.batch_size, "integrated gradients" if progress else None)
        return torch.cat([self._some(model, part, components, metric) for part in some])

    def _some(
        self, model: Any, pairs: Any, components: Components, metric: Callable
    ) -> Float[Tensor, "fact component"]:
        base, source = (pairs.corrupted, pairs.clean)
        if self.direction == "noising":
            base, source = source, base
        start, end = (activations(model, tokens, pairs.attention_mask, components) for tokens in (base, source))
        points = gauss_legendre(self.steps)
        if self.over == "activations":
            products = _through_activations(model, base, pairs, components, start, end, metric, points)
        else:
            first, last = (hooks.states(model, tokens, pairs.attention_mask, [ENTRY]) for tokens in (base, source))
            slopes = _mean_gradients(model, base, pairs, list(start), first, last, metric, points)
            products = {name: (end[name] - start[name]) * slopes[name] for name in start}
        sign = 1 if self.direction == "denoising" else -1
        return sign * summed(products, pairs.attention_mask, components)


@dataclass(frozen=True)
class KnowledgeNeurons:
    """Knowledge neurons: integrated gradients of the neurons of a layer, from zero to their values in the clean run.

    c(i) = Σ_pos w_i · (1/S) Σ_k ∂m/∂w_i, all neurons of the layer at k/S of their values, k = 1 … S

    The paper's m is the probability of the answer: pass `metric=locus.probability` for it. Its neurons are scaled,
    and summed, at the position that predicts the answer alone (`at="read"`: at all that are read); `at="all"` takes
    every position. A sum over the layer tends to m - m(those activations of the layer at zero). Corrupted prompts
    are not used; the paper's baseline is zero. In units of the metric.

    One forward pass and S forward and backward passes for every layer.

    Dai et al. 2022 (arXiv 2104.08696), equations 4 and 5; S = 20 and k from 1 are the paper's. Left out: its
    refinement, which keeps neurons that many prompts of one fact share.

    Attributes:
        steps: S.
        at: "read" or "all", the positions.
        batch_size: pairs in one pass at the most.
    """

    steps: int = 20
    at: str = "read"
    batch_size: int = 32
    KINDS: ClassVar[tuple[str, ...]] = ("neuron", "value")

    def __post_init__(self) -> None:
        if self.at not in ("read", "all"):
            raise ValueError(f"at must be 'read' or 'all', got {self.at!r}")
        _require_steps(self.steps)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        some = batches(pairs, self.batch_size, "knowledge neurons" if progress else None)
        return torch.cat([self._some(model, part, components, metric) for part in some])

    def _some(
        self, model: Any, pairs: Any, components: Components, metric: Callable
    ) -> Float[Tensor, "fact component"]:
        end = activations(model, pairs.clean, pairs.attention_mask, components)
        scaled = pairs.attention_mask
        if self.at == "read":
            # Unused columns of `read` hold 0, so they must not unset a position: counted, not scattered.
            scaled = torch.zeros(scaled.shape, dtype=torch.long).scatter_add(1, pairs.read, pairs.read_mask.long()) > 0
        start = {name: act.masked_fill(scaled[..., None].to(act.device), 0) for name, act in end.items()}
        points = [(k / self.steps, 1 / self.steps) for k in range(1, self.steps + 1)]
        products = _through_activations(model, pairs.clean, pairs, components, start, end, metric, points)
        return summed(products, pairs.attention_mask, components)


def gauss_legendre(steps: int) -> list[tuple[float, float]]:
    """Points in [0, 1] and their weights, which add up to 1."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    return [(float(point + 1) / 2, float(weight) / 2) for point, weight in zip(points, weights, strict=True)]


def _mean_gradients(
    model: Any,
    tokens: Tensor,
    pairs: Any,
    names: Sequence[str],
    start: dict[str, Tensor],
    end: dict[str, Tensor],
    metric: Callable,
    points: Sequence[tuple[float, float]],
) -> dict[str, Tensor]:
    """∫ ∂m/∂a dα at the named hooks, the activations of `start` on their way to `end`, all else as in the run."""
    means: dict[str, Tensor] = {}
    for at, weight in points:
        moved = {name: start[name] + at * (end[name] - start[name]) for name in start}
        gradients, _ = gradients_at(model, tokens, pairs, list(names), metric, moved)
        for name in names:
            part = weight * gradients[name]
            means[name] = means[name] + part if name in means else part
    return means


def _through_activations(
    model: Any,
    tokens: Tensor,
    pairs: Any,
    components: Components,
    start: dict[str, Tensor],
    end: dict[str, Tensor],
    metric: Callable,
    points: Sequence[tuple[float, float]],
) -> dict[str, Tensor]:
    """(end - start) · ∫ ∂m/∂a dα at every hook, one layer's alone moved at a time: keys and values together."""
    products: dict[str, Tensor] = {}
    for names in dict.fromkeys(tuple(hook_names(component)) for component in components):
        first, last = ({name: acts[name] for name in names} for acts in (start, end))
        slopes = _mean_gradients(model, tokens, pairs, names, first, last, metric, points)
        products |= {name: (end[name] - start[name]) * slopes[name] for name in names}
    return products


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
