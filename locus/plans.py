"""The plan of a study, which holds every choice; and those that fit a model.

They take minutes on `tiny`, half an hour to two hours on a real one, a night with `full`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from locus.attacks import ATTACKS, Attack, FullRelearn, LoRARelearn, Paraphrase, Unrelated
from locus.components import LABELS
from locus.evaluate import Strength
from locus.facts import Facts, biographies, capitals
from locus.localize import Activations, AttributionPatching, Method, require_kinds
from locus.require import (
    COUNT,
    NUMBER,
    POSITIVE,
    SHARE,
    TOLERANCE,
    Wanted,
    instance,
    one_of,
    require_fields,
    require_objects,
    several,
    some,
)
from locus.sequential import Looks
from locus.unlearn import NPO, WGA, MatchMLP
from locus.unlearn.objectives import Internal, Objective, Preference

KINDS: tuple[Strength, ...] = get_args(Strength)
RATES = (("masked", (7e-4, 1.4e-3, 2.8e-3)), ("kind", (2.5e-4, 5e-4, 1e-3)), ("all", (1e-4, 2e-4, 4e-4)))

# Arms of a study of planted knowledge; see `Planting`.
STATES = ("none", "revert", "retain", "pretrained")  # without an update: θ_o or the model as it is, θ_r, θ_r, θ_p
PLANTED_ARMS = ("oracle", "random", "random-uniform", "complement", "kind", "all", "top", "bottom", "revert")


@dataclass(frozen=True)
class Planting:
    """Knowledge that the study plants in a known region V first, so that the true location is certain.

    θ_p, the model → θ_r, all parameters trained on the facts that are kept → θ_o, only V trained on the facts to forget
    (`inject.plant`). Unlearning begins at θ_o.

    kind, share: V is a random `share` of the parameters of these components, drawn by the seed ("weight": single
        weights of attention and MLPs).
    replay: whether the kept facts stay in the loss while V learns; without it V's learning damages them.
    strength: extraction strength at which a stage is done.
    arms: of PLANTED_ARMS. oracle = V; random = disjoint from V, as large, matched by layer; random-uniform = the same
        in any layer; complement = all of the kind but V; kind, all = all of the kind, all parameters; top, bottom = of
        each localizer, as large as V; revert = V set back to θ_r, with no training: the ceiling.
    attacked: arms whose first draw is attacked with each of `attacks`, where they reach what all of them can forget
        (matched) and where they forget most with 95% of the retain strength left (best); θ_r and θ_o are attacked too.
    attacked_objectives: the updates of so many of the plan's objectives are attacked, the first ones; None = of all.
    """

    kind: str = "value"
    share: float = 0.1
    replay: bool = True
    strength: float = 0.95
    arms: tuple[str, ...] = ("oracle", "random", "all", "top", "revert")
    attacks: tuple[Any, ...] = ()
    attacked: tuple[str, ...] = ("oracle", "random")
    attacked_objectives: int | None = None

    def __post_init__(self) -> None:
        require_fields(
            self,
            (one_of((*LABELS, "weight")), "kind"),
            (SHARE, "share strength"),
            (some(one_of(PLANTED_ARMS), f"a tuple of some of {', '.join(PLANTED_ARMS)}"), "arms"),
            (COUNT.or_none, "attacked_objectives"),
        )
        require_objects(Attack, "FullRelearn()", attacks=self.attacks)
        if not {"oracle", "random"} <= set(self.arms):
            raise ValueError(f"A planting compares oracle with random, so it needs both arms; got {self.arms}.")
        edited = tuple(arm for arm in self.arms if arm not in STATES)
        if not several(self.attacked) or set(self.attacked) - set(edited):
            raise ValueError(f"attacked must be a tuple of some of the edited arms, {edited}; got {self.attacked!r}.")


@dataclass(frozen=True)
class Plan:
    """Every choice of a study besides the model and the facts. All of it is written to settings.json.

    localizers, objectives: method objects; each localizer gives a top, a bottom and `draws` random masks a seed.
        MatchMLP needs a planting, whose θ_r is what it matches: give it as MatchMLP(), without targets.
    kind, budget: which components are located, and the fraction of their parameters that a mask may change.
    seeds: a seed is a new split of the facts, new regions, new controls and a new order of the data.
    forget, part: facts to forget; facts at most in each of retain, holdout and other.
    steps: of an update, with a checkpoint after each of the first `dense` ones and after each `every`-th from there on.
    strength: what forget and retain strength are made of. "probability" (relative to the original model) suits short
        answers of natural facts, "extraction" answers of several tokens; the other one is in the table too.
    rates: learning rates to try for each type of arm (masked = top, bottom, random; kind; all); a best rate at an edge
        extends the grid by the ratio of its neighbours, at most `extend` times. Of rates within `near` of the best mean
        AUES the lowest is taken: its checkpoints are closer together. Tuned on the split of `tuning_seed`;
        the rate of masks on the top and one random mask of each of the first `tuning_localizers` localizers.
    scan_layers: how many layers, evenly spaced, are edited alone (None = every layer), in each of `scan_seeds` seeds,
        for `scan_steps` steps at `scan_rate`, untuned.
    bound: a difference of AUES inside ± bound counts as none.
    planting: the facts are not what the model knows, but are planted in a known region first, and the arms are those of
        the planting; `kind` and `budget` are then those of the region.
    looks: the study is judged after each of these numbers of seeds, and ends when it is decided or `seeds` are used up.
    """

    localizers: tuple[Any, ...] = (AttributionPatching(), Activations())
    objectives: tuple[Any, ...] = (NPO(),)
    kind: str = "neuron"
    budget: float = 0.05
    draws: int = 19
    seeds: tuple[int, ...] = (0, 1, 2)
    forget: int = 16
    part: int = 20
    steps: int = 36
    dense: int = 18
    every: int = 3
    batch_size: int | None = 8
    strength: Strength = "extraction"
    rates: tuple[tuple[str, tuple[float, ...]], ...] = RATES
    near: float = 0.02
    extend: int = 3
    tuning_seed: int = 1000
    tuning_localizers: int = 2
    wrong: int = 2
    scan_layers: int | None = None
    scan_seeds: int = 1
    scan_steps: int = 20
    scan_rate: float = 1e-3
    bound: float = 0.02
    threads: int = 1
    planting: Planting | None = None
    looks: Looks | None = None

    def __post_init__(self) -> None:
        require_fields(
            self,
            (one_of(tuple(LABELS)), "kind"),
            (one_of(KINDS), "strength"),
            (SHARE, "budget"),
            (COUNT, "draws forget part steps every tuning_localizers scan_steps threads"),
            (COUNT.or_none, "batch_size scan_layers"),
            (NUMBER, "dense extend tuning_seed wrong scan_seeds"),
            (POSITIVE, "bound scan_rate"),
            (TOLERANCE, "near"),
            (some(NUMBER, "a tuple of ints, 0 or more, like (0, 1, 2)"), "seeds"),
            (Wanted(_grids, f"grids of different rates for masked, kind and all, like {RATES}"), "rates"),
            (instance(Planting, "Planting()").or_none, "planting"),
            (instance(Looks, "Looks((5, 8, 12))").or_none, "looks"),
        )
        require_objects(Method, "AttributionPatching()", localizers=self.localizers)
        require_objects(Objective | Preference | Internal, "NPO()", objectives=self.objectives)
        self._require_what_fits()

    def _require_what_fits(self) -> None:
        place = self.planting
        for field in ("localizers", "objectives")[place is not None :]:
            if not getattr(self, field):
                raise ValueError(f"A study needs at least one of its {field}; got none.")
        named(self.localizers), named(self.objectives)
        if place is None or {"top", "bottom"} & set(place.arms):
            for method in self.localizers:
                require_kinds(method, [place.kind if place else self.kind])
        if place is None and any(isinstance(objective, MatchMLP) for objective in self.objectives):
            raise ValueError(
                "MatchMLP matches a model that never learned the facts to forget, which only a planting has: give one, "
                "planting=Planting(), or take another objective."
            )
        if len(set(self.seeds)) < len(self.seeds) or self.tuning_seed in self.seeds:
            raise ValueError(f"Seeds must differ, also from tuning_seed={self.tuning_seed}; got {self.seeds}.")
        if self.looks and self.looks.cap != len(self.seeds):
            raise ValueError(f"Looks up to {self.looks.cap} seeds need as many seeds; got {len(self.seeds)}.")

    @property
    def checkpoints(self) -> list[int]:
        return sorted({*range(min(self.dense, self.steps)), *range(self.dense, self.steps, self.every), self.steps})


def named(methods: Sequence[Any]) -> dict[str, Any]:
    """Methods by the names that tables give them: the class name, or the whole repr where that is not unique."""
    classes = [type(method).__name__ for method in methods]
    names = [n if classes.count(n) == 1 else repr(m) for n, m in zip(classes, methods, strict=True)]
    if len(set(names)) < len(names):
        raise ValueError(f"The same method is given twice: {names}.")
    return dict(zip(names, methods, strict=True))


def _grids(rates: Any) -> bool:
    try:
        names, grids = zip(*rates, strict=True)
    except (TypeError, ValueError):
        return False
    grid = some(POSITIVE, "")
    fit = all(grid.fits(rates) and len(set(rates)) == len(rates) for rates in grids)
    return names == tuple(name for name, _ in RATES) and fit


def comparison_plan(model: str, *, full: bool = False) -> Plan:
    """Of `study.compare`: located components against controls, of facts that the model knows."""
    if model == "tiny":
        return Plan(seeds=tuple(range(12)), steps=90, dense=60) if full else Plan()
    real = Plan(
        strength="probability",
        seeds=(0,),
        draws=3,
        part=16,
        steps=20,
        dense=6,
        every=4,
        rates=(("masked", (5e-5, 1e-4, 2e-4)), ("kind", (5e-6, 1e-5)), ("all", (2.5e-6, 5e-6))),
        tuning_localizers=1,
        scan_layers=10,
        scan_steps=15,
        scan_rate=2e-4,
        threads=2,
    )
    if full:
        return replace(real, seeds=tuple(range(5)), draws=5, steps=40, dense=20, tuning_localizers=2, scan_layers=None)
    return real


def planting_plan(model: str, *, full: bool = False) -> Plan:
    """Of a controlled study: facts that the model does not know are planted in a known region first."""
    if model == "tiny":
        plan = Plan(
            objectives=(WGA(), NPO()),
            draws=2,
            seeds=tuple(range(5)),
            forget=24,
            batch_size=None,
            rates=(("masked", (2.8e-3, 5.6e-3, 1.12e-2)), ("kind", (2.5e-4, 5e-4, 1e-3)), ("all", (5e-5, 1e-4, 2e-4))),
            planting=Planting(attacks=ATTACKS),
        )
        return replace(plan, seeds=tuple(range(20)), draws=5, steps=90, dense=60) if full else plan
    attacks = (
        *(FullRelearn(lr=lr, steps=16) for lr in (3e-5, 3e-4)),
        LoRARelearn(lr=3e-3, steps=16),
        Unrelated(lr=1e-4, steps=8),
        Paraphrase(),
    )
    # By probability: NPO lets go of an answer once its likelihood is low, however many of its tokens are still right
    # after the lost ones. No rate took more than 0.7 to 0.8 of the extraction strength without wrecking the model, so
    # the best one was at the edge of every grid; by probability all best rates are inside, and the steps are small.
    real = Plan(
        localizers=(),
        objectives=(WGA(), NPO()),
        draws=1,
        seeds=(0, 1, 2),
        forget=18,
        part=20,
        steps=24,
        dense=24,
        batch_size=None,
        strength="probability",
        rates=(("masked", (1e-3, 2e-3, 4e-3)), ("kind", (5e-5, 1e-4)), ("all", (3e-5, 6e-5, 1.2e-4))),
        planting=Planting(arms=("oracle", "random", "all", "revert"), attacks=attacks, attacked_objectives=1),
    )
    return replace(real, seeds=tuple(range(5)), draws=3, steps=40, dense=20) if full else real


def planted_facts(model: str) -> tuple[Facts, Facts]:
    """Facts that the model does not know, to be planted, and facts that it knows."""
    if model == "tiny":
        return biographies(40, draw=1), biographies()
    return biographies(16), capitals()
