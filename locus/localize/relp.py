"""Relevance patching: attribution patching with gradients that do not saturate."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.attribution import AttributionPatching


@dataclass(frozen=True)
class RelP(AttributionPatching):
    """Relevance patching: c(u) = Σ_pos,dim (a_u(clean) - a_u(corrupted)) · r_u, with r_u in place of ∂m/∂a_u.

    r is the gradient of the base run with three of its rules replaced (layer-wise relevance propagation):

    - norms: 1/σ is constant;
    - activation functions: the secant act(x)/x in place of the slope act'(x);
    - gated products act(g) · u: half of it through each factor.

    Values are as they were. Two forward passes and one backward, as attribution patching, whose other attributes and
    sign it has. The experts of a mixture keep their gradients; only norms are replaced there. In units of the metric.

    Rezaei Jafari et al. 2025 (arXiv 2508.21258). Left out: constant attention patterns, off by default there.
    """

    def _some(self, model: Any, pairs: Any, components: Components, metric: Any) -> Float[Tensor, "fact component"]:
        with constant_scales(model), secants(model):
            return super()._some(model, pairs, components, metric)


@contextmanager
def constant_scales(model: Any) -> Iterator[None]:
    """Within the block no gradient goes through the scale of any norm, so that norms are linear. Values stay."""
    norms = [name.removesuffix(".hook_scale") for name in model.bridge.hook_dict if name.endswith(".hook_scale")]

    def linear(norm: str) -> hooks.Edit:
        module = model.bridge.get_submodule(norm)

        def edit(normed: Tensor) -> Tensor:
            x, scale = found[f"{norm}.hook_in"], found[f"{norm}.hook_scale"].detach()
            scale = scale.reshape(*x.shape[:-1], 1)  # OPT norms a list of tokens
            centred = x if module.uses_rms_norm else x - x.mean(-1, keepdim=True)
            straight = (centred / scale * (module.weight + module.uses_weight_offset)).to(normed.dtype)
            return normed.detach() + straight - straight.detach()

        return edit

    inputs = [f"{norm}.{end}" for norm in norms for end in ("hook_in", "hook_scale")]
    with hooks.capture(model, inputs) as found, hooks.edits(model, [(f"{n}.hook_out", linear(n)) for n in norms]):
        yield


@contextmanager
def secants(model: Any) -> Iterator[None]:
    """Within the block, gradients through neurons are secants from zero, shared by the factors of a gated product."""
    names = set(model.bridge.hook_dict)
    neurons = [f"blocks.{i}.mlp" for i in range(model.cfg.n_layers) if f"blocks.{i}.mlp.out.hook_in" in names]
    inputs = [f"{mlp}.{end}" for mlp in neurons for end in ("hook_pre", "hook_pre_linear") if f"{mlp}.{end}" in names]

    def secant(mlp: str) -> hooks.Edit:
        def edit(post: Tensor) -> Tensor:
            factors = [found[name] for name in inputs if name.startswith(mlp + ".")]
            value = post.detach()
            through = [x * (value / x.detach()).masked_fill(x == 0, 0) / len(factors) for x in factors]
            total = sum(through[1:], through[0])
            return value + total - total.detach()

        return edit

    with hooks.capture(model, inputs) as found, hooks.edits(model, [(f"{m}.hook_post", secant(m)) for m in neurons]):
        yield
