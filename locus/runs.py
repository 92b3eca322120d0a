"""One run of a study: what is edited, on which facts, at which rate, and what came of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from locus.evaluate import DriftText, Evaluation, Strength, aues, drift, evaluate, relative, score
from locus.facts import Facts, FactSplit, encode
from locus.localize import ActivationPatching, Activations, AttributionPatching, localize
from locus.masks import Mask, ParameterMask, controls
from locus.metrics import Batch
from locus.models import HookedModel
from locus.unlearn import NPO, AdamW, unlearn

KINDS: tuple[Strength, ...] = ("extraction", "probability")


@dataclass(frozen=True)
class Plan:
    """Every choice of a study besides the model and the facts. All of it is written to settings.json.

    localizers, objectives: method objects; each localizer gives a top, a bottom and `draws` random masks a seed.
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
    rates: tuple[tuple[str, tuple[float, ...]], ...] = (
        ("masked", (7e-4, 1.4e-3, 2.8e-3)),
        ("kind", (2.5e-4, 5e-4, 1e-3)),
        ("all", (1e-4, 2e-4, 4e-4)),
    )
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

    def __post_init__(self) -> None:
        names = [name for name, _ in self.rates]
        if names != ["masked", "kind", "all"] or any(len(grid) < 1 for _, grid in self.rates):
            raise ValueError(f"rates needs a grid for each of masked, kind and all, in this order; got {self.rates}.")
        for field in ("localizers", "objectives", "seeds"):
            if not getattr(self, field):
                raise ValueError(f"A study needs at least one of its {field}; got none.")
        if len(set(self.seeds)) < len(self.seeds) or self.tuning_seed in self.seeds:
            raise ValueError(f"Seeds must differ, also from tuning_seed={self.tuning_seed}; got {self.seeds}.")

    @property
    def checkpoints(self) -> list[int]:
        return sorted({*range(min(self.dense, self.steps)), *range(self.dense, self.steps, self.every), self.steps})


@dataclass(frozen=True)
class Run:
    """One update: which mask, of which seed, at which rate. stage: tune | compare | scan."""

    stage: str
    seed: int
    objective: str
    arm: str
    localizer: str = ""
    draw: int = 0
    rate: float = math.nan
    layer: int = -1

    @property
    def file(self) -> str:
        words = [self.stage, f"seed{self.seed}", self.objective, self.localizer, self.arm]
        words += [f"draw{self.draw}"] * (self.arm == "random") + [f"layer{self.layer}"] * (self.layer >= 0)
        words += [f"{self.rate:.6g}"] * (not math.isnan(self.rate))
        return (
            "-".join("".join(c if c.isalnum() or c in "._+" else "_" for c in word) for word in words if word) + ".json"
        )

    @property
    def type(self) -> str:
        return self.arm if self.arm in ("kind", "all") else "masked"

    def __str__(self) -> str:
        words = [f"seed {self.seed}", self.localizer, self.arm] + [f"{self.draw}"] * (self.arm == "random")
        words += [f"layer {self.layer}"] * (self.layer >= 0) + [f"rate {self.rate:.3g}"] * (self.stage == "tune")
        return " ".join(word for word in words if word)


# ------------------------------------------------------------------------------------------------ one seed


@dataclass(frozen=True, eq=False)
class Case:
    """What the runs of one seed share."""

    split: FactSplit
    measured: Batch  # the forget facts, then the holdout
    original: Evaluation
    masks: dict[tuple[str, str, int], Mask | ParameterMask]


def prepare(model: HookedModel, facts: Facts, other: Facts | None, plan: Plan, seed: int, *, draws: int) -> Case:
    # Without facts of other relations, one of several relations is left out of all losses to stand for them.
    relations = sorted({fact.relation for fact in facts})
    apart = relations[-1:] if other is None and len(relations) > 2 else ()
    split = facts.split(forget=plan.forget, seed=seed, other=other, other_relations=apart)
    rng = np.random.default_rng(seed)
    retain, holdout, beyond = (_some(part, plan.part, rng) for part in (split.retain, split.holdout, split.other))
    split = replace(split, retain=retain, holdout=holdout, other=beyond)
    measured = encode(model, [*split.forget, *split.holdout])
    masks: dict[tuple[str, str, int], Mask | ParameterMask] = {}
    pairs = split.forget.contrast_pairs(model, seed=seed)
    for name, method in named(plan.localizers).items():
        scores = localize(model, pairs, method, components=plan.kind, progress=False)
        top = masks[name, "top", 0] = Mask.top(scores, plan.budget)
        masks[name, "bottom", 0] = Mask.bottom(scores, plan.budget)
        drawn = controls(top, draws, match="layer", disjoint=_half_free(top), seed=seed)
        masks |= {(name, "random", i): mask for i, mask in enumerate(drawn)}
    masks["", "kind", 0] = Mask.full(model.components(plan.kind))
    masks["", "all", 0] = ParameterMask.full(model)
    return Case(split, measured, evaluate(model, split, wrong=plan.wrong), masks)


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


