"""What an edit is once it is made: the new values of the touched entries, and how they came about."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from locus.folder import new_directory
from locus.masks import ParameterMask
from locus.unlearn import objectives, optimizers

Status = Literal["finished", "diverged", "collapsed", "nothing moved"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Entries(NamedTuple):
    """Some entries of one stored tensor: where they are in it, flattened, and their values."""

    index: Int[Tensor, " entry"]  # type: ignore[assignment]  # hides tuple.index
    value: Float[Tensor, " entry"]


@dataclass(frozen=True, eq=False)
class Update:
    """An edit: new values of the entries that a mask let change. Apply it with `applied`.

    New values and not differences, since in bfloat16 w + (w' − w) ≠ w'.

    model: `state` of the model that it was made on and belongs to
    values: Hugging Face name → where and what, in the model's dtype; masked entries only
    shapes: Hugging Face name → shape of the tensor
    recipe: of the mask
    objective, optimizer: settings of the run; as their text when read back and not one of ours
    history: one row a step, measured before it: step (updates made so far), forget, retain (the two terms,
        unweighted), loss, grad_norm (before clipping), retain_probability
    status: "finished"; "diverged" (loss or gradient was not finite); "collapsed" (the probability of the
        retain answers fell below the floor); "nothing moved" (no entry changed in the stored dtype)
    norm: L2 norm of the change
    n_changed: how many entries differ in their bits from the original's
    checksum: SHA-256 over everything outside the mask (see `checksum`), found equal with the edit in place,
        and after it was taken back
    """

    model: str
    values: dict[str, Entries]
    shapes: dict[str, tuple[int, ...]]
    recipe: dict
    objective: Any
    optimizer: Any
    settings: dict
    history: tuple[dict[str, int | float], ...]
    status: Status
    norm: float
    n_changed: int
    checksum: str

    @property
    def mask(self) -> ParameterMask:
        """The entries that might change."""
        tensors = {}
        for name, entries in self.values.items():
            flat = torch.zeros(math.prod(self.shapes[name]), dtype=torch.bool)
            flat[entries.index.cpu().long()] = True
            tensors[name] = flat.reshape(self.shapes[name])
        return ParameterMask(tensors, self.recipe)

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Within the block the model is edited; afterwards it is as before, bit for bit, also after an error.

        Blocks may be nested, each update in the state of the model that it was made in.

        Raises:
            ValueError: the update was made for another model, or in another state of this one.
            RuntimeError: something else changed the same entries within the block.
        """
        if model.state != self.model:
            raise ValueError(
                f"this update belongs to the weights {self.model}, and {model.name} has {model.state}; load the "
                "model that it was made with, and apply what was applied then"
            )
        with written(model, self.values):
            yield

    def save(self, directory: str | os.PathLike) -> Path:
        """Write a directory (values.safetensors, update.json), to a temporary name first.

        Raises:
            ValueError: `directory` exists.
        """
        directory = Path(directory)
        if directory.exists():
            raise ValueError(f"{directory} exists already; choose a new directory for the update")
        record = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("values", "objective", "optimizer")
        }
        record |= {"objective": _settings(self.objective), "optimizer": _settings(self.optimizer)}
        tensors = {}
        for name, entries in self.values.items():
            tensors[f"index:{name}"], tensors[f"value:{name}"] = entries.index, entries.value
        with new_directory(directory) as temporary:
            save_file(tensors, temporary / "values.safetensors")
            record = json.loads(json.dumps(record, default=repr))
            record["sha256"] = _digest(record, temporary / "values.safetensors")
            (temporary / "update.json").write_text(json.dumps(record, indent=1) + "\n")
        return directory

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Update":
        """Read what `save` wrote, bit for bit.

        Raises:
            ValueError: there is no update, or it is incomplete.
        """
        directory = Path(directory)
        try:
            record = json.loads((directory / "update.json").read_text())
            if record.pop("sha256") != _digest(record, directory / "values.safetensors"):
                raise ValueError("it is not what was saved")
            tensors = load_file(directory / "values.safetensors")
            values = {n: Entries(tensors[f"index:{n}"], tensors[f"value:{n}"]) for n in record["shapes"]}
            record["shapes"] = {name: tuple(shape) for name, shape in record["shapes"].items()}
            record["history"] = tuple(record["history"])
            record["objective"] = _restored(record["objective"], objectives)
            record["optimizer"] = _restored(record["optimizer"], optimizers)
            return cls(values=values, **record)
        except Exception as error:  # json, safetensors and the file system each raise their own
            raise ValueError(
                f"{directory} holds no whole update ({type(error).__name__}: {error!s:.120}); "
                "Update.save writes values.safetensors and update.json"
            ) from error

    def __repr__(self) -> str:
        n = sum(len(entries.index) for entries in self.values.values())
        return (
            f"Update({self.status}, {self.n_changed:,} of {n:,} entries changed, norm {self.norm:.4g}, "
            f"{self.objective}, {self.optimizer}, model {self.model})"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from locus.view import update

        # None: nothing to draw, and a notebook shows the text.
        drawn = any(math.isfinite(value) for row in self.history for name, value in row.items() if name != "step")
        return update(self)._repr_mimebundle_() if drawn else None


@contextmanager
def written(model: Any, values: Mapping[str, Entries]) -> Iterator[None]:
    """Within the block some entries of the model have other values; then the old ones again, bit for bit."""
    originals: dict[str, Entries] = {}
    try:
        for name, entries in values.items():
            # Kept before anything is written, so that an interruption in between can be undone.
            originals[name] = Entries(entries.index, pick(model.stored(name), entries.index))
            _write(model, name, entries)
        yield
        for name, (index, value) in values.items():
            if not torch.equal(bits(pick(model.stored(name), index)), bits(value.to(model.device))):
                raise RuntimeError(
                    f"something else changed {name} while an edit of it was in place (training, or another edit that "
                    "was not taken back first); these entries are now as they were before the edit"
                )
    finally:
        for name, entries in originals.items():
            _write(model, name, entries)


def _write(model: Any, name: str, entries: Entries) -> None:
    weight = model.weights[name]
    value = entries.value.to(weight.device)
    if len(value) == weight.numel():
        model.write(name, value.view(weight.shape))
    else:
        tensor = model.stored(name)
        tensor.view(-1)[entries.index.to(weight.device).long()] = value
        model.write(name, tensor)


def pick(tensor: Tensor, index: Int[Tensor, " entry"]) -> Tensor:
    """Some entries of a contiguous tensor; all of them as a view, since an index as large as a model is slow."""
    if len(index) == tensor.numel():
        return tensor.view(-1)
    return tensor.view(-1)[index.to(tensor.device).long()]


def bits(tensor: Tensor) -> Int[Tensor, "..."]:
    """The same memory as integers, so that -0.0 ≠ 0.0 and a NaN equals a NaN of the same bits."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


@torch.no_grad()
def checksum(parameters: Iterable[tuple[str, Tensor, Bool[Tensor, "..."] | None]]) -> str:
    """SHA-256 over the names, shapes, dtypes and bits of all entries outside a mask.

    parameters: name, tensor, and its mask (True = may change, left out); None leaves nothing out.
    """
    digest = hashlib.sha256()
    for name, tensor, mask in parameters:
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        outside = bits(tensor).reshape(-1)
        if mask is not None:
            outside = outside[~mask.reshape(-1).to(outside.device)]
        digest.update(outside.cpu().numpy().data)
    return digest.hexdigest()


def _digest(record: dict, values: Path) -> str:
    """Of all that an update is read back from."""
    with values.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(record, sort_keys=True).encode())
    return digest.hexdigest()


def _settings(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Tensors that an objective carries are not settings: they are kept out of its repr, and out of the file.
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
        return {"class": type(value).__name__, "text": repr(value), "fields": fields}
    return repr(value)


def _restored(record: Any, module: Any) -> Any:
    """The settings object again, where its class is one of ours; else its text."""
    if isinstance(record, str):
        return record
    made = getattr(module, record["class"], None)
    if made is None:
        return record["text"]
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in record["fields"].items()}
    return made(**fields)
