"""AtP*: attribution patching of queries and keys that sees through a saturated softmax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.attribution import gradients_at
from locus.localize.interventions import require_direction
from locus.localize.paths import batches


@dataclass(frozen=True)
class AtPStar:
    """AtP*: what a head's queries and keys do to where it looks, to first order in the attention pattern P only.

    c(h) = Σ_t (P(q_t from the other run) - P) · ∂m/∂P  +  Σ_s (P(k_s from the other run) - P) · ∂m/∂P

    Scored are the query nodes and the key nodes of a head, one position patched at a time with the softmax
    recomputed, summed over positions; what its values carry is not (the paper leaves values and outputs to
    `AttributionPatching`, and so does this). Where heads share keys, each has its own reading of them.

    GradDrop (`drop=True`): the mean over layers ℓ of |c(h)| with no gradient through the outputs of layer ℓ, so
    that direct and indirect effects do not cancel; L backward passes, scaled by 1/(L - 1); the sign is lost.

    The base run is the corrupted one for "denoising", the clean one for "noising". In units of the metric.

    Kramár et al. 2024 (arXiv 2403.00745), sections 3.1.1 and 3.1.2.

    Attributes:
        drop: whether to use GradDrop.
        direction: "denoising" or "noising".
        batch_size: pairs in one pass at the most.
    """

    drop: bool = False
    direction: str = "denoising"
    batch_size: int = 32
    KINDS: ClassVar[tuple[str, ...]] = ("head",)
    UNIT: ClassVar[str] = "metric, by queries and keys only"

    def __post_init__(self) -> None:
        require_direction(self.direction)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        if self.drop and model.cfg.n_layers < 2:
            raise ValueError("GradDrop leaves out one layer and needs at least 2; take AtPStar(drop=False)")
        some = batches(pairs, self.batch_size, "AtP*" if progress else None)
        return torch.cat([self._some(model, part, components, metric) for part in some])

    def _some(
        self, model: Any, pairs: Any, components: Components, metric: Callable
    ) -> Float[Tensor, "fact component"]:
        base, source = pairs.corrupted, pairs.clean
        if self.direction == "noising":
            base, source = source, base
        layers = sorted({component.layer for component in components})
        changes = {f"blocks.{i}.attn.hook_pattern": pattern_change(model, base, source, pairs, i) for i in layers}
        sign = 1 if self.direction == "denoising" else -1

        def scores() -> Tensor:
            gradients, _ = gradients_at(model, base, pairs, list(changes), metric)
            # Rows of padding have no change; their gradients may be NaN.
            sums = {
                layer: (change * gradients[name].masked_fill(change == 0, 0)).sum((2, 3))
                for layer, (name, change) in zip(layers, changes.items(), strict=True)
            }
            return sign * torch.stack([sums[c.layer][:, c.index] for c in components], dim=1)

        if not self.drop:
            return scores()
        total = []
        for layer in range(model.cfg.n_layers):
            outputs = [f"blocks.{layer}.{name}" for name in ("hook_attn_out", "hook_mlp_out")]
            with hooks.edits(model, [(name, _without_gradient) for name in outputs]):
                total.append(scores().abs())
        return torch.stack(total).sum(0) / (model.cfg.n_layers - 1)


def pattern_change(
    model: Any, base: Tensor, source: Tensor, pairs: Any, layer: int
) -> Float[Tensor, "fact head query key"]:
    """The changes of the attention pattern, each query and each key alone from the other run, added up.

    A query changes its own row of the pattern only, so all of them are patched in one pass of the block; keys
    change all rows, so each position takes a pass. The model's own block does both: rotation, masks, caps of scores.
    """
    query, key, pattern = (f"blocks.{layer}.attn.{name}" for name in ("hook_q", "hook_k", "hook_pattern"))
    recorded = hooks.trace(model, base, pairs.attention_mask)
    others = hooks.states(model, source, pairs.attention_mask, [query, key])
    rows = torch.arange(len(base), device=model.device)
    mask = pairs.attention_mask.to(model.device)

    def found(name: str, edit: hooks.Edit) -> Tensor:
        with torch.no_grad(), hooks.edits(model, [(name, edit)]), hooks.capture(model, [pattern]) as captured:
            recorded.block(layer, recorded.inputs[layer], rows)
        return captured[pattern]

    before = found(query, lambda act: act)
    change = found(query, lambda act: others[query]) - before
    for position in range(base.shape[1]):

        def put(act: Tensor, position: int = position) -> Tensor:
            act = act.clone()
            act[:, position] = others[key][:, position]
            return act

        change = change + (found(key, put) - before).masked_fill(~mask[:, position, None, None, None], 0)
    return change.masked_fill(~mask[:, None, :, None], 0)


def _without_gradient(activation: Tensor) -> Tensor:
    """Equal, and a gradient of zero: a tensor cut from the graph would have none to ask for."""
    return activation.detach() + 0 * activation
