"""Planted knowledge in a study: where a seed's facts are put, the arms that follow from it, and the attacks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from locus.attacks import attack, recovery, worst
from locus.evaluate import evaluate
from locus.facts import Facts, FactSplit, encode
from locus.inject import elsewhere, plant, region
from locus.localize import given, localize, localize_weights
from locus.masks import Mask, ParameterMask
from locus.models import HookedModel
from locus.plans import STATES, Plan, Planting, named
from locus.runs import Case, Run, smaller, steps, update_of

KNOWN = 60  # facts of the model's own on which planting is watched


def _planting(plan: Plan) -> Planting:
    assert plan.planting is not None
    return plan.planting


def prepare(model: HookedModel, facts: Facts, other: Facts | None, plan: Plan, seed: int, *, draws: int) -> Case:
    """Plant the facts to forget of a seed in a region of its own, and choose the masks of all arms."""
    planting = _planting(plan)
    split = facts.split(forget=plan.forget, seed=seed)
    # The model's own facts may be of the same relations: these are of other subjects, and only measured.
    split = replace(split, other=other or Facts())
    place = region(model, planting.kind, planting.share, seed=seed)
    known = split.other[:KNOWN]
    planted = plant(model, split, place, replay=planting.replay, strength=planting.strength, seed=seed, known=known)
    split = smaller(split, plan, seed, ("holdout", "other"))
    with planted.applied(model, "retained"):
        retained = evaluate(model, split, wrong=plan.wrong)
    with planted.applied(model, "planted"):
        original = evaluate(model, split, wrong=plan.wrong)
        masks = _masks(model, split, plan, planting, place, seed, draws)
    measured = encode(model, [*split.forget, *split.holdout])
    return Case(split, measured, original, masks, planted, retained)


def _masks(
    model: HookedModel,
    split: FactSplit,
    plan: Plan,
    planting: Planting,
    place: Mask | ParameterMask,
    seed: int,
    draws: int,
) -> dict[tuple[str, str, int], Mask | ParameterMask]:
    masks: dict[tuple[str, str, int], Mask | ParameterMask] = {("", "oracle", 0): place}
    for arm, match in (("random", "layer"), ("random-uniform", "uniform")):
        if arm in planting.arms:
            drawn = elsewhere(model, place, draws, match=match, seed=seed)
            masks |= {("", arm, i): mask for i, mask in enumerate(drawn)}
    whole = ParameterMask.full(model)
    kind = whole if isinstance(place, ParameterMask) else Mask.full(place.components)
    masks |= {("", "all", 0): whole, ("", "kind", 0): kind}
    masks["", "complement", 0] = place.complement(model) if isinstance(place, ParameterMask) else ~place
    if {"top", "bottom"} & set(planting.arms):
        for name, method in named(plan.localizers).items():
            top, bottom = _located(model, split, planting, method, seed)
            masks |= {(name, "top", 0): top, (name, "bottom", 0): bottom}
    return masks


def _located(
    model: HookedModel, split: FactSplit, planting: Planting, method: Any, seed: int
) -> list[Mask | ParameterMask]:
    """What a localizer ranks first and last."""
    if planting.kind == "weight":
        return [localize_weights(model, split, method, budget=planting.share, select=s) for s in ("top", "bottom")]
    pairs = split.forget.contrast_pairs(model, seed=seed)
    scores = localize(model, pairs, given(method, split.retain), components=planting.kind, progress=False)
    return [Mask.top(scores, planting.share), Mask.bottom(scores, planting.share)]


def execute(model: HookedModel, case: Case, plan: Plan, run: Run) -> dict[str, Any]:
    """Attack θ_r, θ_o, or an update where it is after `run.step` steps: the same run once more, ended there."""
    assert case.planted is not None
    attacks, found = _planting(plan).attacks, []

    def attacked(step: int) -> bool:
        if step == run.step:
            found.append(attack(model, case.split, attacks=attacks, seed=run.seed))
        return step == run.step

    if run.arm in STATES:
        with case.planted.applied(model, "retained" if run.arm == "retain" else "planted"):
            attacked(run.step)
    else:
        update_of(model, case, plan, run, attacked)
    return {"status": "finished", "attacks": found[0].astype(object).where(found[0].notna(), None).to_dict("records")}


def attacks_of(results: Sequence[tuple[Run, dict[str, Any]]], plan: Plan) -> list[Run]:
    """The attacks on the updates of one seed: two points of each, by what `results` say of its checkpoints.

    matched: the first checkpoint that forgets as much as every attacked arm of the objective can. best: the one that
    forgets most with 95% of the retain strength left.
    """
    todo: list[Run] = []
    for objective in list(named(plan.objectives))[: _planting(plan).attacked_objectives]:
        curves = {
            run: steps(result["rows"], plan.strength)
            for run, result in results
            if run.objective == objective and run.arm in _planting(plan).attacked and run.draw == 0
        }
        reached = min((max(f for _, f in curve.values()) for curve in curves.values()), default=0.0)
        for run, curve in curves.items():
            enough = [step for step, (_, f) in curve.items() if f >= reached]
            kept = [(f, -step) for step, (r, f) in curve.items() if r >= 0.95 * curve[0][0]]
            todo += [replace(run, stage="attack", point="matched", step=enough[0])]
            todo += [replace(run, stage="attack", point="best", step=-max(kept)[1])]
    return todo


def recoveries(found: Sequence[tuple[Run, list[dict[str, Any]]]], plan: Plan) -> list[list[tuple[str, str, float]]]:
    """(metric, attack, value) of each attacked run of a seed; found[0] is θ_r and found[1] θ_o.

    attacked_POINT: strength of the tested half where the attack is strongest, over its rates and steps; recovery_POINT:
    see `attacks.recovery`; attack "any" is the strongest of all.
    """
    metric = {"extraction": "extraction_strength", "probability": "probability"}[plan.strength]
    strongest, unattacked = [], {}
    for run, rows in found:
        frame = pd.DataFrame(rows)
        frame = frame[frame.metric == metric]
        if run.arm == "none":
            before = frame[(frame.part == "tested") & (frame.step == 0)]
            unattacked = dict(zip(before.attack, before.value, strict=True))
            unattacked["any"] = max(unattacked.values())
        best = worst(frame)
        strongest.append({**dict(zip(best.attack, best.value, strict=True)), "any": float(best.value.max())})
    lines = []
    for (run, _), values in zip(found, strongest, strict=True):
        point = f"_{run.point}" if run.point else ""
        of_run = [(f"attacked{point}", name, value) for name, value in values.items()]
        if run.point:
            of_run += [
                (f"recovery{point}", name, recovery(value, strongest[0][name], unattacked[name]))
                for name, value in values.items()
            ]
        lines.append(of_run)
    return lines
