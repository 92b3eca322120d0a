"""Progress of long work: a bar with the time left in a terminal or a notebook, plain lines elsewhere."""

import sys
import time
from typing import Any

from tqdm import auto, std

SECONDS = 15.0  # from one plain line to the next


def lively() -> bool:
    """Whether a bar can be drawn. Elsewhere, in a log or a pipe, it would leave control characters."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def tqdm(*args: Any, **kwargs: Any) -> Any:
    """tqdm's bar where it can be drawn, else a plain line now and then; same arguments."""
    return (auto.tqdm if lively() else _Lines)(*args, **kwargs)


class _Lines(std.tqdm):
    """A line every 15 seconds in the place of a bar; short work says nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        often = {"delay": SECONDS, "mininterval": SECONDS, "maxinterval": SECONDS, "miniters": 1}
        super().__init__(*args, **kwargs | often | {"file": sys.stderr, "leave": False})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        state = self.format_dict
        if msg is None and self.n and self.total:  # an empty message wipes a bar
            left = state["elapsed"] / self.n * (self.total - self.n)
            what = f"{self.desc.rstrip(': ')}: " if self.desc else ""
            print(f"{what}{self.n / self.total:.0%}; about {_duration(left)} left", file=sys.stderr, flush=True)
        return False


class Progress:
    """Counts work, in runs. `total` may change on the way; what is there already takes no time and counts as none."""

    def __init__(self, total: int, *, enabled: bool = True, seconds: float = SECONDS) -> None:
        self._lively = enabled and lively()
        self._plain = enabled and not self._lively
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self._bar = auto.tqdm(total=total, bar_format=form, disable=not self._lively, dynamic_ncols=True)
        self._total: float = total
        self._done, self._stage = 0.0, ""
        self._seconds, self._start, self._last = seconds, time.monotonic(), time.monotonic()

    def stage(self, name: str) -> None:
        self._stage = name
        self._bar.set_description(name)
        self.say(name) if self._plain else None

    def extend(self, work: int | float) -> None:
        """More is to be done (or less, if negative)."""
        self._total = self._bar.total = self._total + work
        self._bar.refresh()

    def done(self, what: str, work: int | float = 1) -> None:
        """Some of it is done. work: as that of so many runs."""
        self._done += work
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(work)
        now = time.monotonic()
        if self._plain and now - self._last >= self._seconds:
            self._last = now
            left = (now - self._start) / self._done * (self._total - self._done)
            share = self._done / self._total if self._total else 1.0
            self.say(f"{self._stage}: {share:.0%}, {what}; about {_duration(left)} left")

    def say(self, text: str) -> None:
        """A line that does not break the bar."""
        self._bar.write(text, file=sys.stderr) if self._lively else print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
