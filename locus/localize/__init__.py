"""Localizers: how much each component of a model matters for some facts.

A method is one frozen dataclass whose `score` returns Float["fact component"] with one sign for all:
**positive = removing the component lowers the metric**.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from locus.components import Components
from locus.cost import passes
from locus.facts import ContrastPairs
from locus.localize.atp_star import AtPStar
from locus.localize.attention import AttentionKnockout, attention_curve
from locus.localize.attribution import AttributionPatching
from locus.localize.ensemble import MeanRank
from locus.localize.integrated import IntegratedGradients, KnowledgeNeurons
from locus.localize.interventions import ActivationPatching, Knockout, per_example
from locus.localize.learned import HardConcrete, Slimming
from locus.localize.lookup import FactLookup, Probing, fact_lookup, probe_curve
from locus.localize.paths import EAP, PathPatching, localize_edges, path_patch
from locus.localize.readouts import DirectLogits, logit_lens, logit_sum
from locus.localize.relp import RelP
from locus.localize.statistics import Activations, Random
from locus.localize.tracing import CausalTracing, causal_trace
from locus.localize.weights import (
    SNIP,
    WAGLE,
    ByEntries,
    Fisher,
    GradientSaliency,
    Magnitude,
    MemFlex,
    Wanda,
    given,
    localize_weights,
)
from locus.metrics import logit_difference
from locus.scores import Scores

__all__ = [
    "EAP",
    "METHODS",
    "SNIP",
    "WAGLE",
    "ActivationPatching",
    "Activations",
    "AtPStar",
    "AttentionKnockout",
    "AttributionPatching",
    "CausalTracing",
    "DirectLogits",
    "FactLookup",
    "Fisher",
    "GradientSaliency",
    "HardConcrete",
    "IntegratedGradients",
    "Knockout",
    "KnowledgeNeurons",
    "Magnitude",
    "MeanRank",
    "MemFlex",
    "Method",
    "PathPatching",
    "Probing",
    "Random",
    "RelP",
    "Slimming",
    "Wanda",
    "attention_curve",
    "causal_trace",
    "fact_lookup",
    "given",
    "localize",
    "localize_weights",
    "localize_edges",
    "logit_lens",
    "logit_sum",
    "path_patch",
    "probe_curve",
]


@runtime_checkable
class Method(Protocol):
    """What a localizer is."""

    KINDS: ClassVar[tuple[str, ...]]

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]: ...


METHODS: tuple[type, ...] = (
    ActivationPatching,
    AttributionPatching,
    RelP,
    AtPStar,
    IntegratedGradients,
    KnowledgeNeurons,
    Knockout,
    CausalTracing,
    AttentionKnockout,
    EAP,
    PathPatching,
    FactLookup,
    Probing,
    DirectLogits,
    Activations,
    Random,
    Slimming,
    HardConcrete,
    GradientSaliency,
    SNIP,
    Fisher,
    WAGLE,
    MemFlex,
    Magnitude,
    Wanda,
    MeanRank,
)


def name_of(method: type) -> str:
    """What the command line calls a method: `AtPStar` is atp-star."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", method.__name__).lower()


def localize(
    model: Any,
    pairs: Any,
    method: Method,
    *,
    components: str | Components = "neuron",
    metric: Callable = logit_difference,
    progress: bool = True,
) -> Scores:
    """Score components by how much they matter for the facts of `pairs`.

    Args:
        model: a `HookedModel`.
        pairs: `ContrastPairs`, clean and corrupted prompts of the facts.
        method: e.g. `AttributionPatching()`; each says in its docstring what it computes.
        components: a kind ("head", "neuron", "mlp", …) or a selection of the model's components.
        metric: per-example function of logits, see `locus.metrics`.
        progress: show a bar for long sweeps.

    Returns:
        Scores, [fact, component], in the units that the method says; positive = it supports the answer.

    Raises:
        ValueError: the method has no meaning for a kind of component (the message lists those it has), or the
            components belong to another model.
    """
    if isinstance(method, type) or not isinstance(method, Method):
        raise ValueError(f"{method!r} is not a method that scores components; give one, e.g. AttributionPatching()")
    chosen = model.components(components) if isinstance(components, str) else components
    if chosen.model != model.fingerprint:
        raise ValueError(f"the components belong to model {chosen.model}, not to {model.name} ({model.fingerprint})")
    if not isinstance(pairs, ContrastPairs):
        raise ValueError(
            f"localize takes contrast pairs and got {type(pairs).__name__}; make some: facts.contrast_pairs(model)"
        )
    if not len(pairs):
        raise ValueError("there are no contrast pairs to localize with; take at least one")
    if not len(chosen):
        raise ValueError("there are no components to score; take at least one")
    if model.bridge.original_model.training:
        raise ValueError(f"{model.name} is in training mode, in which a pass is random; call model.eval() first")
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode() forbids gradients, which some methods need; use torch.no_grad()")
    require_kinds(method, chosen.kinds)
    for field in ("batch_size", "max_tokens"):
        if (value := getattr(method, field, 1)) < 1:
            raise ValueError(f"{type(method).__name__} got {field}={value}; it must be 1 or more")
    with passes(model, pairs.clean.shape[1]) as cost:
        values = method.score(model, pairs, chosen, per_example(metric), progress)
    name, facts = getattr(metric, "__name__", str(metric)), tuple(fact.prompt for fact in pairs.facts)
    return Scores(values.detach().float().cpu(), chosen, method, name, facts, (cost.forward, cost.backward))


def require_kinds(method: Method, kinds: Iterable[str]) -> None:
    """ValueError unless the method scores these kinds of components, and single weights ("weight") if asked for."""
    if "weight" in kinds and not isinstance(method, ByEntries):
        raise ValueError(
            f"{type(method).__name__} scores no single weights, in which the facts are planted; take localizers that "
            "do (GradientSaliency, SNIP, Fisher, WAGLE, Magnitude, Wanda), or leave top and bottom out of the arms."
        )
    if unsupported := set(kinds) - {"weight", *method.KINDS}:
        raise ValueError(
            f"{type(method).__name__} does not score components of kind {min(unsupported)!r}; "
            f"it scores {', '.join(method.KINDS)}"
        )
