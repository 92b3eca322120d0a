"""A run folder: results that are whole or absent, and of one study's settings.

Each result is one JSON file with the hash of the settings and a checksum of its name and numbers, written to a
temporary name and renamed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG = 60  # letters of a value that is shown whole


@dataclass(frozen=True)
class Folder:
    """Results of a study on disk, each one checked when it is read."""

    path: Path
    hash: str
    say: Callable[[str], None]

    def load(self, name: str) -> dict[str, Any] | None:
        """The result of that name, or None when there is none that can be trusted (said aloud)."""
        path = self.path / "runs" / name
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            result = content["result"]
            if content["settings"] != self.hash:
                reason = "belongs to other settings"
            elif content["checksum"] != _digest([name, result]):
                reason = "was changed after it was written"
            else:
                return result
        except (OSError, ValueError, KeyError, TypeError):
            reason = "is damaged"
        self.say(f"{path} {reason}; it is computed again.")
        return None

    def save(self, name: str, result: dict[str, Any]) -> None:
        content = {"settings": self.hash, "checksum": _digest([name, result]), "result": result}
        write(self.path / "runs" / name, lambda path: path.write_text(json.dumps(content), encoding="utf-8"))

    def note(self, record: dict[str, Any]) -> None:
        """Write settings.json again, with what was found out on the way."""
        write(
            self.path / "settings.json",
            lambda path: path.write_text(json.dumps(record, indent=2), encoding="utf-8"),
        )


def write(path: Path, put: Callable[[Path], Any]) -> None:
    """Let `put` write a temporary file, then give it its name: there is the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        put(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def enter(out: Path, settings: dict[str, Any], record: dict[str, Any], say: Callable[[str], None]) -> Folder:
    """Make the run folder, or enter one of the same settings."""
    path, digest = out / "settings.json", _digest(settings)
    if out.is_dir() and any(out.iterdir()) and not path.is_file():
        raise ValueError(f"{out} is not empty and holds no study. Choose another folder with --out (out=).")
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            old = found["settings"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path} is damaged, so nothing says which study {out} holds. Choose another folder with --out (out=), "
                f"or delete {out} to start again."
            ) from None
        # A study that ended before its first result, on a mistake in its settings, is started anew.
        if _digest(old) != digest and any((out / "runs").glob("*.json")):
            names = sorted(name for name in {*old, *settings} if old.get(name) != settings.get(name))
            said = [f"{name} was {_differs(old.get(name), settings.get(name))}" for name in names[:3]]
            said += [f"{len(names) - 3} more"] * (len(names) > 3)
            raise ValueError(
                f"{out} holds a study of other settings: {'; '.join(said)}. Choose another folder with --out "
                f"(out=), go back to those settings, or delete {out} to start again."
            )
        # What an earlier start found out (chosen rates) is found again from the runs, so nothing is lost.
    for left in (out / "runs").glob(".*.tmp"):
        left.unlink(missing_ok=True)  # of a process that was killed while it wrote
    folder = Folder(out, digest, say)
    folder.note(record)
    return folder


def _differs(old: Any, new: Any) -> str:
    """The old value and the new one; of long lists their lengths, or the first entry that is another."""
    if isinstance(old, list) and isinstance(new, list) and max(len(str(old)), len(str(new))) > LONG:
        if len(old) != len(new):
            return f"a list of {len(old)} and is now one of {len(new)}"
        i = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
        return f"another list of {len(old)}: entry {i} was {_differs(old[i], new[i])}"
    return f"{_short(old)} and is now {_short(new)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONG else text[: LONG - 1] + "…"


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes `target` when the block ends well, and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield new
        new.chmod(0o755)
        try:
            os.replace(new, target)
        except OSError:
            # Another process finished the same directory first; a broken one without config.json is an error.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
