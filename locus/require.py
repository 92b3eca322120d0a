"""Arguments are refused before any work: what came, what was expected, and the way out."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Wanted(NamedTuple):
    """What an argument may be: a test of it, and the same in words."""

    fits: Callable[[Any], bool]
    words: str

    @property
    def or_none(self) -> "Wanted":
        return Wanted(lambda x: x is None or self.fits(x), f"{self.words}, or None")


def _whole(x: Any) -> bool:
    # Only Python's own: numpy's would be lost in JSON, and True is no number.
    return isinstance(x, int) and not isinstance(x, bool)


def _finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


COUNT = Wanted(lambda x: _whole(x) and x >= 1, "an int, 1 or more")
NUMBER = Wanted(lambda x: _whole(x) and x >= 0, "an int, 0 or more")
POSITIVE = Wanted(lambda x: _finite(x) and x > 0, "a finite number above 0")
TOLERANCE = Wanted(lambda x: _finite(x) and x >= 0, "a finite number, 0 or more")
SHARE = Wanted(lambda x: _finite(x) and 0 < x <= 1, "a fraction in (0, 1]")
LEVEL = Wanted(lambda x: _finite(x) and 0 < x < 1, "a fraction in (0, 1)")


def one_of(names: Sequence[str]) -> Wanted:
    return Wanted(lambda x: isinstance(x, str) and x in names, f"one of {', '.join(names)}")


def some(wanted: Wanted, words: str) -> Wanted:
    """A tuple of at least one."""
    return Wanted(lambda xs: several(xs) and len(xs) > 0 and all(map(wanted.fits, xs)), words)


def instance(kind: type, example: str) -> Wanted:
    return Wanted(lambda x: isinstance(x, kind), f"a {kind.__name__}, like {example}")


def several(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def require(wanted: Wanted, **values: Any) -> None:
    """ValueError for the first of the values, by name, that is not what is wanted."""
    for name, value in values.items():
        if not wanted.fits(value):
            raise ValueError(f"{name} must be {wanted.words}; got {value!r}.")


def require_fields(owner: Any, *rules: tuple[Wanted, str]) -> None:
    """The same of attributes: what is wanted, with the names of those that must be it."""
    for wanted, names in rules:
        require(wanted, **{name: getattr(owner, name) for name in names.split()})


def require_objects(kind: Any, example: str, **values: Any) -> None:
    """ValueError unless each value is a tuple of objects of that kind, none of them a class or a name.

    kind: for isinstance. example: an object of the kind, as it is written.
    """
    for name, given in values.items():
        if not several(given):
            raise ValueError(f"{name} must be a tuple, also of one: give a tuple, like ({example},); got {given!r}.")
        for value in given:
            if isinstance(value, type):
                raise ValueError(f"{name} got the class {value.__name__}; give an instance, {value.__name__}().")
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be objects like {example}; got {value!r}.")
