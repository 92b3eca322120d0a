"""A long computation of many cells that can be interrupted."""

import copyreg
import hashlib
import os
import sys
import sysconfig
import time
import weakref
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from locus.models import HookedModel

SECONDS = 5.0  # between two saves at least
FORMAT = {"format": "locus sweeps"}
LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


class Partial:
    """Values of cells as they come, [metric, cell, …], kept in a file if there is a path, beside those of other sweeps.

    Raises:
        ValueError: the path is not of such a file, or cannot be written.
    """

    def __init__(self, path: str | Path | None, values: Float[Tensor, "metric cell *batch"], key: tuple) -> None:
        self.values, self._path = values, Path(path).expanduser() if path else None
        self._done = torch.zeros(values.shape[1], dtype=torch.bool)
        self._key = digest(key) if path else ""
        self._others: dict[str, Tensor] = {}
        if self._path is not None and self._path.exists():
            self._others = _read(self._path)
            self.values = self._others.pop(f"{self._key}.values", values).to(values)
            self._done = self._others.pop(f"{self._key}.done", self._done)
        try:
            self.save()  # before the work, to see that it can be
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be written, so the sweep could not be resumed: {error}") from error

    def done(self) -> list[int]:
        return self._done.nonzero().flatten().tolist()

    def forget(self) -> None:
        self._done[:] = False

    def put(self, cell: int, value: Float[Tensor, "metric *batch"]) -> None:
        self.values[:, cell] = value
        self._done[cell] = True
        if self._path and time.monotonic() - self._saved > SECONDS:
            self.save()

    def save(self) -> None:
        if self._path is None:
            return
        self._saved = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        own = {f"{self._key}.values": self.values.contiguous().cpu(), f"{self._key}.done": self._done}
        save_file({**self._others, **own}, temporary, metadata=FORMAT)
        temporary.replace(self._path)


def _read(path: Path) -> dict[str, Tensor]:
    with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
        if file.metadata() == FORMAT:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    raise ValueError(f"{path} is no file of an interrupted sweep; give the name of such a file, or of a new one")


def digest(part: Any, seen: dict[int, tuple[Any, str]] | None = None) -> str:
    """What tells two computations apart: what a part is made of, alike in every process.

    Functions by their code, their defaults and the variables that they name; objects by their class and the state that
    `copy.deepcopy` would copy. Of libraries' functions and classes the code does not count. A part with no such state
    (an open file, a generator) is never the same again.
    """
    if seen is None:
        try:
            return digest(part, {})
        except RecursionError:
            return os.urandom(32).hex()
    if id(part) in seen:
        return seen[id(part)][1]
    seen[id(part)] = part, "itself"  # the part too, so that no other one gets its id
    try:
        own, inner = _apart(part)
    except Exception:  # whatever its class raises, such as of a tensor without data
        own, inner = os.urandom(16), ()
    digests = [digest(item, seen) for item in inner]
    found = hashlib.sha256(f"{type(part).__module__}.{type(part).__qualname__} {len(digests)}:".encode())
    found.update(own)
    found.update("".join(sorted(digests) if isinstance(part, set | frozenset) else digests).encode())
    seen[id(part)] = part, found.hexdigest()
    return found.hexdigest()


def _apart(part: Any) -> tuple[bytes, Iterable[Any]]:
    """What a part is by itself, and what it is made of."""
    if part is None or isinstance(part, bool | int | float | complex | str | bytes):
        return repr(part).encode(), ()
    if isinstance(part, Tensor):
        flat = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return f"{part.dtype} {tuple(part.shape)}".encode() + flat.numpy().tobytes(), ()
    if isinstance(part, np.ndarray) and not part.dtype.hasobject:
        return f"{part.dtype} {part.shape}".encode() + part.tobytes(), ()
    if isinstance(part, ModuleType):
        return part.__name__.encode(), ()
    if isinstance(part, FunctionType | type):
        inner = _of_class(part) if isinstance(part, type) else _of_function(part)
        return f"{part.__module__}.{part.__qualname__}".encode(), inner
    if isinstance(part, CodeType):
        return part.co_code, (part.co_consts, part.co_names)
    if isinstance(part, MethodType):
        return b"", (part.__func__, part.__self__)
    if isinstance(part, weakref.ref):
        return b"", (part(),)
    if isinstance(part, HookedModel):
        return b"", (part.bridge,)
    if isinstance(part, PreTrainedTokenizerBase):
        return repr(sorted(part.get_vocab().items())).encode(), ()
    if isinstance(part, torch.nn.Module):  # not the hooks and caches that libraries set on the way
        if _of_library(type(part).__module__):
            plain = {n: v for n, v in vars(part).items() if n[0] != "_" and isinstance(v, bool | int | float | str)}
            return b"", (type(part), plain, part._parameters, part._buffers, part._modules)
        return b"", (type(part), {n: v for n, v in vars(part).items() if not (n[0] == "_" and "hook" in n)})
    if type(part) is dict or isinstance(part, MappingProxyType):
        return b"", [item for pair in part.items() for item in pair]
    if type(part) in (list, tuple) or isinstance(part, set | frozenset | KeysView | ValuesView | ItemsView):
        return b"", part
    reduce = copyreg.dispatch_table.get(type(part))
    kept: Any = reduce(part) if reduce else part.__reduce_ex__(4)
    if isinstance(kept, str):  # by its name; a cached function is its own
        return kept.encode(), (getattr(part, "__wrapped__", None),)
    return b"", [*kept[:3], *(list(items or ()) for items in kept[3:5])]


def _of_function(function: FunctionType) -> tuple:
    # What checks types draws a number for each function that it wraps.
    checked = any(name in function.__code__.co_filename for name in ("jaxtyping", "@beartype"))
    if checked and hasattr(function, "__wrapped__"):
        return (function.__wrapped__,)
    # Of a library's function only what it encloses.
    variables = {} if _of_library(function.__globals__.get("__name__")) else dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing assigned yet
            variables[name] = cell.cell_contents
    settings = function.__defaults__, function.__kwdefaults__, vars(function)
    return function.__code__, *settings, _variables(_names(function.__code__), variables)


def _names(code: CodeType) -> set[str]:
    """All names in a function's code, also those of the functions and comprehensions in it."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _variables(names: set[str], among: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of these names; of a module, its own variables of these names."""
    found = {name: among[name] for name in sorted(names) if name in among}
    return {
        name: _variables(names - {name}, vars(value))
        if isinstance(value, ModuleType) and not _of_library(value.__name__)
        else value
        for name, value in found.items()
    }


def _of_class(part: type) -> tuple:
    if _of_library(part.__module__):
        return ()
    no_matter = ("__dict__", "__weakref__", "__annotations__", "__doc__", "_abc_impl")
    # Of properties, static methods and class methods, the function.
    return part.__bases__, {
        name: getattr(value, "fget", None) or getattr(value, "__func__", value)
        for name, value in vars(part).items()
        if name not in no_matter
    }


def _of_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return package != "__main__" and (
        package in sys.stdlib_module_names or path.startswith(LIBRARIES) or package == "locus"
    )
