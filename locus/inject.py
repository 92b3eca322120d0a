"""Knowledge put into a known place, so that the true location is certain.

θ_p, the model as loaded → θ_r, all parameters trained on the facts to keep → θ_o, only a region V trained on the facts
to forget: all that θ_o knows about them and θ_r does not is in V (Lee et al., EMNLP 2025, §4). Each stage ends when the
facts that it teaches have a stated extraction strength, or fails with what it reached; it is kept in the cache.

Left out: the text corpus of a pretraining that goes on (LACUNA, arXiv 2607.02513), whose masks these can be.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from locus.evaluate import interval, score
from locus.facts import Fact, Facts, FactSplit, encode
from locus.folder import new_directory
from locus.masks import Mask, ParameterMask, controls
from locus.metrics import Batch
from locus.models import HookedModel
from locus.require import COUNT, NUMBER, POSITIVE, SHARE, require, require_fields
from locus.unlearn import AdamW, NextToken, Update, unlearn
from locus.unlearn.update import Entries, written
from locus.worlds import cache_dir

Place = Mask | ParameterMask
SAMPLE = 64  # prompts of a part that are asked before all of them


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a stage trains: AdamW without weight decay, until its facts are known or its steps are used up.

    batch_size: prompts a step; every wording of a fact is a prompt of its own. With replay, as many others are added.
    every: after how many steps the strength is looked at.
    """

    lr: float
    steps: int
    batch_size: int = 96
    every: int = 10

    def __post_init__(self) -> None:
        require_fields(self, (POSITIVE, "lr"), (COUNT, "steps batch_size every"))


def trainings(model: HookedModel) -> tuple[Training, Training]:
    """What works for the two stages, by the model's width: rates fall with it."""
    if model.cfg.d_model < 512:
        return Training(lr=1e-3, steps=400), Training(lr=5e-3, steps=400, batch_size=48)
    return Training(lr=3e-4, steps=400, batch_size=32), Training(lr=3e-3, steps=400, batch_size=32)


@dataclass(frozen=True, eq=False)
class Planted:
    """θ_r and θ_o, and where θ_o keeps what θ_r does not know.

    split: the facts; `forget` is what was planted in `region`.
    retained: θ_p → θ_r, all parameters.   planted: θ_r → θ_o.
    strengths: rows of state ("pretrained", "retained", "planted" = θ_p, θ_r, θ_o), part ("forget", "retain", "holdout",
        "known" = facts that θ_p knew), n, strength (mean extraction strength of the main prompts), low, high (95%).
    """

    split: FactSplit
    region: Place
    retained: Update
    planted: Update
    strengths: pd.DataFrame

    def strength(self, state: str, part: str) -> float:
        """Mean extraction strength of a part of the facts in a state."""
        found = self.strengths.query("state == @state and part == @part").strength
        if not len(found):
            known = ", ".join(f"{row.state} {row.part}" for row in self.strengths.itertuples())
            raise ValueError(f"no strength of {part!r} in {state!r} was measured; there is: {known}")
        return float(found.iloc[0])

    @property
    def damage(self) -> float:
        """RS(θ_r) − RS(θ_o) on the holdout: what planting did to the facts that were to be kept. 0 = nothing."""
        return self.strength("retained", "holdout") - self.strength("planted", "holdout")

    @contextmanager
    def applied(self, model: HookedModel, state: str = "planted") -> Iterator[None]:
        """Within the block the model is θ_p, θ_r, θ_o, or θ_o with the region set back to θ_r ("reverted")."""
        if state == "pretrained":
            yield
            return
        with self.retained.applied(model):
            if state == "retained":
                yield
            elif state == "planted":
                with self.planted.applied(model):
                    yield
            elif state == "reverted":
                with written(model, _without(self.planted, entries_of(model, self.region))):
                    yield
            else:
                raise ValueError(
                    f"there is no state {state!r}; a planting has 'pretrained', 'retained', 'planted' and 'reverted'"
                )


def region(model: HookedModel, kind: str = "value", share: float = 0.1, *, seed: int = 0) -> Place:
    """A random share of the parameters of all components of a kind ("value", "neuron", "head", …).

    "weight" gives single weights: the share of every attention and MLP matrix.
    """
    if kind == "weight":
        return ParameterMask.random(model, budget=share, seed=seed)
    return Mask.random(model.components(kind), budget=share, seed=seed)


