"""A long computation of many cells that can be interrupted."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SECONDS = 5.0  # between two saves at least


class Partial:
    """Values of cells as they come, [metric, cell, …], kept in a file if there is a path.

    Raises:
        ValueError: the file is of another computation.
    """

    def __init__(self, path: str | Path | None, values: Float[Tensor, "metric cell *batch"], key: tuple) -> None:
        self.values, self._path, self._saved = values, Path(path) if path else None, time.monotonic()
        self._done = torch.zeros(values.shape[1], dtype=torch.bool)
        self._key = _digest(key) if path else ""
        if self._path is None or not self._path.exists():
            return
        with safe_open(self._path, framework="pt") as file:
            if (file.metadata() or {}).get("sweep") != self._key:
                raise ValueError(
                    f"{self._path} is of another sweep (model, prompts, clean activations, cells, metric or settings "
                    "differ); give another file, or remove it"
                )
            self.values, self._done = file.get_tensor("values").to(values), file.get_tensor("done")

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
        tensors = {"values": self.values.contiguous().cpu(), "done": self._done}
        save_file(tensors, temporary, metadata={"sweep": self._key})
        temporary.replace(self._path)


def _digest(key: tuple[Any, ...]) -> str:
    digest = hashlib.sha256()
    for part in key:
        if isinstance(part, Tensor):
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.detach().contiguous().cpu().view(torch.uint8).numpy().data)
        else:
            digest.update(json.dumps(part).encode())
    return digest.hexdigest()
