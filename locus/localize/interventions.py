"""Exact interventions: replace a component's activation and measure the metric."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locus import hooks, neurons
from locus.components import Component, Components, site
from locus.metrics import Targets
from locus.sweeps import MAX_TOKENS, Starter, ablated, say_once, sweep, unchanged

ALL_KINDS = ("head", "kv", "neuron", "value", "mlp", "attn", "expert")
POSITIONS = ("all", "subject", "last subject", "last")


@dataclass(frozen=True)
class ActivationPatching:
    """Activation patching, exact: one intervention a component, at all positions.

    denoising:  m(corrupted, a_u ← a_u(clean)) - m(corrupted)     is u enough to restore the answer?
    noising:    m(clean) - m(clean, a_u ← a_u(corrupted))         is u needed for the answer?

    In units of the metric. Vig et al. 2020 (arXiv 2004.12265); Heimersheim & Nanda 2024 (arXiv 2404.15255).

    Attributes:
        direction: "denoising" or "noising".
        max_tokens: tokens in one forward pass at the most.
    """

    direction: str = "denoising"
    max_tokens: int = MAX_TOKENS
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS

    def __post_init__(self) -> None:
        require_direction(self.direction)

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        denoising = self.direction == "denoising"
        base, source = (pairs.corrupted, pairs.clean) if denoising else (pairs.clean, pairs.corrupted)
        replacement = activations(model, source, pairs.attention_mask, components)
        label = f"activation patching, {self.direction}" if progress else None
        change = intervene(model, pairs, base, components, replacement, metric, self.max_tokens, label)
        return change if denoising else -change


@dataclass(frozen=True)
class Knockout:
    """Knockout of one component at a time in the clean run: m(clean) - m(clean, a_u ← baseline).

    The baseline is 0, the mean of u's activation over the tokens of all clean prompts, or u's activation on the
    clean prompt of another fact of as many tokens ("resample"). In units of the metric. Exact also for neurons, whose
    removal is a change of rank one behind the MLP, so that no MLP is run for it.

    Attributes:
        ablation: "zero", "mean" or "resample".
        seed: of the permutation of facts, for "resample".
        positions: where u is knocked out: at "all" tokens, those of the "subject", the "last subject" one, or the
            "last" one of the prompt, from which the answer's first token is read.
        max_tokens: tokens in one forward pass at the most.
    """

    ablation: str = "zero"
    seed: int = 0
    positions: str = "all"
    max_tokens: int = MAX_TOKENS
    KINDS: ClassVar[tuple[str, ...]] = ALL_KINDS

    def __post_init__(self) -> None:
        if self.ablation not in ("zero", "mean", "resample"):
            raise ValueError(f"ablation must be 'zero', 'mean' or 'resample', got {self.ablation!r}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be {', '.join(map(repr, POSITIONS))}, got {self.positions!r}")

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        clean = activations(model, pairs.clean, pairs.attention_mask, components)
        replacement = {
            name: ablated(act, pairs.attention_mask, self.ablation, self.seed) for name, act in clean.items()
        }
        label = f"knockout, {self.ablation}" if progress else None
        at = _tokens_at(pairs, self.positions)
        return -intervene(model, pairs, pairs.clean, components, replacement, metric, self.max_tokens, label, at)


def last_subject(pairs: Any) -> Int[Tensor, " fact"]:
    """Position of the last token of each subject."""
    return (pairs.subject * torch.arange(1, pairs.subject.shape[1] + 1, device=pairs.subject.device)).argmax(1)


def _tokens_at(pairs: Any, positions: str) -> Bool[Tensor, "fact pos"]:
    if positions in ("all", "subject"):
        return pairs.attention_mask if positions == "all" else pairs.subject
    token = pairs.read[:, 0] if positions == "last" else last_subject(pairs)
    return torch.zeros_like(pairs.attention_mask).scatter(1, token[:, None], True)


def require_direction(direction: str) -> None:
    if direction not in ("denoising", "noising"):
        raise ValueError(f"direction must be 'denoising' or 'noising', got {direction!r}")


def hook_names(component: Component) -> list[str]:
    """The hooks at which a component's activation is replaced: keys and values both, for a key/value group."""
    name = site(component)
    return [name, name.replace("hook_v", "hook_k")] if component.kind == "kv" else [name]


def sites(components: Iterable[Component]) -> list[str]:
    """The hooks of all of them, each once."""
    some = {(component.layer, component.kind): component for component in components}
    return sorted({name for component in some.values() for name in hook_names(component)})


Places = list[tuple[str, list[int], Int[Tensor, " _"] | None]]


def places(components: Iterable[Component]) -> Places:
    """Hook, which of the components act there, and their indices there (None for a whole block)."""
    components = list(components)
    # Apart by kind: a neuron and its value vector are one activation, and both factors count.
    together: dict[tuple[int, str], list[int]] = {}
    for c, component in enumerate(components):
        together.setdefault((component.layer, component.kind), []).append(c)
    found: Places = []
    for members in together.values():
        first = components[members[0]]
        index = None if first.index is None else torch.tensor([components[c].index for c in members])
        found += [(name, members, index) for name in hook_names(first)]
    return found


