"""The studies that fit a model: minutes on `tiny`, half an hour to two hours on a real one, a night with `full`."""

from dataclasses import replace

from locus.attacks import ATTACKS, FullRelearn, LoRARelearn, Paraphrase, Unrelated
from locus.facts import Facts, biographies, capitals
from locus.runs import Plan, Planting
from locus.unlearn import NPO, WGA


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
