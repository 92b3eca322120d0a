"""Attribution patching: the first-order estimate of activation patching, all components in one backward pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.interventions import activations, gathered, require_direction, sites, targets
from locus.packing import acts_in

ENTRY = "blocks.0.hook_resid_pre"  # the embeddings, positions included
JOINED = 64  # tokens; a pass of so few takes the time to read the weights, whatever their number


@dataclass(frozen=True)
class AttributionPatching:
    """Attribution patching: c(u) = Σ_pos,dim (a_u(clean) - a_u(corrupted)) · ∂m/∂a_u, the gradient at the base run.

    The base run is the corrupted one for "denoising" and the clean one for "noising"; so c(u) estimates
    `ActivationPatching` of the same direction, exactly where the metric is linear in a_u. In units of the metric.
    Two forward passes and one backward, with frozen parameters; of few tokens, both runs in one pass.

    Nanda 2023; Syed et al. 2023 (arXiv 2310.10348); Kramár et al. 2024 (arXiv 2403.00745), equation 3.

    Attributes:
        direction: "denoising" or "noising".
        batch_size: pairs in one pass at the most.
        recompute: go back layer by layer, running each once more, so that the graph of one layer only is kept: up to
            twice as slow, for long prompts and many pairs.
    """

    direction: str = "denoising"
    batch_size: int = 32
    recompute: bool = False
    KINDS: ClassVar[tuple[str, ...]] = ("head", "kv", "neuron", "value", "mlp", "attn")

    def __post_init__(self) -> None:
        require_direction(self.direction)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        parts = [
            self._some(model, pairs[first : first + self.batch_size], components, metric)
            for first in range(0, len(pairs), self.batch_size)
        ]
        return torch.cat(parts)

    def _some(
        self, model: Any, pairs: Any, components: Components, metric: Callable
    ) -> Float[Tensor, "fact component"]:
        denoising = self.direction == "denoising"
        base, source = (pairs.corrupted, pairs.clean) if denoising else (pairs.clean, pairs.corrupted)
        n, sign = len(pairs), 1 if denoising else -1
        if self.recompute:
            return sign * _layer_by_layer(model, base, source, pairs, components, metric)
        if 2 * base.numel() <= JOINED:
            names = sites(components)
            both = pairs[torch.arange(n).repeat(2)]
            slopes, found = gradients_at(model, torch.cat([base, source]), both, names, metric)
            gradients, here = {name: slopes[name][:n] for name in names}, {name: found[name][:n] for name in names}
            other = {name: found[name][n:] for name in names}
        else:
            other = activations(model, source, pairs.attention_mask, components)
            gradients, here = gradients_at(model, base, pairs, list(other), metric)
        products = {name: sign * (other[name] - here[name]) * gradients[name] for name in other}
        return summed(products, pairs.attention_mask, components)


def summed(
    products: dict[str, Tensor], attention_mask: Tensor, components: Components
) -> Float[Tensor, "fact component"]:
    """Contributions at hooks, [fact, pos, …], summed over positions and dimensions to each component's."""
    return gathered({name: _of_parts(name, product, attention_mask) for name, product in products.items()}, components)


def _of_parts(name: str, product: Tensor, attention_mask: Tensor) -> Float[Tensor, "fact index"]:
    """Contributions at one hook, [fact, pos, …], summed to those of each head, neuron or the block."""
    # Activations at padding mean nothing, and may be NaN.
    keep = attention_mask.to(product.device).reshape(*attention_mask.shape, *[1] * (product.ndim - 2))
    product = product.masked_fill(~keep, 0).sum(1)
    if product.ndim == 3:  # heads: over d_head
        return product.sum(-1)
    return product if name.endswith("hook_post") else product.sum(-1, keepdim=True)


def _layer_by_layer(
    model: Any, base: Tensor, source: Tensor, pairs: Any, components: Components, metric: Callable
) -> Float[Tensor, "fact component"]:
    """Σ (a(source) - a(base)) · ∂m/∂a with the graph of one layer at a time, from the last down to the first needed."""
    runs = [hooks.trace(model, tokens, pairs.attention_mask) for tokens in (base, source)]
    rows, every = torch.arange(len(pairs), device=model.device), sites(components)
    sums: dict[str, Tensor] = {}
    with torch.enable_grad(), model.frozen():
        residual = runs[0].inputs[-1].detach().requires_grad_()
        total = metric(hooks.unembed(model, hooks.gather(residual, pairs.read)), targets(pairs)).sum()
        (flow,) = torch.autograd.grad(total, residual)
        for layer in range(len(runs[0].calls) - 1, int(components.layers.min()) - 1, -1):
            names = [name for name in every if acts_in(layer, name)]
            residual = runs[0].inputs[layer].detach().requires_grad_()
            with hooks.capture(model, names) as here:
                out = runs[0].block(layer, residual, rows)
            *slopes, flow = torch.autograd.grad(out, [*(here[name] for name in names), residual], flow)
            with torch.no_grad(), hooks.capture(model, names) as there:
                runs[1].block(layer, runs[1].inputs[layer], rows)
            for name, slope in zip(names, slopes, strict=True):
                product = (there[name] - here[name].detach()) * slope
                sums[name] = _of_parts(name, product, pairs.attention_mask)
    return gathered(sums, components)


def gradients_at(
    model: Any,
    tokens: Tensor,
    pairs: Any,
    names: list[str],
    metric: Callable,
    moved: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """∂m/∂a and a, at the named hooks, of each pair's metric, the activations of `moved` replaced (None: kept,
    as constants). The parameters are frozen, so the backward pass is about one forward pass; rows do not mix, so one
    backward of the sum gives every pair's own gradient."""

    def leaf(value: Tensor | None) -> hooks.Edit:
        return lambda activation: (activation if value is None else value).detach().requires_grad_()

    with (
        torch.enable_grad(),
        model.frozen(),
        hooks.edits(model, [(name, leaf(value)) for name, value in {ENTRY: None, **moved}.items()]),
        hooks.capture(model, names) as found,
        hooks.read_only(model, pairs.read),
    ):
        logits = model.logits(tokens, pairs.attention_mask)
        total = metric(logits, targets(pairs)).sum()
        if not total.requires_grad:
            raise ValueError("the metric has no gradient: it does not depend on the logits, or takes them as numbers")
        gradients = torch.autograd.grad(total, [found[name] for name in names])
    return (
        dict(zip(names, gradients, strict=True)),
        {name: act.detach() for name, act in found.items()},
    )
