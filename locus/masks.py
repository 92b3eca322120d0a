"""Masks: which components, or which parameter entries, **may change**. `True` = may change, everywhere."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locus.components import Components, parameter_mask
from locus.entries import (
    MATCHES,
    Overlap,
    ParameterMask,
    entries_allowed,
    generator,
    joined_recipe,
    overlap,
    pack,
    say,
    unpack,
)
from locus.scores import (
    Scores,
    components_from_record,
    components_record,
    method_record,
    read_tensors,
    require_same,
    write_tensors,
)

# Kinds of components of which one is a part of the other.
OVERLAPPING = (
    *(("mlp", "neuron"), ("mlp", "value"), ("neuron", "value"), ("mlp", "expert")),
    *(("attn", "head"), ("attn", "kv")),
)


@dataclass(frozen=True, eq=False)
class Mask:
    """The components that may change, out of `components`.

    A budget is a fraction of the **parameters** of `components`; a mask never exceeds it, and the masks of
    one ranking are nested in the budget.

    selected: True = may change
    recipe: how it was made: method, facts, seed, budget, fingerprint of the model
    """

    components: Components
    selected: Bool[Tensor, " component"]
    recipe: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.selected.dtype != torch.bool or tuple(self.selected.shape) != (len(self.components),):
            raise ValueError(
                f"Mask got `selected` of shape {tuple(self.selected.shape)} and dtype {self.selected.dtype}, "
                f"expected torch.bool of shape ({len(self.components)},): one entry a component."
            )
        kinds = set(self.components.kinds)
        for whole, part in OVERLAPPING:
            if {whole, part} <= kinds:
                raise ValueError(
                    f"Mask got components of the kinds {whole} and {part}, which share parameters, so a budget would "
                    "count them twice; take one kind, or join what mask.materialize(model) makes of each."
                )

    @classmethod
    def top(cls, scores: Scores, budget: float, *, by: str = "signed") -> "Mask":
        """The components with the largest mean score, within the budget.

        by: "signed" ranks by the mean score (what supports the facts most), "absolute" by its absolute value.
        Ties are broken by the order of the components.
        """
        return cls._ranked(scores, budget, by, "top", descending=True)

    @classmethod
    def bottom(cls, scores: Scores, budget: float, *, by: str = "signed") -> "Mask":
        """The components with the smallest mean score, within the budget.

        by: "signed" (default) takes the most negative scores, so components that work *against* the facts;
        "absolute" takes the scores nearest 0, the components that matter least.
        """
        return cls._ranked(scores, budget, by, "bottom", descending=False)

    @classmethod
    def _ranked(cls, scores: Scores, budget: float, by: str, select: str, *, descending: bool) -> "Mask":
        if by not in ("signed", "absolute"):
            raise ValueError(f'Mask.{select} got by={by!r}; expected "signed" or "absolute".')
        mean = scores.mean() if by == "signed" else scores.mean().abs()
        order = torch.argsort(mean, descending=descending, stable=True)
        components = scores.components
        recipe = {
            "method": repr(scores.method),
            "metric": scores.metric,
            "select": select,
            "by": by,
            "facts": list(scores.facts) or scores.values.shape[0],
            "seed": (method_record(scores.method)[1] or {}).get("seed"),
            "budget": float(budget),
            "model": components.model,
        }
        return cls(components, _prefix(components, order, budget, f"Mask.{select}"), recipe)

    @classmethod
    def random(
        cls,
        components: Components | None = None,
        *,
        budget: float | None = None,
        like: "Mask | None" = None,
        match: str = "layer",
        disjoint_from: "Mask | None" = None,
        seed: int = 0,
    ) -> "Mask":
        """A random mask: of a budget of `components`, or with the parameter counts of `like`.

        like, match="layer": as many components of each size as `like` has in each layer and kind, so that the
            parameter count is exactly equal per layer and kind
        like, match="uniform": the same per kind only, in any layer
        disjoint_from: choose none of that mask's components
        """
        rng = generator(seed)
        if like is not None and components is None and budget is None:
            return _draws(like, 1, match=match, exclude=disjoint_from, rng=rng, recipe={"seed": seed})[0]
        if like is not None or components is None or budget is None:
            raise ValueError(
                "Mask.random takes either components and budget=, or like=; for instance "
                "Mask.random(model.components('neuron'), budget=0.05) or Mask.random(like=mask)."
            )
        free = torch.ones(len(components), dtype=torch.bool)
        if disjoint_from is not None:
            require_same(components, disjoint_from.components, "Mask.random(disjoint_from=)")
            free = ~disjoint_from.selected
        order = torch.as_tensor(rng.permutation(free.nonzero().flatten().numpy()))
        recipe = {"method": "random", "budget": float(budget), "seed": seed, "model": components.model}
        if disjoint_from is not None:
            recipe["disjoint_from"] = disjoint_from.recipe
        return cls(components, _prefix(components, order, budget, "Mask.random"), recipe)

    @classmethod
    def full(cls, components: Components) -> "Mask":
        """All of the components."""
        selected = torch.ones(len(components), dtype=torch.bool)
        return cls(components, selected, {"method": "full", "budget": 1.0, "model": components.model})

    @staticmethod
    def from_tensors(tensors: Mapping[str, Any], model: Any = None) -> ParameterMask:
        """`ParameterMask.from_tensors`: masks of parameter entries that were made elsewhere."""
        return ParameterMask.from_tensors(tensors, model)

    @staticmethod
    def from_wagle(path: str | Path, model: Any = None) -> ParameterMask:
        """`ParameterMask.from_wagle`: a mask file of WAGLE."""
        return ParameterMask.from_wagle(path, model)

    def __len__(self) -> int:
        """How many components may change."""
        return int(self.selected.sum())

    @property
    def n_parameters(self) -> int:
        """How many parameters the selected components own."""
        return int(self.components.sizes[self.selected].sum())

    @property
    def labels(self) -> tuple[str, ...]:
        """The selected components, as the field writes them: ("L0H3", "L1H2")."""
        return tuple(str(self.components.items[i]) for i in self.selected.nonzero().flatten().tolist())

    def __repr__(self) -> str:
        total = int(self.components.sizes.sum())
        share = self.n_parameters / total if total else 0.0
        return (
            f"Mask({len(self):,} of {len(self.components):,} components, {self.n_parameters:,} parameters = "
            f"{share:.2%}, {say(self.recipe)})"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from locus.view import mask

        return mask(self)._repr_mimebundle_()

    def __invert__(self) -> "Mask":
        recipe = {"method": "~", "of": [self.recipe], "model": self.components.model}
        return Mask(self.components, ~self.selected, recipe)

    def __and__(self, other: "Mask") -> "Mask":
        return self._combine(other, "&", lambda a, b: a & b)

    def __or__(self, other: "Mask") -> "Mask":
        return self._combine(other, "|", lambda a, b: a | b)

    def __sub__(self, other: "Mask") -> "Mask":
        return self._combine(other, "-", lambda a, b: a & ~b)

    def _combine(self, other: "Mask", symbol: str, join: Callable) -> "Mask":
        if not isinstance(other, Mask):
            raise ValueError(
                f"Mask {symbol} {type(other).__name__}: expected another Mask; to join with a mask of "
                "parameter entries, use mask.materialize(model)."
            )
        require_same(self.components, other.components, f"Mask {symbol} Mask")
        recipe = joined_recipe(symbol, self.recipe, other.recipe) | {"model": self.components.model}
        return Mask(self.components, join(self.selected, other.selected), recipe)

    def overlap(self, other: "Mask") -> Overlap:
        """Shared parameters over parameters in either (Jaccard), and over those of this mask (share)."""
        return overlap((self & other).n_parameters, self.n_parameters, other.n_parameters)

    def materialize(self, model: Any) -> ParameterMask:
        """The parameter entries of the selected components, as full-shape masks of this very model."""
        tensors = parameter_mask(model, self.components, self.selected)
        return ParameterMask(tensors, self.recipe | {"components": len(self), "model": model.fingerprint})

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: the selection bit-packed, labels and recipe in its metadata."""
        record = {"recipe": self.recipe, **components_record(self.components)}
        tensors = {"selected": pack(self.selected), "sizes": self.components.sizes}
        return write_tensors(path, tensors, kind="mask", record=record)

    @classmethod
    def load(cls, path: str | Path) -> "Mask":
        """Read what `save` wrote."""
        tensors, record = read_tensors(path, kind="mask")
        components = components_from_record(record, tensors["sizes"])
        return cls(components, unpack(tensors["selected"], [len(components)]), record["recipe"])