def gathered(
    parts: dict[str, Float[Tensor, "fact index"]], components: Iterable[Component]
) -> Float[Tensor, "fact component"]:
    """Numbers by hook as a column a component, summed over its hooks."""
    components = list(components)
    first = next(iter(parts.values()))
    columns = first.new_zeros(len(first), len(components))
    for name, members, index in places(components):
        columns[:, members] += parts[name] if index is None else parts[name][:, index.to(first.device)]
    return columns


def activations(
    model: Any, tokens: Tensor, attention_mask: Tensor, components: Components
) -> dict[str, Float[Tensor, "fact pos *part"]]:
    """The activations of all sites of some components; a router's flat axis is split into fact and position."""
    names = sites(components)
    nowhere = torch.zeros(len(tokens), 0, dtype=torch.long)  # no logits are needed
    with torch.no_grad(), hooks.capture(model, names) as found, hooks.read_only(model, nowhere):
        model.logits(tokens, attention_mask)
    return {name: act.reshape(*tokens.shape, *act.shape[-1:]) if act.ndim == 2 else act for name, act in found.items()}


def targets(pairs: Any) -> Targets:
    return Targets(answer=pairs.answer, distractor=pairs.distractor, mask=pairs.read_mask)


def per_example(metric: Callable) -> Callable:
    """The metric, refusing a result that is not one value a row: it would be broadcast to all facts."""

    @functools.wraps(metric)
    def checked(logits: Tensor, targets: Targets) -> Tensor:
        value = metric(logits, targets)
        if not isinstance(value, Tensor) or value.shape != logits.shape[:1]:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"the metric {getattr(metric, '__name__', metric)!r} returned {got}; expected one value for each of "
                f"{len(logits)} rows: average over tokens, not over rows"
            )
        return value

    return checked


def intervene(
    model: Any,
    pairs: Any,
    base: Tensor,
    components: Components,
    replacement: dict[str, Tensor],
    metric: Callable,
    max_tokens: int,
    progress: str | None,
    at: Bool[Tensor, "fact pos"] | None = None,
) -> Float[Tensor, "fact component"]:
    """m(base run with the component's activation replaced) - m(base run), for each component alone.

    at: the tokens at which it is replaced; by default all. Not at padding, which no token sees.
    """
    alone = [c for c, component in enumerate(components) if component.kind in ("neuron", "value")]
    layers = sorted({components[c].layer for c in alone})
    names = list(dict.fromkeys([*replacement, *neurons.sites(layers)]))
    recorded = hooks.trace(model, base, pairs.attention_mask, names)
    at = (pairs.attention_mask if at is None else at & pairs.attention_mask).to(model.device)
    replacement = {
        name: torch.where(at.reshape(*at.shape, *[1] * (new.ndim - 2)), new, recorded.site(name))
        for name, new in replacement.items()
    }
    if alone and not neurons.adds_up(recorded, layers):
        say_once(f"{model.name}: a neuron's part of its block's output is not known, so its MLP is run for each")
        alone = []
    others = sorted(set(range(len(components))) - set(alone))
    read, answers = pairs.read.to(model.device), targets(pairs)
    before = metric(unchanged(recorded, read), answers)
    change = torch.zeros(len(pairs), len(components), dtype=before.dtype, device=before.device)
    for members, cells in ((alone, neurons.rank_one), (others, _edited)):
        if not members:
            continue
        begin, start = cells(recorded, [components[c] for c in members], replacement)
        for some, logits in sweep(recorded, begin, start, read, max_tokens=max_tokens, progress=progress):
            for c, cell_logits in zip(some, logits, strict=True):
                change[:, members[c]] = metric(cell_logits, answers) - before
    return change


def _edited(
    recorded: hooks.Trace, components: Sequence[Component], replacement: dict[str, Tensor]
) -> tuple[list[int], Starter]:
    """Cells of `sweeps.sweep`, one a component, that begin in its layer: their layers and rows."""
    n = len(recorded)

    def start(some: list[int]) -> hooks.Start:
        chosen = [components[c] for c in some]
        edits = {
            name: replace_parts(chosen, [name in hook_names(c) for c in chosen], replacement[name], n)
            for name in dict.fromkeys(name for c in chosen for name in hook_names(c))
        }
        return hooks.Start(torch.arange(n).repeat(len(some)), edits=edits)

    return [component.layer for component in components], start


def replace_parts(components: list[Component], applies: list[bool], replacement: Tensor, n: int) -> hooks.Edit:
    """An edit of the rows of several components, n rows each: each gets its own component's part replaced."""

    def edit(activation: Tensor) -> Tensor:
        shape = activation.shape
        cells = activation.clone().reshape(len(components), *replacement.shape)
        for cell, component, here in zip(cells, components, applies, strict=True):
            if not here:
                continue
            if component.index is None:
                cell.copy_(replacement)
            elif component.kind in ("head", "kv"):
                cell[:, :, component.index] = replacement[:, :, component.index]
            else:
                cell[..., component.index] = replacement[..., component.index]
        return cells.reshape(shape)

    return edit
