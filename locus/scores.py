"""Scores: how much each component matters for each fact, and how far two sets of scores agree."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor

from locus.components import Component, Components
from locus.folder import write


@dataclass(frozen=True)
class RecordedMethod:
    """A localization method as read from a file, or as named by the user (then without fields)."""

    name: str
    fields: tuple[tuple[str, object], ...] | None = None

    def __repr__(self) -> str:
        if self.fields is None:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.fields)})"


def checked_rows(
    values: Float[Tensor, "fact item"], items: Sequence, facts: tuple[str, ...], owner: str, item: str
) -> Float[Tensor, "fact item"]:
    """Scores on the CPU, in at least float32, if there is a finite one for each fact and item; `item` names the latter.

    Raises:
        ValueError: the shape is another, or a value is not finite.
    """
    shape = tuple(values.shape)
    if len(shape) != 2 or shape[1] != len(items):
        raise ValueError(
            f"{owner} got values of shape {shape} for {len(items)} {item}s; expected [fact, {len(items)}]. For one "
            f"score a{'n' * (item[0] in 'aeiou')} {item}, pass values[None, :]."
        )
    if 0 in shape:
        raise ValueError(f"{owner} got values of shape {shape}; expected at least one fact and {item}.")
    if facts and len(facts) != shape[0]:
        raise ValueError(f"{owner} got {len(facts)} fact labels for {shape[0]} rows; give one label a row, or none.")
    values = values.detach().to("cpu")
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    if not (finite := torch.isfinite(values)).all():
        row, column = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"{owner} got {int((~finite).sum())} values that are not finite, the first for fact {row} and {item} "
            f"{items[column]}; leave such facts out, or compute in float32."
        )
    return values


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of components, one row a fact, in units of the metric.

    Sign: **positive = removing the component lowers the metric**, so it supports the fact.

    values: one row a fact, one column a component, finite; kept on the CPU in at least float32
    method: the frozen method object that made them (provenance), `RecordedMethod` after loading
    metric: name of the metric whose units these are
    facts: labels of the rows, or empty
    passes: forward and backward passes of one prompt that it took to make them, see `cost.passes`; None if unknown
    """

    values: Float[Tensor, "fact component"]
    components: Components
    method: object
    metric: str
    facts: tuple[str, ...] = ()
    passes: tuple[float, float] | None = None

    @property
    def unit(self) -> str:
        """What the values are: the metric, unless the method says otherwise."""
        return getattr(self.method, "UNIT", self.metric)

    def __post_init__(self):
        values = checked_rows(self.values, self.components.items, self.facts, "Scores", "component")
        object.__setattr__(self, "values", values)
        if isinstance(self.method, str):
            object.__setattr__(self, "method", RecordedMethod(self.method))
        object.__setattr__(self, "facts", tuple(self.facts))

    @classmethod
    def from_array(
        cls,
        array: object,
        components: Components,
        *,
        method: object = "unnamed",
        metric: str = "unnamed",
        facts: tuple[str, ...] = (),
    ) -> "Scores":
        """Scores that were computed elsewhere: any array, [component] or [fact, component].

        Sign is the caller's promise: positive = removing the component lowers the metric.
        """
        values = torch.as_tensor(np.asarray(array) if not isinstance(array, Tensor) else array)
        if not values.is_floating_point():
            values = values.double()
        return cls(values[None, :] if values.ndim == 1 else values, components, method, metric, tuple(facts))

    def __repr__(self) -> str:
        n, m = self.values.shape
        kinds = "/".join(dict.fromkeys(c.kind for c in self.components.items))
        best = ", ".join(f"{row.component} {row.score:+.3g}" for row in self.top(3).itertuples())
        return f"Scores({m} {kinds} components x {n} facts, {self.method!r}, {self.metric}; top: {best})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from locus.view import density, grid, ranking

        kinds = set(self.components.kinds)
        chart = ranking if len(kinds) > 1 else density if kinds <= {"neuron", "value"} else grid
        return chart(self)._repr_mimebundle_()

    def mean(self) -> Float[Tensor, " component"]:
        """Mean over the facts."""
        return self.values.mean(0)

    def grid(self, kind: str) -> Float[Tensor, "layer index"]:
        """Mean scores of one kind as [layer, index], NaN where there is no such component."""
        found = [(i, c) for i, c in enumerate(self.components.items) if c.kind == kind]
        if not found:
            kinds = ", ".join(sorted({c.kind for c in self.components.items}))
            raise ValueError(f"grid({kind!r}): these scores have no {kind!r} components, only: {kinds}.")
        index = torch.tensor([c.index or 0 for _, c in found])
        layer = torch.tensor([c.layer for _, c in found])
        n_layers = max(c.layer for c in self.components.items) + 1
        grid = torch.full((n_layers, int(index.max()) + 1), torch.nan, dtype=self.values.dtype)
        grid[layer, index] = self.mean()[torch.tensor([i for i, _ in found])]
        return grid

    def top(self, k: int = 10) -> pd.DataFrame:
        """The k largest mean scores: component, score, its standard error over facts, parameters."""
        order = torch.argsort(self.mean(), descending=True, stable=True)[:k]
        n = self.values.shape[0]
        error = self.values.std(0) / n**0.5 if n > 1 else torch.full_like(self.values[0], torch.nan)
        return pd.DataFrame(
            {
                "component": [str(self.components.items[i]) for i in order.tolist()],
                "score": self.mean()[order].tolist(),
                "standard_error": error[order].tolist(),
                "parameters": self.components.sizes[order].tolist(),
            }
        )

    def bootstrap(self, n: int = 200, *, seed: int = 0) -> Float[Tensor, "sample component"]:
        """Means over n resamples of the facts, with replacement: how stable a ranking is."""
        rows = self.values.shape[0]
        counts = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=n)
        return torch.as_tensor(counts, dtype=self.values.dtype) @ self.values / rows

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows: fact, component, layer, kind, index, score."""
        n, m = self.values.shape
        items = self.components.items
        return pd.DataFrame(
            {
                "fact": np.repeat(np.array(self.facts or [str(i) for i in range(n)], dtype=object), m),
                "component": [str(c) for c in items] * n,
                "layer": [c.layer for c in items] * n,
                "kind": [c.kind for c in items] * n,
                "index": pd.array([c.index for c in items] * n, dtype="Int64"),
                "score": self.values.flatten().tolist(),
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: the values, and all else as JSON in its metadata."""
        record = {
            "method": method_record(self.method),
            "metric": self.metric,
            "facts": list(self.facts),
            "passes": self.passes,
            **components_record(self.components),
        }
        return write_tensors(
            path, {"values": self.values, "sizes": self.components.sizes}, kind="scores", record=record
        )

    @classmethod
    def load(cls, path: str | Path) -> "Scores":
        """Read what `save` wrote. The method comes back as a `RecordedMethod`."""
        tensors, record = read_tensors(path, kind="scores")
        components = components_from_record(record, tensors["sizes"])
        return cls(
            tensors["values"],
            components,
            recorded_method(record),
            record["metric"],
            tuple(record["facts"]),
            None if record.get("passes") is None else tuple(record["passes"]),
        )


