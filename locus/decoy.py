"""Two sets of facts in two places, each the decoy of the other: is it the location, or how fresh its weights are?

A region in which facts were just planted differs from other weights not only by what it stores, but by having just
been trained. So one half of the facts is planted in one place and the other half in another, equally large one:
unlearning each half through both places is a double dissociation.
"""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from locus import hooks
from locus.facts import Facts, FactSplit, encode
from locus.inject import (
    Goal,
    Place,
    Planted,
    Training,
    entries_of,
    parts_of,
    place_digest,
    planted_stage,
    record_of,
    retained_stage,
    strength_check,
    strengths_of,
    teach,
    trainings,
    worded,
)
from locus.masks import ParameterMask
from locus.metrics import Batch, log_probability
from locus.models import HookedModel
from locus.unlearn import AdamW, NextToken, Update
from locus.unlearn.compact import Leaf, edited, entries, leaves
from locus.unlearn.update import Entries, bits, checksum, pick, written


def halves(split: FactSplit, *, seed: int = 0) -> tuple[FactSplit, FactSplit]:
    """Two splits, each with half of the subjects of `forget` to forget and the other half in `other`, only measured."""
    subjects = sorted({fact.subject for fact in split.forget})
    if len(subjects) < 2:
        raise ValueError(
            f"two halves need forget facts of two subjects or more, got {len(subjects)}: forget more facts"
        )
    chosen = set(random.Random(f"halves {seed}").sample(subjects, len(subjects) // 2))
    a, b = (
        Facts(
            [f for f in split.forget if (f.subject in chosen) == half], name=split.forget.name, pool=split.forget.pool
        )
        for half in (True, False)
    )
    return replace(split, forget=a, other=b), replace(split, forget=b, other=a)


def plant_two(
    model: HookedModel,
    split: FactSplit,
    places: tuple[Place, Place],
    *,
    order: str = "jointly",
    strength: float = 0.95,
    seed: int = 0,
    known: Facts | None = None,
    retained: Training | None = None,
    planted: Training | None = None,
    cache: str | Path | None = None,
    progress: bool = False,
) -> tuple[Planted, Planted]:
    """Teach one half of the facts to forget in one place, and the other half in another: each is the other's decoy.

    Both places hold facts that were just learned, so unlearning one half through both tells what a place stores from
    how fresh its weights are. Returns the halves (see `halves`) with their places; θ_r and θ_o are the same in both.

    order: "jointly" = both at once, the gradients of each half reaching its own place only; "in turn" = one half, then
        the other while the first is replayed. Either ends when both are known, and the kept facts still are.
    The kept facts are replayed throughout, and their gradients reach what is being trained; the rest is as in `plant`.

    Raises:
        ValueError: the places share entries; the strength was not reached.
    """
    masks = [entries_of(model, place) for place in places]
    if n := (masks[0] & masks[1]).n_parameters:
        raise ValueError(f"the two places share {n:,} entries; draw the second with elsewhere(model, first, 1)")
    if order not in ("jointly", "in turn"):
        raise ValueError(f"order must be 'jointly' or 'in turn', got {order!r}")
    first, second = trainings(model)
    two = halves(split, seed=seed)
    kept, parts = Facts([*split.retain, *split.holdout]), parts_of(split, known)
    before = retained_stage(model, parts, kept, Goal(strength, seed, retained or first, progress), cache)
    goal = Goal(strength, seed, planted or second, progress)
    settings = {"places": [place_digest(mask) for mask in masks], "order": order, **record_of(goal)}

    def make() -> Update:
        course = _in_turn if order == "in turn" else _jointly
        return course(model, [half.forget for half in two], kept, places, goal)

    with before.update.applied(model):
        after = planted_stage(model, parts, before, settings, make, cache)
    a, b = (
        Planted(half, place, before.update, after.update, after.strengths)
        for half, place in zip(two, places, strict=True)
    )
    return replace(a, strengths=_by_half(model, a)), replace(b, strengths=_by_half(model, b))


def _by_half(model: HookedModel, half: Planted) -> pd.DataFrame:
    """The strengths with the two halves apart: "forget" is this half, "other" the other one."""
    parts = {"forget": half.split.forget, "other": half.split.other}
    found = [strengths_of(model, "pretrained", parts)]
    for state in ("retained", "planted"):
        with half.applied(model, state):
            found.append(strengths_of(model, state, parts))
    return pd.concat([*found, half.strengths.query("part != 'forget'")], ignore_index=True)


def _in_turn(model: HookedModel, parts: Sequence[Facts], kept: Facts, places: Sequence[Place], goal: Goal) -> Update:
    """One part in its place, then the next in its, until all are known: the first is replayed with the kept facts."""
    made: list[Update] = []
    with ExitStack() as stack:
        for i, (facts, place) in enumerate(zip(parts, places, strict=True)):
            before = [fact for part in parts[:i] for fact in part]
            # As often as the kept facts, of which there are many more: else they come up too seldom to be held.
            replayed = Facts([*kept, *before * (len(kept) // max(1, len(before)))])
            made.append(teach(model, facts, replayed, place, goal, held=[*parts[:i], kept]))
            stack.enter_context(made[-1].applied(model))
        union = entries_of(model, places[0]) | entries_of(model, places[1])
        values = {}
        for name, selected in union.items():
            index = selected.flatten().nonzero().flatten().int()
            values[name] = Entries(index, pick(model.stored(name), index))
    return _edit(model, values, union, [row for update in made for row in update.history], goal)


def _jointly(model: HookedModel, parts: Sequence[Facts], kept: Facts, places: Sequence[Place], goal: Goal) -> Update:
    """Each step lowers the loss of both parts and of some kept facts at once, until all are known.

    The gradients of a part reach its own place only, those of the kept facts both places.
    """
    training, masks = goal.training, [entries_of(model, place) for place in places]
    union = masks[0] | masks[1]
    found = leaves(model, union)
    routes = [[leaf.of(_stored_mask(model, mask, leaf)) for leaf in found] for mask in (*masks, union)]
    batches = [encode(model, worded(facts)) for facts in (*parts, kept)]
    generator = torch.Generator().manual_seed(goal.seed)
    stepper = AdamW(lr=training.lr).build([leaf.values for leaf in found])
    known = strength_check(model, (*parts, kept), goal)
    reached, history = 0.0, []
    for step in range(training.steps + 1):
        if step and (step % training.every == 0 or step == training.steps):
            with written(model, entries(model, found, union)):
                reached = known()
            if reached >= goal.strength or step == training.steps:
                break
        stepper.zero_grad()
        losses = [
            _backward(model, found, route, batch, training.batch_size, generator)
            for route, batch in zip(routes, batches, strict=True)
        ]
        history.append({"step": step, "forget": sum(losses[:2]) / 2, "retain": losses[2], "loss": sum(losses)})
        stepper.step()
    goal.require(reached, sum(map(len, parts)), "finished")
    return _edit(model, entries(model, found, union), union, history, goal)


def _backward(
    model: HookedModel,
    found: Sequence[Leaf],
    route: Sequence[Bool[Tensor, "..."]],
    batch: Batch,
    size: int,
    generator: torch.Generator,
) -> float:
    """Add the gradients of the mean loss of some prompts where the route lets them pass. Returns the loss, in nats."""
    some = batch[torch.randperm(len(batch), generator=generator)[:size]]
    read, targets = some.reads()
    with torch.enable_grad(), model.frozen(), edited(found), hooks.read_only(model, read):
        loss = -log_probability(model.logits(some.tokens, some.attention_mask), targets).mean()
        gradients = torch.autograd.grad(loss, [leaf.values for leaf in found])
    for leaf, selected, gradient in zip(found, route, gradients, strict=True):
        passed = gradient * selected
        leaf.values.grad = passed if leaf.values.grad is None else leaf.values.grad + passed
    return float(loss.detach())


def _stored_mask(model: HookedModel, mask: ParameterMask, leaf: Leaf) -> Bool[Tensor, "..."]:
    name = leaf.live.name
    selected = mask[name] if name in mask else torch.zeros(model.weights[name].shape, dtype=torch.bool)
    return selected.to(leaf.values.device)


@torch.no_grad()
def _edit(
    model: HookedModel,
    values: dict[str, Entries],
    mask: ParameterMask,
    history: Sequence[dict[str, int | float]],
    goal: Goal,
) -> Update:
    """New values of the masked entries as an update of the model as it is now."""
    old = {name: pick(model.stored(name), index) for name, (index, _) in values.items()}
    pairs = [(old[name], value) for name, (_, value) in values.items()]
    return Update(
        model=model.state,
        values=values,
        shapes={name: tuple(model.weights[name].shape) for name in values},
        recipe=mask.recipe,
        objective=NextToken(retain_weight=1.0),
        optimizer=AdamW(lr=goal.training.lr),
        settings=record_of(goal),
        history=tuple(history),
        status="finished",
        norm=float(sum((b.double() - a.double()).square().sum() for a, b in pairs)) ** 0.5,
        n_changed=sum(int((bits(a) != bits(b)).sum()) for a, b in pairs),
        checksum=checksum((name, model.stored(name), mask.get(name)) for name in model.weights),
    )
