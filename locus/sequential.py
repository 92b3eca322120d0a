"""Looks: when a study that adds seeds until it is decided may judge them, and how strictly.

Judging again and again after more seeds finds something in the end, whether it is there or not: 15% of the time, not
5%, at the five looks of Looks(). So the looks, the most seeds (the cap) and how the error is shared out are fixed
before the first run, and each look tests at a level of its own, so that over all of them together a false claim is made
at most alpha of the time.

A spending function says how much of alpha may be used up when n of at most N seeds are in (Lan & DeMets 1983), with
t = n / N:

    obrien-fleming   2 - 2 Phi(z(1 - alpha / 2) / sqrt(t))     next to nothing early, almost all of it at the cap
    pocock           alpha ln(1 + (e - 1) t)                   evenly, so it stops earlier and finds less at the cap

The level of look k is the p-value that lets just that much of alpha be used up by then among studies of nothing but
noise that no earlier look has ended. Seeds are few and tests are Student's, for which the usual boundaries, those of
normal statistics, claim too much (Rom & McTague 2020; up to 5.7% instead of 5% in a study from 3 to 8 seeds). So the
joint distribution of the p-values of all looks is that of STUDIES simulated studies, always the same ones. Held at
these levels, the tests of all looks together make a false claim alpha of the time, and intervals at these levels
together cover as often as they say (repeated confidence intervals, Jennison & Turnbull 1989).

That is so for normal differences. Measured with Looks() and its two spendings for other ones, instead of 5%: uniform
5.3% and 6.5%, Student's t with 4 degrees of freedom 4.5% and 3.9%, exponential 10.8% and 14.6%. Early looks at skewed
data mislead most, one reason why little is spent on them by default.

Left out: stopping for futility, which costs power and decides nothing.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import special, stats

from locus.require import COUNT, LEVEL, one_of, require

STUDIES = 1_000_000


@dataclass(frozen=True)
class Looks:
    """The plan of a study that adds seeds until it is decided.

    By default, where there is no difference and the paired sd is the bound, 98% of studies end as equivalent, after 14
    seeds on average (12 fixed ones: 89%); with an sd of 1.5 times the bound it is 74% and 18 seeds.

    at: numbers of seeds at which it is judged; the last one is the cap
    spending: "obrien-fleming" or "pocock", how the error is shared out over the looks
    """

    at: tuple[int, ...] = (5, 8, 12, 16, 20)
    spending: str = "obrien-fleming"

    def __post_init__(self) -> None:
        numbers = isinstance(self.at, tuple) and self.at and all(map(COUNT.fits, self.at))
        if not numbers or self.at[0] < 3 or any(a >= b for a, b in zip(self.at, self.at[1:], strict=False)):
            raise ValueError(
                f"Looks got at={self.at!r}; expected growing numbers of seeds, the first one 3 or more, "
                "in a tuple, like (5, 8, 12)."
            )
        require(one_of(("obrien-fleming", "pocock")), spending=self.spending)

    @classmethod
    def until(cls, cap: int, spending: str = "obrien-fleming") -> "Looks":
        """Looks at 5, 8 and then every 4 seeds up to a cap."""
        require(COUNT, cap=cap)
        return cls((*(n for n in (5, 8, *range(12, cap, 4)) if n < cap - 1), cap), spending)

    @property
    def cap(self) -> int:
        """The most seeds."""
        return self.at[-1]

    def next(self, n: int) -> int | None:
        """The number of seeds to go on to from n; None at the cap."""
        return next((look for look in self.at if look > n), None)

    def level(self, n: int, alpha: float) -> float:
        """The one-sided level at which to test with n seeds, so that all looks up to the cap spend alpha.

        A number of seeds that is no planned look (a study that ran out of time) counts as one more after the planned
        ones before it; that is sound as long as the numbers themselves had no part in stopping there.
        """
        require(LEVEL, alpha=alpha)
        if not 2 <= n <= self.cap:
            raise ValueError(
                f"Looks were planned at {self.at} seeds, and the table has {n}. Alpha is used up at {self.cap}: judge "
                "the first of them only, or plan a new study with a higher cap and new seeds."
            )
        at = self.at if n in self.at else (*(look for look in self.at if look < n), n)
        return levels(at, self.cap, alpha, self.spending)[at.index(n)]


def spent(t: float, alpha: float, spending: str) -> float:
    """How much of a one-sided alpha may be used up at the fraction t of the seeds."""
    if spending == "pocock":
        return alpha * math.log(1 + (math.e - 1) * t)
    return float(2 * stats.norm.sf(stats.norm.isf(alpha / 2) / math.sqrt(t)))


@functools.cache
def levels(at: tuple[int, ...], cap: int, alpha: float, spending: str) -> tuple[float, ...]:
    """The one-sided level of each look at the numbers of seeds in `at`, for a study of at most `cap` seeds."""
    p = _noise(at)
    goes_on = np.ones(STUDIES, dtype=bool)
    found: list[float] = []
    for look, n in enumerate(at):
        part = spent(n / cap, alpha, spending)
        ended = max(0, round(part * STUDIES) - int((~goes_on).sum()))
        # Nothing comes before the first look, so that its level is known.
        found.append(float(np.partition(p[look][goes_on], ended)[ended]) if look else part)
        goes_on &= p[look] >= found[-1]
    return tuple(found)


@functools.lru_cache(maxsize=2)
def _noise(at: tuple[int, ...]) -> Float[np.ndarray, "look study"]:
    """One-sided p-values of Student's t at each look, in studies whose differences are independent and normal."""
    rng = np.random.default_rng(0)
    p = np.empty((len(at), STUDIES), dtype=np.float32)
    total, squares, before = np.zeros(STUDIES), np.zeros(STUDIES), 0
    for look, n in enumerate(at):
        # Of m new differences only the sum and the sum of squares matter: z sqrt(m) and z^2 + chi^2 of m - 1.
        new, z = n - before, rng.standard_normal(STUDIES)
        total += z * math.sqrt(new)
        squares += z**2 + (rng.chisquare(new - 1, STUDIES) if new > 1 else 0.0)
        error = np.sqrt((squares - total**2 / n) / (n - 1) / n)
        p[look] = special.stdtr(n - 1, -total / n / error)
        before = n
    return p