class Agreement(NamedTuple):
    """How far two rankings of the same components agree; NaN where one of them is constant."""

    spearman: float
    pearson: float
    overlap: float  # share of the top fraction that both have
    chance: float  # the overlap that random rankings would have: the fraction itself
    n: int  # number of components


def agreement(a: Scores, b: Scores, *, fraction: float = 0.05) -> Agreement:
    """Spearman, Pearson and the overlap of the top `fraction` of components, of the two mean scores."""
    require_same(a.components, b.components, "agreement")
    if not 0 < fraction <= 1:
        raise ValueError(f"agreement got fraction={fraction!r}; expected a number in (0, 1].")
    return agreement_of(a.mean().double().numpy(), b.mean().double().numpy(), fraction)


def agreement_of(x: Float[np.ndarray, " component"], y: Float[np.ndarray, " component"], fraction: float) -> Agreement:
    """`agreement` of two arrays."""
    k = max(1, round(fraction * len(x)))
    top_x = set(np.argsort(-x, kind="stable")[:k].tolist())
    top_y = set(np.argsort(-y, kind="stable")[:k].tolist())
    varied = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
    return Agreement(
        spearman=float(stats.spearmanr(x, y).statistic) if varied else float("nan"),
        pearson=float(stats.pearsonr(x, y).statistic) if varied else float("nan"),
        overlap=len(top_x & top_y) / k if varied else float("nan"),
        chance=k / len(x),
        n=len(x),
    )


def require_same(a: Components, b: Components, what: str) -> None:
    """Raise unless both are the same components, in the same order, of the same model."""
    if a is b:
        return
    if a.model != b.model:
        raise ValueError(
            f"{what}: the components belong to different models ({a.model or 'unknown'} and "
            f"{b.model or 'unknown'}); score and select on one model."
        )
    if a.items != b.items:
        first = next((f"{x} and {y}" for x, y in zip(a.items, b.items, strict=False) if x != y), "none")
        raise ValueError(
            f"{what}: the components differ ({len(a)} and {len(b)} of them; first difference: {first}); "
            "build both on the same `model.components(kind)`, or on the sum of two such."
        )


def write_tensors(path: str | Path, tensors: dict[str, Tensor], *, kind: str, record: dict) -> Path:
    """Write a safetensors file of one kind with a JSON record, through a temporary name."""
    metadata = {"locus": kind, "record": json.dumps(record, default=repr)}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write(Path(path), lambda temporary: save_file(whole, temporary, metadata))
    return Path(path)


def read_tensors(path: str | Path, *, kind: str) -> tuple[dict[str, Tensor], dict]:
    """Read a file of `write_tensors`; a file of another kind, or none of ours, is an error."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; expected {kind} saved by locus.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); save it again.") from error
    if metadata.get("locus") != kind:
        raise ValueError(f"{path}: holds {metadata.get('locus', 'tensors of another program')}, expected {kind}.")
    return tensors, json.loads(metadata["record"])


def components_record(components: Components) -> dict:
    return {"model": components.model, "components": [str(c) for c in components.items]}


def components_from_record(record: Mapping, sizes: Tensor) -> Components:
    items = tuple(Component.parse(label) for label in record["components"])
    return Components(items=items, sizes=sizes, model=record["model"])


def method_record(method: object) -> tuple[str, dict | None]:
    if isinstance(method, RecordedMethod):
        return method.name, None if method.fields is None else dict(method.fields)
    if dataclasses.is_dataclass(method):
        return type(method).__name__, {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return repr(method), None


def recorded_method(record: Mapping) -> RecordedMethod:
    """Inverse of `method_record`, in the record of a file."""
    name, fields = record["method"]
    return RecordedMethod(name, None if fields is None else tuple((k, _hashable(v)) for k, v in fields.items()))


def _hashable(value: object) -> object:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
