"""A long computation of many cells that can be interrupted."""

import hashlib
import inspect
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SECONDS = 5.0  # between two saves at least
FORMAT = {"format": "locus sweeps"}


class Partial:
    """Values of cells as they come, [metric, cell, …], kept in a file if there is a path, beside those of other sweeps.

    Raises:
        ValueError: the path is not of such a file.
    """

    def __init__(self, path: str | Path | None, values: Float[Tensor, "metric cell *batch"], key: tuple) -> None:
        self.values, self._path, self._saved = values, Path(path) if path else None, time.monotonic()
        self._done = torch.zeros(values.shape[1], dtype=torch.bool)
        self._key = digest(key) if path else ""
        self._others: dict[str, Tensor] = {}
        if self._path is None or not self._path.exists():
            return
        kept = _read(self._path)
        self.values = kept.pop(f"{self._key}.values", values).to(values)
        self._done = kept.pop(f"{self._key}.done", self._done)
        self._others = kept

    def done(self) -> list[int]:
        return self._done.nonzero().flatten().tolist()

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
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() == FORMAT:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        pass
    raise ValueError(f"{path} is no file of an interrupted sweep; give the name of such a file, or of a new one")


def digest(part: Any) -> str:
    """What tells two computations apart: numbers, texts, tensors, dataclasses, and functions by code and variables.

    Of other objects only the class counts: what is in them may differ from process to process.
    """
    found = hashlib.sha256()
    _feed(found.update, part, set())
    return found.hexdigest()


def _feed(update: Callable[[bytes], None], part: Any, seen: set[int]) -> None:
    inner: Any = ()
    if isinstance(part, Tensor):
        update(f"{part.dtype} {tuple(part.shape)}".encode())
        update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(part, np.ndarray | np.generic):
        inner = str(part.dtype), part.shape, part.tolist()
    elif part is None or isinstance(part, bool | int | float | complex | str | bytes):
        update(repr(part).encode())
    elif isinstance(part, Mapping):
        inner = [item for pair in part.items() for item in pair]
    elif isinstance(part, list | tuple):
        inner = part
    elif isinstance(part, set | frozenset):
        inner = sorted(map(repr, part))
    elif isinstance(part, partial):
        inner = part.func, part.args, part.keywords
    elif isinstance(part, MethodType):
        inner = part.__func__, part.__self__
    elif isinstance(part, CodeType):
        inner = part.co_code, part.co_consts, part.co_names
    elif isinstance(part, FunctionType):
        update(f"{part.__module__}.{part.__qualname__}".encode())
        inner = () if id(part) in seen else _of_function(part)
        seen.add(id(part))
    elif not isinstance(part, type | torch.nn.Module) and id(part) not in seen:
        seen.add(id(part))
        if is_dataclass(part) or callable(part):
            inner = vars(type(part)).get("__call__"), getattr(part, "__dict__", {})
    update(f"{type(part).__qualname__} {len(inner)}:".encode())
    for item in inner:
        _feed(update, item, seen)


def _of_function(function: FunctionType) -> tuple:
    variables = inspect.getclosurevars(function)
    # A function of another module is a library's; those beside it are the user's own.
    named = {
        name: value
        for name, value in variables.globals.items()
        if not isinstance(value, FunctionType) or value.__module__ == function.__module__
    }
    return function.__code__, function.__defaults__, function.__kwdefaults__, dict(variables.nonlocals), named
