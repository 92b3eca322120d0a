"""Masks: which components, or which parameter entries, **may change**. `True` = may change, everywhere."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locus.components import Components, parameter_mask, slices
from locus.scores import (
    Scores,
    components_from_record,
    components_record,
    method_record,
    read_tensors,
    require_same,
    write_tensors,
)

MATCHES = ("layer", "uniform")


class Overlap(NamedTuple):
    """Overlap of two masks, counted in parameters."""

    jaccard: float  # both / either; NaN when both are empty
    share: float  # both / the first; NaN when the first is empty


@dataclass(frozen=True, eq=False)
class ParameterMask(Mapping):
    """Full-shape boolean masks of the parameter entries that may change, by Hugging Face name.

    A read-only mapping name -> Bool tensor. A name that is absent may not change at all. This is the one mask
    that the unlearning engine knows.
    """

    tensors: dict[str, Bool[Tensor, "..."]]
    recipe: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, tensor in self.tensors.items():
            if tensor.dtype != torch.bool:
                raise ValueError(
                    f"ParameterMask got {name} of dtype {tensor.dtype}, expected torch.bool; "
                    "ParameterMask.from_tensors converts tensors of zeros and ones."
                )

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Any], model: Any = None, *, recipe: dict | None = None
    ) -> "ParameterMask":
        """Masks made elsewhere: boolean, or zeros and ones. A model, if given, checks names and shapes."""
        found = {}
        for name, given in tensors.items():
            tensor = torch.as_tensor(given).detach().to("cpu")
            if tensor.dtype != torch.bool:
                if not ((tensor == 0) | (tensor == 1)).all():
                    raise ValueError(
                        f"from_tensors: {name} holds other values than 0 and 1 ({tensor.min().item():.4g} to "
                        f"{tensor.max().item():.4g}); these look like scores, so threshold them first."
                    )
                tensor = tensor.bool()
            if model is not None:
                if name not in model.weights:
                    near = [known for known in model.weights if known.endswith(".".join(name.split(".")[-3:]))]
                    raise ValueError(
                        f"from_tensors: the model {model.name} has no parameter {name}"
                        + (
                            f"; did you mean {near[0]}?"
                            if near
                            else f"; its names look like {next(iter(model.weights))}."
                        )
                    )
                if (shape := tuple(model.weights[name].shape)) != tuple(tensor.shape):
                    raise ValueError(
                        f"from_tensors: {name} has shape {tuple(tensor.shape)}, the parameter has {shape}; "
                        "give a mask of the parameter's full shape."
                    )
            found[name] = tensor
        if not any(tensor.any() for tensor in found.values()):
            raise ValueError(
                f"from_tensors got {len(found)} tensors that select nothing; True (or 1) means that an entry "
                "may change. If yours mark what is kept, invert them."
            )
        recipe = {"method": "from_tensors"} if recipe is None else recipe
        return cls(found, recipe | ({} if model is None else {"model": model.fingerprint}))

    @classmethod
    def full(cls, model: Any) -> "ParameterMask":
        """Every entry of every parameter of the model (a tied parameter once)."""
        tensors = {name: torch.ones(weight.shape, dtype=torch.bool) for name, weight in model.weights.items()}
        return cls(tensors, {"method": "full", "model": model.fingerprint})

    @classmethod
    def random(
        cls,
        model: Any,
        *,
        budget: float | None = None,
        like: "ParameterMask | None" = None,
        match: str = "layer",
        disjoint_from: "ParameterMask | None" = None,
        seed: int = 0,
    ) -> "ParameterMask":
        """Single weights drawn at random: a budget of the attention and MLP matrices, or as many as `like` has.

        budget: this share of the entries of every matrix, rounded down (biases and norms are left out); 5% in LACUNA
            (Boglioni et al. 2026, arXiv 2607.02513)
        like, match="layer": as many entries of every tensor as this mask has there
        like, match="uniform": as many in all of its tensors together
        disjoint_from: choose none of that mask's entries
        """
        recipe: dict[str, Any] = {"method": "random", "seed": seed, "model": model.fingerprint}
        for what, other in (("like", like), ("disjoint_from", disjoint_from)):
            if other is not None:
                _require_one_model(recipe, other.recipe, f"random({what}=)")
                recipe[what] = other.recipe
        taken = {} if disjoint_from is None else disjoint_from.tensors
        names = set(_matrices(model) if like is None else like)
        free = {
            name: (~taken[name].cpu()).flatten() if name in taken else torch.ones(weight.numel(), dtype=torch.bool)
            for name, weight in model.weights.items()
            if name in names
        }
        rng = np.random.default_rng(seed)
        if like is not None and budget is None:
            wanted = {name: int(tensor.sum()) for name, tensor in like.items()}
            counts = wanted if match == "layer" else _spread(sum(wanted.values()), free, rng)
            recipe["match"] = match
        elif budget is not None and like is None:
            counts = {name: _allowed(budget, len(entries), "ParameterMask.random") for name, entries in free.items()}
            recipe["budget"] = float(budget)
        else:
            raise ValueError("ParameterMask.random takes either budget= or like=, for instance budget=0.05.")
        if match not in MATCHES:
            raise ValueError(f"ParameterMask.random got match={match!r}; expected one of {', '.join(MATCHES)}.")
        tensors = {
            name: _some(free[name], count, name, rng).reshape(model.weights[name].shape)
            for name, count in counts.items()
            if count
        }
        if not tensors:
            raise ValueError(f"ParameterMask.random: a budget of {budget} selects no entry of any matrix.")
        return cls(tensors, recipe)

    def __getitem__(self, name: str) -> Bool[Tensor, "..."]:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        """Number of tensors; the number of entries that may change is `n_parameters`."""
        return len(self.tensors)

    # Mapping's comparison would compare tensors, which has no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def n_parameters(self) -> int:
        """How many entries may change."""
        return sum(int(tensor.sum()) for tensor in self.tensors.values())

    def __repr__(self) -> str:
        return f"ParameterMask({self.n_parameters:,} entries in {len(self)} tensors, {_say(self.recipe)})"

    def __and__(self, other: "ParameterMask") -> "ParameterMask":
        return self._combine(other, "&", torch.logical_and)

    def __or__(self, other: "ParameterMask") -> "ParameterMask":
        return self._combine(other, "|", torch.logical_or)

    def __sub__(self, other: "ParameterMask") -> "ParameterMask":
        return self._combine(other, "-", lambda a, b: a & ~b)

    def complement(self, model: Any) -> "ParameterMask":
        """Everything else in the model. (No `~`: a mask does not know the names that it leaves out.)"""
        return ParameterMask.full(model) - self

    def overlap(self, other: "ParameterMask") -> Overlap:
        """Shared entries over entries in either (Jaccard), and over entries of this mask (share)."""
        return _overlap((self & other).n_parameters, self.n_parameters, other.n_parameters)

    def _combine(self, other: "ParameterMask", symbol: str, join: Callable) -> "ParameterMask":
        if not isinstance(other, ParameterMask):
            raise ValueError(
                f"ParameterMask {symbol} {type(other).__name__}: expected another ParameterMask; "
                "mask.materialize(model) makes one of a Mask."
            )
        _require_one_model(self.recipe, other.recipe, symbol)
        tensors = {}
        for name in dict.fromkeys([*self.tensors, *other.tensors]):
            a, b = self.tensors.get(name), other.tensors.get(name)
            if a is not None and b is not None and a.shape != b.shape:
                raise ValueError(
                    f"ParameterMask {symbol}: {name} has shape {tuple(a.shape)} in one mask and "
                    f"{tuple(b.shape)} in the other; these are masks of different models."
                )
            nothing = torch.zeros_like(a if a is not None else other.tensors[name])
            joined = join(nothing if a is None else a, nothing if b is None else b)
            if joined.any():
                tensors[name] = joined
        return ParameterMask(tensors, _joined_recipe(symbol, self.recipe, other.recipe))

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, eight entries a byte, with the recipe in its metadata."""
        packed = {name: _pack(tensor) for name, tensor in self.tensors.items()}
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        record = {"recipe": self.recipe, "shapes": shapes}
        return write_tensors(path, packed, kind="parameter mask", record=record)

    @classmethod
    def load(cls, path: str | Path) -> "ParameterMask":
        """Read what `save` wrote, bit for bit."""
        tensors, record = read_tensors(path, kind="parameter mask")
        return cls(
            {name: _unpack(tensors[name], shape) for name, shape in record["shapes"].items()},
            record["recipe"],
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
        rng = np.random.default_rng(seed)
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
        """A mask file of WAGLE (Jia et al., NeurIPS 2024): name -> tensor, 1 = the weight is updated.

        The file is a `.pt`; only tensors and plain containers are read from it (`weights_only=True`), never
        code. A dictionary, a list of (name, tensor) pairs, or, with a model, a list of tensors in the order
        of its parameters. Wrappers' prefixes ("module.", a doubled "model.") are taken off.
        """
        if not Path(path).is_file():
            raise ValueError(f"from_wagle: no file {path}; expected one of WAGLE's .pt masks.")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types here, and all mean the same to the caller
            raise ValueError(
                f"from_wagle: {path} does not hold plain tensors ({type(error).__name__}: {error!s:.120}). "
                "Nothing in it was run. Save it again as a dictionary name -> tensor."
            ) from error
        named = _named(content, model, path)
        names = {name: _hugging_face_name(name, model) for name in named}
        if len(set(names.values())) < len(names):
            raise ValueError(
                f"from_wagle: {path} has several tensors for one parameter after its prefixes are taken off."
            )
        recipe = {"method": "WAGLE file", "file": Path(path).name}
        return ParameterMask.from_tensors({names[n]: t for n, t in named.items()}, model, recipe=recipe)

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
            f"{share:.2%}, {_say(self.recipe)})"
        )

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
        recipe = _joined_recipe(symbol, self.recipe, other.recipe) | {"model": self.components.model}
        return Mask(self.components, join(self.selected, other.selected), recipe)

    def overlap(self, other: "Mask") -> Overlap:
        """Shared parameters over parameters in either (Jaccard), and over those of this mask (share)."""
        return _overlap((self & other).n_parameters, self.n_parameters, other.n_parameters)

    def materialize(self, model: Any) -> ParameterMask:
        """The parameter entries of the selected components, as full-shape masks of this very model."""
        tensors = parameter_mask(model, self.components, self.selected)
        return ParameterMask(tensors, self.recipe | {"components": len(self), "model": model.fingerprint})

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: the selection bit-packed, labels and recipe in its metadata."""
        record = {"recipe": self.recipe, **components_record(self.components)}
        tensors = {"selected": _pack(self.selected), "sizes": self.components.sizes}
        return write_tensors(path, tensors, kind="mask", record=record)

    @classmethod
    def load(cls, path: str | Path) -> "Mask":
        """Read what `save` wrote."""
        tensors, record = read_tensors(path, kind="mask")
        components = components_from_record(record, tensors["sizes"])
        return cls(components, _unpack(tensors["selected"], [len(components)]), record["recipe"])


def controls(mask: Mask, n: int = 20, *, match: str = "layer", disjoint: bool = False, seed: int = 0) -> list[Mask]:
    """n random masks with the parameter counts of `mask`, different from it and from each other.

    The first draws of one seed are the same for every n.

    match: "layer" keeps the parameter count per layer and kind, "uniform" per kind
    disjoint: draw only from components that are not in `mask`
    """
    if n < 1:
        raise ValueError(f"controls got n={n}; expected at least one draw.")
    exclude = mask if disjoint else None
    rng = np.random.default_rng(seed)
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
    allowed = _allowed(budget, total, what)
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


def _allowed(budget: float, total: int, what: str) -> int:
    """How many of `total` entries a budget allows."""
    if not 0 < budget <= 1:
        raise ValueError(f"{what} got budget={budget!r}; expected a fraction of the parameters, in (0, 1].")
    # Fraction(str(...)) is the number as written: 0.29 of 100 is 29, which floating point makes 28.
    return math.floor(Fraction(str(float(budget))) * total)


def _spread(n: int, free: Mapping[str, Bool[Tensor, " entry"]], rng: np.random.Generator) -> dict[str, int]:
    """How many of n entries, drawn at random from all that are free, lie in each tensor."""
    sizes = [int(entries.sum()) for entries in free.values()]
    if n > sum(sizes):
        raise ValueError(f"ParameterMask.random: {n:,} entries are asked for and {sum(sizes):,} are free; take fewer.")
    return dict(zip(free, rng.multivariate_hypergeometric(sizes, n, method="marginals").tolist(), strict=True))


def _some(free: Bool[Tensor, " entry"], count: int, name: str, rng: np.random.Generator) -> Bool[Tensor, " entry"]:
    """`count` of the free entries of a tensor."""
    pool = free.nonzero().flatten().numpy()
    if count > len(pool):
        raise ValueError(
            f"ParameterMask.random: {name} has {len(pool):,} entries free of the mask to be disjoint from, and "
            f"{count:,} are asked for; take a smaller budget, or allow overlap."
        )
    selected = torch.zeros_like(free)
    selected[torch.from_numpy(rng.choice(pool, count, replace=False))] = True
    return selected


def _matrices(model: Any) -> list[str]:
    """Names of the weight matrices of all attention blocks and MLPs; no biases, no norms."""
    blocks = model.components("attn") + model.components("mlp")
    owned = dict.fromkeys(name for block in blocks for name in slices(model, block))
    return [name for name in owned if model.weights[name].ndim > 1]


def _named(content: Any, model: Any, path: str | Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and all(isinstance(value, Tensor) for value in content.values()) and content:
        return dict(content)
    if isinstance(content, Sequence) and content:
        if all(isinstance(item, Tensor) for item in content):
            if model is None or len(content) != len(model.weights):
                raise ValueError(
                    f"from_wagle: {path} is a list of {len(content)} tensors without names"
                    + (
                        "; pass the model it was made for."
                        if model is None
                        else f", and {model.name} has {len(model.weights)} parameters; pass the right model."
                    )
                )
            return dict(zip(model.weights, content, strict=True))
        if all(isinstance(i, Sequence) and len(i) == 2 and isinstance(i[1], Tensor) for i in content):
            return dict(content)
    raise ValueError(
        f"from_wagle: {path} holds a {type(content).__name__}; expected a dictionary name -> tensor, a list "
        "of (name, tensor), or a list of tensors."
    )


def _hugging_face_name(name: str, model: Any) -> str:
    """The name without wrappers' prefixes, as the model has it where one is given."""
    bare = name
    while bare.startswith(("module.", "_orig_mod.", "model.model.")):
        bare = bare.split(".", 1)[1]
    if model is None or bare in model.weights:
        return bare
    candidates = [f"model.{bare}", bare.removeprefix("model."), f"transformer.{bare}", f"gpt_neox.{bare}"]
    return next((candidate for candidate in candidates if candidate in model.weights), bare)