def elsewhere(model: HookedModel, place: Place, n: int, *, match: str = "layer", seed: int = 0) -> list[Place]:
    """n random places as large as this one, with nothing of it in them.

    match: "layer" = as many parameters in each layer and kind (single weights: in each matrix), "uniform" = in all.
    """
    if isinstance(place, Mask):
        return list(controls(place, n, match=match, disjoint=True, seed=seed))
    seeds = np.random.SeedSequence(seed).generate_state(n).tolist()
    return [ParameterMask.random(model, like=place, match=match, disjoint_from=place, seed=s) for s in seeds]


def plant(
    model: HookedModel,
    split: FactSplit,
    place: Place,
    *,
    replay: bool = True,
    strength: float = 0.95,
    seed: int = 0,
    known: Facts | None = None,
    retained: Training | None = None,
    planted: Training | None = None,
    cache: str | Path | None = None,
    progress: bool = False,
) -> Planted:
    """Teach a model the facts to keep everywhere, then the facts to forget in one place only.

    split: `retain` and `holdout` are kept; all wordings of a fact are taught. None of them is known to the model yet.
    place: V, e.g. of `region`. A mask of the model as loaded.
    replay: the kept facts stay in the loss while V learns, all of them alike, and the stage ends only when they too
        have the strength; else V's learning damages them.
    strength: mean extraction strength, over all wordings, at which a stage is done.
    seed: of the order of the data.
    known: facts that the model knew before; only measured.
    retained, planted: how the two stages train; by default as `trainings` says.
    cache: a folder for stages that are done, by a hash of all their settings; default `cache_dir()`.

    Raises:
        ValueError: a stage did not reach the strength.
    """
    require(SHARE, strength=strength)
    require(NUMBER, seed=seed)
    first, second = trainings(model)
    kept, parts = Facts([*split.retain, *split.holdout]), parts_of(split, known)
    before = retained_stage(model, parts, kept, Goal(strength, seed, retained or first, progress), cache)
    goal = Goal(strength, seed, planted or second, progress)
    settings = {"place": place_digest(entries_of(model, place)), "replay": replay, **record_of(goal)}

    def make() -> Update:
        if not replay:
            return teach(model, split.forget, Facts(), place, goal)
        return teach(model, split.forget, kept, place, goal, held=[kept])

    with before.update.applied(model):
        after = planted_stage(model, parts, before, settings, make, cache)
    return Planted(split, place, before.update, after.update, after.strengths)


# ------------------------------------------------------------------------------------------------ teaching


@dataclass(frozen=True)
class Goal:
    """When a stage is done, and how it gets there."""

    strength: float
    seed: int
    training: Training
    progress: bool = False

    def require(self, reached: float, n: int, status: str) -> None:
        if not reached >= self.strength:
            raise ValueError(
                f"{n} facts have an extraction strength of {reached:.3f} after {self.training.steps} steps at the rate "
                f"{self.training.lr:g} ({status}), not {self.strength}: give a Training of more steps or of another "
                "rate, a larger place, fewer facts, or a lower strength"
            )


def teach(
    model: HookedModel, facts: Facts, kept: Facts, place: Place, goal: Goal, held: Sequence[Facts] = ()
) -> Update:
    """Train one place on some facts, in all their wordings, until they have the strength; `kept` are replayed.

    held: of the kept ones, those that must have the strength too in the end.
    """
    reached = [math.nan]
    known = strength_check(model, (facts, *held), goal)

    def enough(step: int) -> bool:
        reached.append(known())
        return reached[-1] >= goal.strength

    training = goal.training
    update = unlearn(
        model,
        FactSplit(forget=worded(facts), retain=worded(kept), holdout=Facts(), other=Facts(), seed=goal.seed),
        place,
        NextToken(retain_weight=1.0 if kept else 0.0),
        optimizer=AdamW(lr=training.lr),
        steps=training.steps,
        seed=goal.seed,
        batch_size=training.batch_size,
        floor=None,
        checkpoints={*range(training.every, training.steps, training.every), training.steps},
        callback=enough,
        progress=goal.progress,
    )
    goal.require(reached[-1], len(facts), update.status)
    return update


def worded(facts: Sequence[Fact]) -> Facts:
    """Every wording of every fact as a fact of its own."""
    return Facts([replace(f, prompt=prompt, paraphrases=()) for f in facts for prompt in (f.prompt, *f.paraphrases)])


def entries_of(model: HookedModel, place: Place) -> ParameterMask:
    return place.materialize(model) if isinstance(place, Mask) else place


def strength_check(model: HookedModel, parts: Sequence[Facts], goal: Goal) -> Callable[[], float]:
    """A function that measures the parts' strength, the least of them, over all wordings.

    A sample of each part is asked first: while that is too weak, its strength is returned, and the rest is not run.
    """
    batches = [encode(model, worded(facts)) for facts in parts]
    generator = torch.Generator().manual_seed(goal.seed)
    samples = [batch[torch.randperm(len(batch), generator=generator)[:SAMPLE]] for batch in batches]

    def measure() -> float:
        for some in samples:
            if (weak := strength_of(model, some)) < goal.strength:
                return weak
        return min(strength_of(model, batch) for batch in batches)

    return measure


