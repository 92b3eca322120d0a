"""One run of a study: what is edited, on which facts, at which rate, and what came of it."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from locus.evaluate import DriftText, Evaluation, aues, drift, evaluate, relative, score
from locus.facts import Facts, FactSplit, encode
from locus.inject import Planted
from locus.localize import ActivationPatching, given, localize
from locus.masks import Mask, ParameterMask, controls
from locus.metrics import Batch
from locus.models import HookedModel
from locus.plans import KINDS, STATES, Plan, named
from locus.unlearn import AdamW, MatchMLP, Update, unlearn


@dataclass(frozen=True)
class Run:
    """One update: which mask, of which seed, at which rate; or an attack, on which point and step of it.

    stage: plant | tune | compare | attack | scan.
    """

    stage: str
    seed: int
    objective: str
    arm: str
    localizer: str = ""
    draw: int = 0
    rate: float = math.nan
    layer: int = -1
    point: str = ""
    step: int = -1

    @property
    def file(self) -> str:
        words = [self.stage, f"seed{self.seed}", self.objective, self.localizer, self.arm, self.point]
        words += [f"draw{self.draw}"] * self.arm.startswith("random") + [f"layer{self.layer}"] * (self.layer >= 0)
        words += [f"{self.rate:.6g}"] * (not math.isnan(self.rate))
        return (
            "-".join("".join(c if c.isalnum() or c in "._+" else "_" for c in word) for word in words if word) + ".json"
        )

    @property
    def type(self) -> str:
        return {"kind": "kind", "complement": "kind", "all": "all"}.get(self.arm, "masked")

    def __str__(self) -> str:
        words = [f"seed {self.seed}", self.localizer, self.arm, self.point]
        words += [f"{self.draw}"] * self.arm.startswith("random")
        words += [f"layer {self.layer}"] * (self.layer >= 0) + [f"rate {self.rate:.3g}"] * (self.stage == "tune")
        return " ".join(word for word in words if word)


# ------------------------------------------------------------------------------------------------ one seed


@dataclass(frozen=True, eq=False)
class Case:
    """What the runs of one seed share.

    original, retained: how the model does where unlearning begins, and θ_r does if knowledge was planted.
    """

    split: FactSplit
    measured: Batch  # the forget facts, then the holdout
    original: Evaluation
    masks: dict[tuple[str, str, int], Mask | ParameterMask]
    planted: Planted | None = None
    retained: Evaluation | None = None

    def start(self, model: HookedModel) -> AbstractContextManager[None]:
        """Within the block the model is where unlearning begins."""
        return self.planted.applied(model, "planted") if self.planted else nullcontext()


def arms(plan: Plan) -> list[tuple[str, str, int]]:
    """(localizer, arm, draw) of every update of a seed and objective."""
    localizers = list(named(plan.localizers))
    if plan.planting is None:
        found = [("", "kind", 0), ("", "all", 0)]
        for name in localizers:
            found += [(name, "top", 0), (name, "bottom", 0), *((name, "random", i) for i in range(plan.draws))]
        return found
    found = []
    for arm in plan.planting.arms:
        names = localizers if arm in ("top", "bottom") else [""]
        found += [(name, arm, i) for name in names for i in range(plan.draws if arm.startswith("random") else 1)]
    return found


def prepare(model: HookedModel, facts: Facts, other: Facts | None, plan: Plan, seed: int, *, draws: int) -> Case:
    # Without facts of other relations, one of several relations is left out of all losses to stand for them.
    relations = sorted({fact.relation for fact in facts})
    apart = relations[-1:] if other is None and len(relations) > 2 else ()
    split = facts.split(forget=plan.forget, seed=seed, other=other, other_relations=apart)
    split = smaller(split, plan, seed, ("retain", "holdout", "other"))
    measured = encode(model, [*split.forget, *split.holdout])
    masks: dict[tuple[str, str, int], Mask | ParameterMask] = {}
    pairs = split.forget.contrast_pairs(model, seed=seed)
    for name, method in named(plan.localizers).items():
        scores = localize(model, pairs, given(method, split.retain), components=plan.kind, progress=False)
        top = masks[name, "top", 0] = Mask.top(scores, plan.budget)
        masks[name, "bottom", 0] = Mask.bottom(scores, plan.budget)
        drawn = controls(top, draws, match="layer", disjoint=_half_free(top), seed=seed)
        masks |= {(name, "random", i): mask for i, mask in enumerate(drawn)}
    masks["", "kind", 0] = Mask.full(model.components(plan.kind))
    masks["", "all", 0] = ParameterMask.full(model)
    return Case(split, measured, evaluate(model, split, wrong=plan.wrong), masks)


def smaller(split: FactSplit, plan: Plan, seed: int, parts: Sequence[str]) -> FactSplit:
    """At most `plan.part` facts in each of these parts, drawn by the seed."""
    rng = np.random.default_rng(seed)
    fewer: dict[str, Any] = {part: _some(getattr(split, part), plan.part, rng) for part in parts}
    return replace(split, **fewer)


def _some(facts: Facts, n: int, rng: np.random.Generator) -> Facts:
    """At most n of the facts, in their order."""
    if len(facts) <= n:
        return facts
    chosen = sorted(rng.choice(len(facts), n, replace=False).tolist())
    return Facts([facts[i] for i in chosen], name=facts.name, pool=facts.pool)


def _half_free(mask: Mask) -> bool:
    """Whether controls disjoint from the mask are still random: no layer has more than half of its components in it."""
    layers = mask.components.layers
    return all(mask.selected[layers == layer].float().mean() <= 0.5 for layer in layers.unique())


def search_rate(
    areas: Callable[[Sequence[float]], Sequence[float]], grid: Sequence[float], *, extend: int = 3, near: float = 0.02
) -> dict[str, Any]:
    """The best of some learning rates by mean AUES, as `Plan` says under rates.

    areas: the mean AUES at each of some rates.   Returns chosen, best, "at the edge" and "mean AUES by rate".
    """
    found: dict[float, float] = {}
    missing, extended = list(grid), 0
    while missing:
        found |= zip(missing, areas(missing), strict=True)
        best = max(sorted(found), key=found.__getitem__)
        beyond = _beyond(sorted(found), best)
        missing = beyond if extended < extend else []
        extended += len(missing)
    return {
        "chosen": min(rate for rate, area in found.items() if area >= found[best] - near),
        "best": best,
        "at the edge": bool(beyond),
        "mean AUES by rate": {f"{rate:.6g}": area for rate, area in sorted(found.items())},
    }


def _beyond(grid: Sequence[float], best: float) -> list[float]:
    """The next rates outside the grid if the best is at its edge, by the ratio of the rates there (3 for a single)."""
    if len(grid) == 1:
        return [best / 3, best * 3]
    if best == grid[0]:
        return [best * grid[0] / grid[1]]
    return [best * grid[-1] / grid[-2]] if best == grid[-1] else []


# ------------------------------------------------------------------------------------------------ one run


def execute(model: HookedModel, case: Case, plan: Plan, run: Run, text: DriftText) -> dict[str, Any]:
    """Do one run and return {"rows": [[step, metric, value], …], "status": …, …}; step = -1 for the whole run."""
    if run.arm in STATES:
        return _state(model, case, plan, run.arm)
    if run.stage == "scan":
        with case.start(model):
            return _scanned(model, case, plan, run)
    return _edited(model, case, plan, run, text)


def _scanned(model: HookedModel, case: Case, plan: Plan, run: Run) -> dict[str, Any]:
    """Unlearning of each fact by editing one layer's MLP: where the run ended, and averaged on the way there."""
    per_fact: list[list[float]] = []
    update = unlearn(
        model,
        case.split,
        _one_mlp(model, run.layer),
        named(plan.objectives)[run.objective],
        optimizer=AdamW(lr=run.rate),
        steps=plan.scan_steps,
        seed=run.seed,
        batch_size=plan.batch_size,
        callback=lambda step: per_fact.append(_strengths(model, case)[1]),
        checkpoints=range(0, plan.scan_steps + 1, max(1, plan.scan_steps // 5)),
    )
    return {"status": update.status, "end": per_fact[-1], "mean": np.mean(per_fact, 0).tolist()}


def _edited(model: HookedModel, case: Case, plan: Plan, run: Run, text: DriftText) -> dict[str, Any]:
    """Strengths at each checkpoint, their areas, and, in the comparison, everything that is measured at the end."""
    curve: list[list[Any]] = []

    def checkpoint(step: int) -> None:
        curve.extend([step, name, value] for name, value in _strengths(model, case)[0].items())
        # Truth ratios take three times as long as strengths, so not at each checkpoint.
        if case.retained is not None and run.stage == "compare" and plan.checkpoints.index(step) % 3 == 0:
            curve.append([step, "forget_quality", _forget_quality(model, case, plan)])

    whole = run.stage == "compare"
    update = update_of(model, case, plan, run, checkpoint)
    rows = _areas(curve, plan)
    if whole:
        with case.start(model), update.applied(model):
            rows += _final(evaluate(model, case.split, reference=case.original, wrong=plan.wrong), case)
            rows += [["drift", float(drift(model, text).mean())]]
    if whole:
        size = case.masks[run.localizer, run.arm, run.draw].n_parameters
        rows += [["update_norm", update.norm], ["n_parameters", size], ["n_changed", update.n_changed]]
        rows += [["learning_rate", run.rate]]
    if whole and case.planted is not None:
        rows += [["distance_to_retained", _distance_to_retained(model, case.planted, update)]]
    return {"status": update.status, "rows": curve + [[-1, name, float(value)] for name, value in rows]}


def update_of(model: HookedModel, case: Case, plan: Plan, run: Run, checkpoint: Callable[[int], bool | None]) -> Update:
    """The update of a run, from where unlearning begins, on a model as loaded."""
    objective = named(plan.objectives)[run.objective]
    if isinstance(objective, MatchMLP) and case.planted is not None:
        with case.planted.applied(model, "retained"):
            objective = objective.bound(model, case.split)
    with case.start(model):
        return unlearn(
            model,
            case.split,
            case.masks[run.localizer, run.arm, run.draw],
            objective,
            optimizer=AdamW(lr=run.rate),
            steps=plan.steps,
            seed=run.seed,
            batch_size=plan.batch_size,
            callback=checkpoint,
            checkpoints=plan.checkpoints,
        )


def _state(model: HookedModel, case: Case, plan: Plan, arm: str) -> dict[str, Any]:
    """A state without an update: what unlearning begins with is the floor, θ_r the ceiling of an ideal unlearning."""
    curve: list[list[Any]] = []
    if arm == "revert":  # an edit, which begins where unlearning begins; the other states are a single point
        with case.start(model):
            curve += [[0, name, value] for name, value in _strengths(model, case)[0].items()]
    state = {"retain": "retained", "revert": "retained", "pretrained": "pretrained"}.get(arm, "planted")
    with case.planted.applied(model, state) if case.planted else nullcontext():
        curve += [[int(arm == "revert"), name, value] for name, value in _strengths(model, case)[0].items()]
        whole = evaluate(model, case.split, reference=case.original, wrong=plan.wrong)
        rows = [*_areas(curve, plan), *_final(whole, case)]
    if arm == "revert" and case.planted is not None:
        rows += [["update_norm", case.planted.planted.norm], ["distance_to_retained", 0.0]]
    return {"status": "finished", "rows": curve + [[-1, name, float(value)] for name, value in rows]}


def _distance_to_retained(model: HookedModel, planted: Planted, update: Update) -> float:
    """L2 distance to θ_r of the model that the update makes of θ_o, over the entries that either differ in.

    `update_norm` is the distance to θ_o.
    """
    # Not a set: its order, and so the last bits of the sum, would differ from process to process.
    names = dict.fromkeys((*planted.planted.values, *update.values))
    with planted.applied(model, "retained"):
        retained = {name: model.stored(name) for name in names}
    with planted.applied(model, "planted"), update.applied(model):
        return math.sqrt(sum(float((model.stored(n) - kept).double().square().sum()) for n, kept in retained.items()))


def _forget_quality(model: HookedModel, case: Case, plan: Plan) -> float:
    assert case.retained is not None
    # The wrong answers must be those that θ_r was measured with, which come from all parts of the split.
    now = evaluate(model, case.split, metrics=("truth_ratio",), wrong=plan.wrong, parts=("forget",))
    return now.forget_quality(case.retained)


def _one_mlp(model: HookedModel, layer: int) -> Mask:
    mlps = model.components("mlp")
    return Mask(mlps, mlps.layers == layer, {"method": "layer", "layer": layer, "model": model.fingerprint})


def causal_effects(model: HookedModel, case: Case, seed: int) -> dict[str, Any]:
    """Effect of patching each layer's MLP, [fact][layer], in the order of the forget facts; NaN without a partner."""
    pairs = case.split.forget.contrast_pairs(model, seed=seed)
    scores = localize(model, pairs, ActivationPatching(), components="mlp", progress=False)
    by_fact = dict(zip(pairs.facts, scores.values.tolist(), strict=True))
    nothing = [math.nan] * model.cfg.n_layers
    facts = case.split.forget
    return {
        "facts": [fact.prompt for fact in facts],
        "values": [by_fact.get(fact, nothing) for fact in facts],
    }


def _strengths(model: HookedModel, case: Case) -> tuple[dict[str, float], list[float]]:
    """Strengths of the model as it is now, and 1 - min(1, p / p of the original) of each forget fact."""
    answers = score(model, case.measured, rows=64)
    original = torch.cat([case.original.values(part, "probability") for part in ("forget", "holdout")])
    kept = relative(answers.log_probability.exp(), original).clamp(max=1)
    n = len(case.split.forget)
    strengths = {}
    for kind, values in (("extraction", answers.extraction_strength), ("probability", kept)):
        strengths[f"forget_{kind}"] = 1 - float(values[:n].nanmean())
        strengths[f"retain_{kind}"] = float(values[n:].nanmean())
    return strengths, (1 - kept[:n]).tolist()


def _areas(curve: list[list[Any]], plan: Plan) -> list[list[Any]]:
    """AUES in its forms, and the most that was forgotten while 95% of the original retain strength was kept."""
    by_kind = {kind: points(curve, kind) for kind in KINDS}
    main = by_kind[plan.strength]
    rows = [["aues", aues(main)], ["aues_trapezoid", aues(main, form="trapezoid")]]
    rows += [["aues_halved", aues(main[::2])]]
    rows += [[f"aues_{kind}", aues(p)] for kind, p in by_kind.items()]
    kept = [forgotten for retained, forgotten in main if retained >= 0.95 * main[0][0]]
    rows += [["forget_at_95", max(kept)]]
    quality = {step: value for step, name, value in curve if name == "forget_quality"}
    if quality:
        retained = {step: value for step, name, value in curve if name == f"retain_{plan.strength}"}
        kept = [q for step, q in quality.items() if retained[step] >= 0.95 * main[0][0]]
        rows += [["mu95", math.log10(max(*kept, sys.float_info.min))]]  # a p-value can be too small for a float
    return rows


def points(curve: Sequence[Sequence[Any]], kind: str) -> list[tuple[float, float]]:
    """(retain, forget) strength of each checkpoint, in order; checkpoints of a diverged model (NaN) are left out."""
    return list(steps(curve, kind).values())


def steps(curve: Sequence[Sequence[Any]], kind: str) -> dict[int, tuple[float, float]]:
    """`points` by their step."""
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in curve:
        if step >= 0:
            by_step.setdefault(step, {})[name] = value
    pairs = {step: (row[f"retain_{kind}"], row[f"forget_{kind}"]) for step, row in sorted(by_step.items())}
    return {step: pair for step, pair in pairs.items() if np.isfinite(pair).all()}


def _final(evaluation: Evaluation, case: Case) -> list[list[Any]]:
    rows: list[list[Any]] = [
        [f"{part}_{metric}", evaluation.mean(part, metric)] for part, metric in evaluation.per_fact
    ]
    if case.retained is not None:
        rows += [["forget_quality", evaluation.forget_quality(case.retained)]]
    return rows + [["utility", evaluation.utility()]]