def named(methods: Sequence[Any]) -> dict[str, Any]:
    """Methods by the names that tables give them: the class name, or the whole repr where that is not unique."""
    classes = [type(method).__name__ for method in methods]
    names = [n if classes.count(n) == 1 else repr(m) for n, m in zip(classes, methods, strict=True)]
    if len(set(names)) < len(names):
        raise ValueError(f"The same method is given twice: {names}.")
    return dict(zip(names, methods, strict=True))


# ------------------------------------------------------------------------------------------------ one run


def execute(model: HookedModel, case: Case, plan: Plan, run: Run, text: DriftText) -> dict[str, Any]:
    """Do one update and return {"rows": [[step, metric, value], …], "status": …, "facts": per fact for a scan}."""
    if run.arm == "none":
        return _original(model, case, plan)
    curve: list[list[Any]] = []
    per_fact: list[list[float]] = []

    def checkpoint(step: int) -> None:
        strengths, forgotten = _strengths(model, case)
        curve.extend([step, name, value] for name, value in strengths.items())
        per_fact.append(forgotten)

    mask = _one_mlp(model, run.layer) if run.stage == "scan" else case.masks[run.localizer, run.arm, run.draw]
    steps = plan.scan_steps if run.stage == "scan" else plan.steps
    checkpoints = range(0, steps + 1, max(1, steps // 5)) if run.stage == "scan" else plan.checkpoints
    update = unlearn(
        model,
        case.split,
        mask,
        named(plan.objectives)[run.objective],
        optimizer=AdamW(lr=run.rate),
        steps=steps,
        seed=run.seed,
        batch_size=plan.batch_size,
        callback=checkpoint,
        checkpoints=checkpoints,
    )
    result: dict[str, Any] = {"status": update.status}
    if run.stage == "scan":
        # Unlearning of each fact: where the run ended, and averaged on the way there.
        return result | {"end": per_fact[-1], "mean": np.mean(per_fact, 0).tolist(), "rows": curve}
    rows = _areas(curve, plan)
    if run.stage == "compare":
        rows += [["update_norm", update.norm], ["n_parameters", mask.n_parameters]]
        rows += [["n_changed", update.n_changed], ["learning_rate", run.rate]]
        with update.applied(model):
            rows += _final(evaluate(model, case.split, reference=case.original, wrong=plan.wrong))
            rows += [["drift", float(drift(model, text).mean())]]
    return result | {"rows": curve + [[-1, name, float(value)] for name, value in rows]}


def _one_mlp(model: HookedModel, layer: int) -> Mask:
    mlps = model.components("mlp")
    return Mask(mlps, mlps.layers == layer, {"method": "layer", "layer": layer, "model": model.fingerprint})


def _original(model: HookedModel, case: Case, plan: Plan) -> dict[str, Any]:
    """The model as it is: the floor of every forget strength and the ceiling of every retain strength."""
    curve = [[0, name, value] for name, value in _strengths(model, case)[0].items()]
    whole = evaluate(model, case.split, reference=case.original, wrong=plan.wrong)
    rows = [*_areas(curve, plan), *_final(whole)]
    return {"status": "finished", "rows": curve + [[-1, name, float(value)] for name, value in rows]}


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
    return rows + [["forget_at_95", max(kept)]]


def points(curve: Sequence[Sequence[Any]], kind: str) -> list[tuple[float, float]]:
    """(retain, forget) strength of each checkpoint, in order; checkpoints of a diverged model (NaN) are left out."""
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in curve:
        if step >= 0:
            by_step.setdefault(step, {})[name] = value
    pairs = [(row[f"retain_{kind}"], row[f"forget_{kind}"]) for _, row in sorted(by_step.items())]
    return [pair for pair in pairs if np.isfinite(pair).all()]


def _final(evaluation: Evaluation) -> list[list[Any]]:
    rows: list[list[Any]] = [
        [f"{part}_{metric}", evaluation.mean(part, metric)] for part, metric in evaluation.per_fact
    ]
    return rows + [["utility", evaluation.utility()]]
