"""locus: locate knowledge in a language model, edit only what you located, and measure whether locating helped.

The public names are those of `__init__.pyi`. Each is imported when it is first used, so that `import locus` and
`locus --help` do not wait for torch.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
# Public name → the module that it is in; "locus" for modules that are public themselves.
_HOME = {name.name: line.module for line in _STUB.body if isinstance(line, ast.ImportFrom) for name in line.names}


class _Package(ModuleType):
    """A package whose public functions go before its modules of the same name (evaluate, localize, unlearn, …)."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'locus' has no attribute {name!r}")
        home = _HOME[name]
        value = import_module(f"locus.{name}") if home == "locus" else getattr(import_module(home), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported module as an attribute of its package, where it would hide the function.
        if not isinstance(value, ModuleType) or _HOME.get(name, "locus") == "locus":
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(_HOME)


sys.modules[__name__].__class__ = _Package
