"""Ensembles: several localizers as one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from locus.components import Components
from locus.localize.attribution import AttributionPatching
from locus.localize.interventions import ALL_KINDS, Knockout


@dataclass(frozen=True)
class MeanRank:
    """The mean rank that several localizers give a component: (1/M) Σ_m rank_m(u) / n, for each fact.

    Ranks ascend, ties share theirs, so scores are in (0, 1] and 1 is the component that every method puts first. Only
    their order means anything: 0.5 is the middle, not "no effect".

    Attributes:
        methods: the localizers, two or more.
    """

    methods: tuple[Any, ...] = (AttributionPatching(), Knockout())
    UNIT: ClassVar[str] = "mean rank, 1 = first"

    def __post_init__(self) -> None:
        if len(self.methods) < 2:
            raise ValueError(f"MeanRank takes at least two methods, got {len(self.methods)}")
        if not self.KINDS:
            kinds = "; ".join(f"{type(method).__name__}: {', '.join(method.KINDS)}" for method in self.methods)
            raise ValueError(f"these methods have no kind of component in common ({kinds})")

    @property
    def KINDS(self) -> tuple[str, ...]:
        """The kinds of component that every method scores."""
        return tuple(kind for kind in ALL_KINDS if all(kind in method.KINDS for method in self.methods))

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        ranks = []
        for method in self.methods:
            values = method.score(model, pairs, components, metric, progress)
            ranks.append(stats.rankdata(values.detach().cpu().numpy(), axis=1))
        return torch.as_tensor(sum(ranks) / len(ranks) / len(components))