def controls(mask: Mask, n: int = 20, *, match: str = "layer", disjoint: bool = False, seed: int = 0) -> list[Mask]:
    """n random masks with the parameter counts of `mask`, different from it and from each other.

    The first draws of one seed are the same for every n.

    match: "layer" keeps the parameter count per layer and kind, "uniform" per kind
    disjoint: draw only from components that are not in `mask`
    """
    if n < 1:
        raise ValueError(f"controls got n={n}; expected at least one draw.")
    exclude = mask if disjoint else None
    rng = generator(seed)
    return _draws(mask, n, match=match, exclude=exclude, rng=rng, recipe={"seed": seed})


def _draws(
    like: Mask, n: int, *, match: str, exclude: Mask | None, rng: np.random.Generator, recipe: dict
) -> list[Mask]:
    """Random masks, all different, with the component counts of `like` per (layer,) kind and size.

    Matching by size too makes the parameter counts equal exactly, whatever the sizes are.
    """
    if match not in MATCHES:
        raise ValueError(f"random controls got match={match!r}; expected one of {', '.join(MATCHES)}.")
    if not len(like):
        raise ValueError("random controls got a mask that selects nothing; there is nothing to match.")
    components = like.components
    free = torch.ones(len(components), dtype=torch.bool)
    if exclude is not None:
        require_same(components, exclude.components, "random controls (disjoint)")
        free = ~exclude.selected
    groups = [
        (name, need, [i for i in members if free[i]])
        for name, members in _groups(components, match).items()
        if (need := int(like.selected[members].sum()))
    ]
    for name, need, pool in groups:
        if len(pool) < need:
            raise ValueError(
                f"random controls: {name} has {len(pool)} components left to draw from and the mask has "
                f"{need} there; take a smaller budget"
                + (', or match="uniform".' if match == "layer" else ", or allow overlap.")
            )
    taken = {like.selected.numpy().tobytes()}
    possible = math.prod(math.comb(len(pool), need) for _, need, pool in groups)
    possible -= int(not (like.selected & ~free).any())  # the mask itself is no control
    if possible < n:
        raise ValueError(
            f"random controls: only {possible} other masks match this one by {match}, and {n} were asked for"
            + ('; match="uniform" has more.' if match == "layer" else "; ask for fewer.")
        )
    masks: list[Mask] = []
    while len(masks) < n:
        selected = torch.zeros(len(components), dtype=torch.bool)
        for _, need, pool in groups:
            selected[torch.as_tensor(rng.choice(pool, size=need, replace=False))] = True
        if (key := selected.numpy().tobytes()) in taken:
            continue
        taken.add(key)
        made = {"method": "random", "match": match, "draw": len(masks), **recipe, "model": components.model}
        made |= {"disjoint_from": exclude.recipe} if exclude is not None else {}
        masks.append(Mask(components, selected, made | {"like": like.recipe}))
    return masks


