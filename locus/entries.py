"""Masks of parameter entries, whole or drawn at random: the one kind of mask that the unlearning engine knows."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locus.components import slices
from locus.scores import read_tensors, write_tensors

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
    def from_wagle(cls, path: str | Path, model: Any = None) -> "ParameterMask":
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
        return cls.from_tensors({names[n]: t for n, t in named.items()}, model, recipe=recipe)

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
        names = set(matrices(model) if like is None else like)
        free = {
            name: (~taken[name].cpu()).flatten() if name in taken else torch.ones(weight.numel(), dtype=torch.bool)
            for name, weight in model.weights.items()
            if name in names
        }
        rng = generator(seed)
        if like is not None and budget is None:
            wanted = {name: int(tensor.sum()) for name, tensor in like.items()}
            counts = wanted if match == "layer" else _spread(sum(wanted.values()), free, rng)
            recipe["match"] = match
        elif budget is not None and like is None:
            counts = {
                name: entries_allowed(budget, len(entries), "ParameterMask.random") for name, entries in free.items()
            }
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

    @classmethod
    def top(
        cls, scores: Mapping[str, Float[Tensor, "..."]], budget: float, *, recipe: dict | None = None
    ) -> "ParameterMask":
        """The entries with the largest scores, in one ranking of all tensors; ties in the order of the entries.

        budget: as many entries as this share of every tensor, rounded down, makes together: as in `random`
        """
        allowed = sum(entries_allowed(budget, values.numel(), "ParameterMask.top") for values in scores.values())
        if not allowed:
            raise ValueError(
                f"ParameterMask.top: a budget of {budget} selects no entry of any of {len(scores)} tensors."
            )
        flat = np.concatenate([values.detach().cpu().reshape(-1).numpy() for values in scores.values()])
        if not np.isfinite(flat).all():
            raise ValueError(
                f"ParameterMask.top: {(~np.isfinite(flat)).sum():,} of {len(flat):,} scores are not finite; "
                "compute them in float32."
            )
        # A threshold, and not a sort: no index of all entries is ever in memory.
        threshold = np.partition(flat, len(flat) - allowed)[len(flat) - allowed]
        chosen = flat > threshold
        chosen[np.flatnonzero(flat == threshold)[: allowed - int(chosen.sum())]] = True
        parts = torch.from_numpy(chosen).split([values.numel() for values in scores.values()])
        tensors = {
            name: part.reshape(values.shape)
            for (name, values), part in zip(scores.items(), parts, strict=True)
            if part.any()
        }
        return cls(tensors, {"method": "scores", "select": "top", "budget": float(budget)} | (recipe or {}))

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
        return f"ParameterMask({self.n_parameters:,} entries in {len(self)} tensors, {say(self.recipe)})"

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
        return overlap((self & other).n_parameters, self.n_parameters, other.n_parameters)

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
        return ParameterMask(tensors, joined_recipe(symbol, self.recipe, other.recipe))

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, eight entries a byte, with the recipe in its metadata."""
        packed = {name: pack(tensor) for name, tensor in self.tensors.items()}
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        record = {"recipe": self.recipe, "shapes": shapes}
        return write_tensors(path, packed, kind="parameter mask", record=record)

    @classmethod
    def load(cls, path: str | Path) -> "ParameterMask":
        """Read what `save` wrote, bit for bit."""
        tensors, record = read_tensors(path, kind="parameter mask")
        return cls(
            {name: unpack(tensors[name], shape) for name, shape in record["shapes"].items()},
            record["recipe"],
        )


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


def matrices(model: Any) -> list[str]:
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


def _require_one_model(a: dict, b: dict, symbol: str) -> None:
    if a.get("model") and b.get("model") and a["model"] != b["model"]:
        raise ValueError(
            f"ParameterMask {symbol}: the masks belong to different models ({a['model']} and {b['model']}); "
            "make both from one model."
        )


# ---------------------------------------------------------------------------------- shared with masks of components


def entries_allowed(budget: float, total: int, what: str) -> int:
    """How many of `total` entries a budget allows."""
    if not isinstance(budget, Real) or not 0 < budget <= 1:
        raise ValueError(f"{what} got budget={budget!r}; expected a fraction of the parameters, in (0, 1].")
    # Fraction(str(...)) is the number as written: 0.29 of 100 is 29, which floating point makes 28.
    return math.floor(Fraction(str(float(budget))) * total)


def generator(seed: int) -> np.random.Generator:
    try:
        return np.random.default_rng(operator.index(seed))
    except (TypeError, ValueError):
        raise ValueError(f"a seed must be an integer of at least 0, got {seed!r}") from None


def pack(selected: Bool[Tensor, "..."]) -> Tensor:
    return torch.from_numpy(np.packbits(selected.cpu().numpy().reshape(-1)))


def unpack(packed: Tensor, shape: Sequence[int]) -> Bool[Tensor, "..."]:
    bits = np.unpackbits(packed.numpy(), count=math.prod(shape))
    return torch.from_numpy(bits.astype(bool)).reshape(tuple(shape))


def overlap(both: int, first: int, second: int) -> Overlap:
    either = first + second - both
    return Overlap(both / either if either else math.nan, both / first if first else math.nan)


def joined_recipe(symbol: str, a: dict, b: dict) -> dict:
    model = a.get("model") or b.get("model")
    return {"method": symbol, "of": [a, b]} | ({"model": model} if model else {})


def say(recipe: dict) -> str:
    """A recipe in a few words."""
    said = [str(recipe.get("method", "no recipe"))]
    said += [
        f"{key}={recipe[key]}" for key in ("select", "match", "budget", "seed", "draw") if recipe.get(key) is not None
    ]
    return " ".join(said)