def _without(update: Update, mask: ParameterMask) -> dict[str, Entries]:
    """The values of an update outside a mask."""
    values = {}
    for name, (index, value) in update.values.items():
        keep = ~mask[name].flatten()[index.long()] if name in mask else torch.ones(len(index), dtype=torch.bool)
        values[name] = Entries(index[keep], value[keep.to(value.device)])
    return values


def strength_of(model: HookedModel, batch: Batch) -> float:
    return float(score(model, batch, rows=128).extraction_strength.mean())


def strengths_of(model: HookedModel, state: str, parts: dict[str, Facts]) -> pd.DataFrame:
    """Extraction strength of each part's main prompts."""
    rows = []
    for part, facts in parts.items():
        values = score(model, encode(model, facts), rows=128).extraction_strength
        rows.append((state, part, len(facts), float(values.mean()), *interval(values)))
    return pd.DataFrame(rows, columns=["state", "part", "n", "strength", "low", "high"])


# ------------------------------------------------------------------------------------------------ stages on disk


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage that is done."""

    settings: dict[str, Any]
    update: Update
    strengths: pd.DataFrame


def retained_stage(
    model: HookedModel, parts: dict[str, Facts], kept: Facts, goal: Goal, cache: str | Path | None
) -> Stage:
    """θ_p → θ_r, the same for every place."""
    facts = {part: [dataclasses.astuple(fact) for fact in facts] for part, facts in parts.items()}
    settings = {"stage": "retained", "model": model.fingerprint, "facts": facts, **record_of(goal)}

    def make() -> tuple[Update, pd.DataFrame]:
        before = strengths_of(model, "pretrained", parts)
        update = teach(model, kept, Facts(), ParameterMask.full(model), goal)
        with update.applied(model):
            return update, pd.concat([before, strengths_of(model, "retained", parts)], ignore_index=True)

    return _stage(settings, make, cache)


def planted_stage(
    model: HookedModel,
    parts: dict[str, Facts],
    first: Stage,
    settings: dict[str, Any],
    make: Callable[[], Update],
    cache: str | Path | None,
) -> Stage:
    """θ_r → θ_o. Called with θ_r in place."""

    def measured() -> tuple[Update, pd.DataFrame]:
        update = make()
        with update.applied(model):
            return update, strengths_of(model, "planted", parts)

    stage = _stage({"stage": "planted", "after": _digest(first.settings), **settings}, measured, cache)
    return replace(stage, strengths=pd.concat([first.strengths, stage.strengths], ignore_index=True))


def parts_of(split: FactSplit, known: Facts | None) -> dict[str, Facts]:
    parts = {"forget": split.forget, "retain": split.retain, "holdout": split.holdout, "known": known or Facts()}
    return {part: facts for part, facts in parts.items() if facts}


def record_of(goal: Goal) -> dict[str, Any]:
    """What of a goal decides the result."""
    return {name: value for name, value in dataclasses.asdict(goal).items() if name != "progress"}


def _stage(
    settings: dict[str, Any], make: Callable[[], tuple[Update, pd.DataFrame]], cache: str | Path | None
) -> Stage:
    """The stage of these settings: read back whole from the cache, or made and kept there."""
    folder = Path(cache or cache_dir() / "planted") / _digest(settings)
    if folder.exists():
        try:
            return _read(folder, settings)
        except (ValueError, KeyError, TypeError, OSError) as error:
            print(f"{folder} is damaged ({error!s:.160}); it is planted again.")
            shutil.rmtree(folder, ignore_errors=True)
    update, strengths = make()
    with new_directory(folder) as new:
        update.save(new / "update")
        record = {"settings": settings, "strengths": strengths.to_dict("records")}
        (new / "config.json").write_text(json.dumps(record), encoding="utf-8")
    return Stage(settings, update, strengths)


def _read(folder: Path, settings: dict[str, Any]) -> Stage:
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if _digest(record["settings"]) != _digest(settings):
        raise ValueError("config.json holds other settings")
    return Stage(settings, Update.load(folder / "update"), pd.DataFrame(record["strengths"]))


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def place_digest(mask: ParameterMask) -> str:
    """Of the entries alone, however they were chosen."""
    digest = hashlib.sha256()
    for name, selected in sorted(mask.items()):
        digest.update(name.encode() + np.packbits(selected.cpu().numpy()).tobytes())
    return digest.hexdigest()[:16]