def _pack(selected: Bool[Tensor, "..."]) -> Tensor:
    return torch.from_numpy(np.packbits(selected.cpu().numpy().reshape(-1)))


def _unpack(packed: Tensor, shape: Sequence[int]) -> Bool[Tensor, "..."]:
    bits = np.unpackbits(packed.numpy(), count=math.prod(shape))
    return torch.from_numpy(bits.astype(bool)).reshape(tuple(shape))


def _overlap(both: int, first: int, second: int) -> Overlap:
    either = first + second - both
    return Overlap(both / either if either else math.nan, both / first if first else math.nan)


def _require_one_model(a: dict, b: dict, symbol: str) -> None:
    if a.get("model") and b.get("model") and a["model"] != b["model"]:
        raise ValueError(
            f"ParameterMask {symbol}: the masks belong to different models ({a['model']} and {b['model']}); "
            "make both from one model."
        )


def _joined_recipe(symbol: str, a: dict, b: dict) -> dict:
    model = a.get("model") or b.get("model")
    return {"method": symbol, "of": [a, b]} | ({"model": model} if model else {})


def _say(recipe: dict) -> str:
    """A recipe in a few words."""
    said = [str(recipe.get("method", "no recipe"))]
    said += [
        f"{key}={recipe[key]}" for key in ("select", "match", "budget", "seed", "draw") if recipe.get(key) is not None
    ]
    return " ".join(said)