def _groups(components: Components, match: str) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, (component, size) in enumerate(zip(components.items, components.sizes.tolist(), strict=True)):
        where = f"layer {component.layer} " if match == "layer" else ""
        groups.setdefault(f"{where}{component.kind} ({size} parameters each)", []).append(i)
    return groups


def _prefix(
    components: Components, order: Int[Tensor, " chosen"], budget: float, what: str
) -> Bool[Tensor, " component"]:
    """The longest prefix of an order whose parameters are within the budget, so that budgets nest."""
    total = int(components.sizes.sum())
    allowed = entries_allowed(budget, total, what)
    spent = torch.cumsum(components.sizes[order], 0)
    if not len(order) or int(spent[0]) > allowed:
        least = f"{math.ceil(int(spent[0]) / total * 1e6) / 1e6:.6f}".rstrip("0") if len(order) else "none"
        raise ValueError(
            f"{what}: a budget of {budget:g} is {allowed:,} of {total:,} parameters and selects nothing; "
            f"the smallest budget that selects something here is {least}."
        )
    if allowed > int(spent[-1]):
        share = int(spent[-1]) / total
        if share < 1:
            raise ValueError(
                f"{what}: a budget of {budget:g} is {allowed:,} parameters, and only {int(spent[-1]):,} "
                f"({share:.4f}) are free of the mask to be disjoint from; take a smaller budget."
            )
    selected = torch.zeros(len(components), dtype=torch.bool)
    selected[order[spent <= allowed]] = True
    return selected
