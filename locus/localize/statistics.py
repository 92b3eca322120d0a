"""Localizers that look at activations only, or at nothing: the baselines that every comparison keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from locus.components import Components
from locus.localize.interventions import ALL_KINDS, activations, gathered


@dataclass(frozen=True)
class Activations:
    """How strongly a component writes on the clean prompts, whether or not the answer depends on it.

    neuron i:          (1/T) Σ_t |h_i,t| · ||v_i||      with v_i its output weights   (`form="mean_abs"`)
                       |(1/T) Σ_t h_i,t| · ||v_i||      as in the code of the paper   (`form="abs_mean"`)
    block:             (1/T) Σ_t ||output_t||           or the norm of the mean output

    Over the T tokens of the prompt. Never negative. Chang, Thomason & Jia 2024 (arXiv 2311.09060), section 3.

    Attributes:
        form: "mean_abs" or "abs_mean".
    """

    form: str = "mean_abs"
    KINDS: ClassVar[tuple[str, ...]] = ("neuron", "value", "mlp", "attn")
    UNIT: ClassVar[str] = "size of what is written"

    def __post_init__(self) -> None:
        if self.form not in ("mean_abs", "abs_mean"):
            raise ValueError(f"form must be 'mean_abs' or 'abs_mean', got {self.form!r}")

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        mask = pairs.attention_mask.to(model.device)
        tokens = mask.sum(1)[:, None]
        found = activations(model, pairs.clean, pairs.attention_mask, components)
        strength: dict[str, Tensor] = {}
        for name, act in found.items():
            act = act.masked_fill(~mask[:, :, None], 0)
            block = not name.endswith("hook_post")
            if self.form == "mean_abs":
                size = act.norm(dim=-1, keepdim=True) if block else act.abs()
                strength[name] = size.sum(1) / tokens
            else:
                mean = act.sum(1) / tokens
                strength[name] = mean.norm(dim=-1, keepdim=True) if block else mean.abs()
            if not block:
                layer = int(name.split(".")[1])
                strength[name] = strength[name] * model.bridge.blocks[layer].mlp.W_out.norm(dim=-1)
        return gathered(strength, components)


@dataclass(frozen=True)
class Random:
    """Uniform random scores, the same for every fact: the control that a localizer must beat.

    Attributes:
        seed: of the scores.
    """

    seed: int = 0
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS
    UNIT: ClassVar[str] = "random number"

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        values = torch.rand(len(components), generator=torch.Generator().manual_seed(self.seed))
        return values.expand(len(pairs), -1)
