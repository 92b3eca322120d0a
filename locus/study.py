"""Compare editing what was located with editing somewhere else: arms, tuning, seeds, resuming.

A study is a list of runs (locus.runs), each with its own result file, so it can be stopped at any moment and goes on
with the same call. The table is assembled from those files alone.

Left out: attacks on runs whose knowledge was not planted (attacks.attack does it for one).
"""

import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from locus import controlled, runs
from locus.evaluate import DriftText, aues, drift_text
from locus.facts import Facts
from locus.folder import Folder, enter, write
from locus.models import HookedModel
from locus.plans import Plan, named
from locus.progress import Progress
from locus.require import COUNT, require
from locus.runs import Case, Run
from locus.verdict import verdict

# Without the table, whose help is that of every DataFrame.
__all__ = ["COLUMNS", "compare", "rule"]

# Of table.parquet and table.csv: one measured number a row. step = -1 for numbers of a whole run; attack = what the run
# was attacked with, "" for numbers of the run itself.
COLUMNS = "model facts localizer arm kind budget objective seed draw step metric value status attack".split()


class Table(pd.DataFrame):
    """The table of a study, which shows what it found at a glance. What is taken from it is an ordinary DataFrame."""

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        whole = self[(self.step == -1) & (self.metric == "aues") & (self.attack == "")]
        seeds = whole.groupby(["arm", "seed"]).value.mean()
        arms = ", ".join(f"{arm} {values.mean():.3f}" for arm, values in seeds.groupby("arm"))
        where = " on ".join(dict.fromkeys([*self.model, *self.facts]))
        counts = f"{whole.seed.nunique()} seeds, {len(whole)} runs, {len(self):,} rows"
        return f"study of {where}: {counts}; mean AUES: {arms}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from locus.view import study

        drawn = (self.metric == "aues") & ~self.arm.isin(runs.STATES) & self.value.notna()
        # None: nothing to draw, and a notebook shows the rows.
        return study(self)._repr_mimebundle_() if drawn.any() else None


def compare(
    model: HookedModel,
    facts: Facts,
    plan: Plan | None = None,
    *,
    out: str | Path,
    other: Facts | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Table:
    """Does editing located components unlearn better than editing somewhere else? Returns the table.

    Arms, for each seed and objective: each localizer's `top` and `bottom` components, `random` ones of the same number
    in every layer, all components of the `kind`, `all` parameters, and `none` (the model as it is). Then every layer's
    MLP is edited alone and compared with its causal effect, fact by fact.

    With a `plan.planting` the facts are planted in a known region first, each seed in another one. The arms are those
    of the planting, with `pretrained`, `retain` and `none` for θ_p, θ_r and θ_o; then the chosen ones are attacked.

    facts: those that the model does not know are dropped first, unless they are planted.
    other: facts of other relations, only measured; with a planting, facts of other subjects that the model knows.
    out: the run folder. Results are kept there as they come, and the same call goes on where it was stopped; a folder
        of other settings is refused. It ends with table.parquet, table.csv, layer_scan.parquet and settings.json.
    jobs: runs at a time, each in a process of its own; by default one a core if plan.threads is 1, else one. No number
        depends on it.
    """
    plan = plan or Plan()
    jobs = _jobs(jobs, model, plan)
    bar = Progress(0, enabled=progress)
    threads = torch.get_num_threads()
    # The number of threads can change the last bits of a sum, so it is one of the settings.
    torch.set_num_threads(plan.threads)
    try:
        facts = facts if plan.planting else facts.known_by(model)
        other = other.known_by(model) if other else None
        settings = _settings(model, facts, other, plan)
        # More seeds may be added to a study later, so they are no part of what it is.
        record = {"settings": settings, "verdict rule": rule(plan), "seeds": list(plan.seeds)}
        folder = enter(Path(out), settings, record, bar.say)
        return _Study(model, facts, other, plan, folder, bar, record, jobs).run()
    finally:
        bar.close()
        torch.set_num_threads(threads)


def rule(plan: Plan) -> dict[str, Any]:
    """How the study will be judged; written down before its first run."""
    return {
        "metric": "aues",
        "contrast": f"{'oracle' if plan.planting else 'top'} minus the mean of its random draws, paired by seed",
        "localizers": [] if plan.planting else list(named(plan.localizers)),
        "objectives": list(named(plan.objectives)),
        "bound": plan.bound,
        "equivalent": "the 90% interval of the difference is inside ± bound",
        "better or worse": "else the 95% interval excludes 0, Holm over contrasts",
        "undecided": "else",
        "looks": dataclasses.asdict(plan.looks) if plan.looks else None,
    }


class _Study:
    """One call of compare(): the list of runs, and where their results go."""

    def __init__(
        self,
        model: HookedModel,
        facts: Facts,
        other: Facts | None,
        plan: Plan,
        folder: Folder,
        bar: Progress,
        record: dict[str, Any],
        jobs: int = 1,
    ) -> None:
        self.model, self.facts, self.other, self.plan = model, facts, other, plan
        self.folder, self.bar, self.record, self.jobs = folder, bar, record, jobs
        self.objectives = list(named(plan.objectives))
        self.arms = [arm for arm in runs.arms(plan) if arm[1] not in runs.STATES]
        self.states = ["none"]
        if plan.planting:
            self.states += ["retain", *(arm for arm in plan.planting.arms if arm in runs.STATES)]
        self._cases: dict[int, Case] = {}
        self._text: DriftText | None = None

    def run(self) -> Table:
        plan = self.plan
        scanned = () if plan.planting else plan.seeds[: plan.scan_seeds]
        layers = _layers(self.model.cfg.n_layers, plan.scan_layers)
        tuning = sum(len(grid) * len(self._tuned_on(kind)) for kind, grid in plan.rates)
        looks = plan.looks.at if plan.looks else (len(plan.seeds),)
        self.bar.extend(len(self.objectives) * tuning + len(scanned) * (len(layers) + 1))
        self.bar.extend(self._work_a_seed() * looks[0])
        planted = self._plant((plan.tuning_seed, *plan.seeds[: looks[0]]))
        self.bar.stage("tuning learning rates")
        rates = {objective: self._tune(objective) for objective in self.objectives}
        results = [(run, result) for run, result in planted if run.seed != plan.tuning_seed]
        for before, n in zip((0, *looks), looks, strict=False):
            seeds = plan.seeds[before:n]
            self.bar.extend(self._work_a_seed() * len(seeds) if before else 0)
            results += self._plant(seeds) if before else []
            results += [result for seed in seeds for result in self._compare(seed, rates)]
            tables = [_table(self.model.name, self.facts.name, plan, results)]
            if plan.looks and verdict(tables[0], bound=plan.bound, looks=plan.looks).status != "go on":
                break
        if plan.planting and plan.planting.attacks:
            compared = dict.fromkeys(run.seed for run, _ in results)
            tables += [self._attack(seed, [r for r in results if r[0].seed == seed]) for seed in compared]
        if scanned:
            self.bar.stage("editing one layer at a time")
            self._keep("layer_scan", pd.concat([self._scan(seed, layers) for seed in scanned], ignore_index=True))
        table = Table(pd.concat(tables, ignore_index=True))
        self.record["checkpoints"] = density(table)
        self._keep("table", table)
        write(self.folder.path / "table.csv", lambda path: table.to_csv(path, index=False))
        self.folder.note(self.record)
        return table

    def _work_a_seed(self) -> float:
        """That of the runs and attacks of one seed, its planting apart, in runs."""
        work = float(len(self.states) + len(self.objectives) * len(self.arms))
        if self.plan.planting and self.plan.planting.attacks:
            attacked = [draw for _, arm, draw in self.arms if arm in self.plan.planting.attacked and draw == 0]
            objectives = self.objectives[: self.plan.planting.attacked_objectives]
            work += self._work_of("attack") * (2 + 2 * len(objectives) * len(attacked))
        return work

    def _work_of(self, stage: str) -> float:
        """About how much longer than a run one result of a stage takes: by its steps, or as planting did on tiny."""
        if stage == "attack" and self.plan.planting:
            # An attacked run is made again up to the point where it is attacked.
            steps = sum(getattr(attack, "steps", 0) for attack in self.plan.planting.attacks)
            return 0.5 + steps / self.plan.steps
        return 4.0 if stage == "plant" else 1.0

    def _keep(self, name: str, table: pd.DataFrame) -> None:
        write(self.folder.path / f"{name}.parquet", lambda path: table.to_parquet(path, index=False))

    def _plant(self, seeds: Sequence[int]) -> list[tuple[Run, dict[str, Any]]]:
        """Plant the knowledge of some seeds, several at a time; `prepare` finds it in the cache afterwards.

        Returns how θ_p does on the facts of each seed.
        """
        if not self.plan.planting:
            return []
        self.bar.stage("planting")
        self.bar.extend(self._work_of("plant") * len(seeds))
        todo = [Run("plant", seed, "", "pretrained") for seed in seeds]
        self._fill(todo)
        return [(run, self._result(run)) for run in todo]

    def _attack(self, seed: int, results: list[tuple[Run, dict[str, Any]]]) -> pd.DataFrame:
        """What attacks bring back, of the chosen arms at two points each, and of θ_r and θ_o."""
        self.bar.stage(f"seed {seed}: attacks")
        todo = [Run("attack", seed, "", "retain"), Run("attack", seed, "", "none")]
        todo += controlled.attacks_of(results, self.plan)
        self._fill(todo)
        found = [(run, self._result(run)["attacks"]) for run in todo]
        heads = [_head(self.model.name, self.facts.name, self.plan, run) for run, _ in found]
        rows = [
            (*head, -1, metric, value, "finished", attack)
            for head, of_run in zip(heads, controlled.recoveries(found, self.plan), strict=True)
            for metric, attack, value in of_run
        ]
        return pd.DataFrame(rows, columns=COLUMNS).astype({"value": float})

    def _compare(self, seed: int, rates: dict[str, dict[str, float]]) -> list[tuple[Run, dict[str, Any]]]:
        self.bar.stage(f"seed {seed}")
        todo = [Run("compare", seed, "", state) for state in self.states]
        for objective in self.objectives:
            for localizer, arm, draw in self.arms:
                run = Run("compare", seed, objective, arm, localizer, draw)
                todo.append(replace(run, rate=rates[objective][run.type]))
        self._fill(todo)
        return [(run, self._result(run)) for run in todo]

    def _tuned_on(self, kind: str) -> list[tuple[str, str, int]]:
        """The masks that a rate is tuned on: for masked ones, as many located as random."""
        if kind != "masked":
            return [arm for arm in self.arms if Run("", 0, "", arm[1]).type == kind][:1]
        if self.plan.planting:
            return [("", "oracle", 0), ("", "random", 0)]
        located = list(named(self.plan.localizers))[: self.plan.tuning_localizers]
        return [(name, arm, 0) for name in located for arm in ("top", "random")]

    def _tune(self, objective: str) -> dict[str, float]:
        """The rate of each type of arm, by mean AUES on the tuning seed."""
        chosen = {}
        tuning = self.record.setdefault("tuning", {})[objective] = {}
        for kind, grid in self.plan.rates:
            if not self._tuned_on(kind):
                continue
            areas = functools.partial(self._tuning_areas, objective, kind)
            tuning[kind] = runs.search_rate(areas, grid, extend=self.plan.extend, near=self.plan.near)
            chosen[kind] = tuning[kind]["chosen"]
        self.folder.note(self.record)
        return chosen

    def _tuning_areas(self, objective: str, kind: str, rates: Sequence[float]) -> list[float]:
        tuned = self._tuned_on(kind)
        if not set(rates) <= set(dict(self.plan.rates)[kind]):
            self.bar.extend(len(rates) * len(tuned))
        self._fill([self._tuning_run(objective, arm, rate) for rate in rates for arm in tuned])
        return [self._tuning_area(objective, kind, rate) for rate in rates]

    def _tuning_area(self, objective: str, kind: str, rate: float) -> float:
        areas = []
        for arm in self._tuned_on(kind):
            result = self._result(self._tuning_run(objective, arm, rate))
            areas += [value for step, name, value in result["rows"] if (step, name) == (-1, "aues")]
        return float(np.mean(areas))

    def _tuning_run(self, objective: str, arm: tuple[str, str, int], rate: float) -> Run:
        return Run("tune", self.plan.tuning_seed, objective, arm[1], arm[0], arm[2], rate)

    def _scan(self, seed: int, layers: list[int]) -> pd.DataFrame:
        """Causal effect of each layer's MLP on each fact, and what editing that MLP alone unlearns of it.

        effect: logit difference that the MLP's clean output restores in the corrupted run, patched at all positions.
        unlearning: 1 - min(1, p / p of the original) at the end of the run; mean_unlearning: averaged over its
            checkpoints, for runs that end with nothing left in any layer.
        """
        name = f"scan-seed{seed}-effects.json"
        effects = self._kept(name, seed, lambda case: runs.causal_effects(self.model, case, seed))
        frames = []
        for layer in layers:
            result = self._result(Run("scan", seed, self.objectives[0], "mlp", rate=self.plan.scan_rate, layer=layer))
            columns = {
                "layer": layer,
                "fact": effects["facts"],
                "effect": [row[layer] for row in effects["values"]],
            }
            columns |= {"unlearning": result["end"], "mean_unlearning": result["mean"]}
            frames.append(pd.DataFrame(columns | {"seed": seed, "status": result["status"]}))
        # A fact without an aligned partner has no causal effect to compare with.
        return pd.concat(frames, ignore_index=True).dropna(subset="effect", ignore_index=True)

    def _result(self, run: Run) -> dict[str, Any]:
        def execute(case: Case) -> dict[str, Any]:
            if run.stage == "attack":
                return controlled.execute(self.model, case, self.plan, run)
            return runs.execute(self.model, case, self.plan, run, self._drift_text())

        return self._kept(run.file, run.seed, execute, str(run), self._work_of(run.stage))

    def _kept(
        self, name: str, seed: int, make: Callable[[Case], dict[str, Any]], label: str = "", work: float = 1.0
    ) -> dict[str, Any]:
        """The result of that name: read if it is there, made and kept if not."""
        result = self.folder.load(name)
        if result is not None:
            self.bar.extend(-work)
            return result
        result = make(self._case(seed))
        self.folder.save(name, result)
        self.bar.done(label or name, work)
        return result

    def _fill(self, todo: Sequence[Run]) -> None:
        """Compute missing results of one seed, several at a time, into the run folder.

        Nothing depends on it: what a worker did not finish, for whatever reason, is computed afterwards here.
        """
        if self.jobs == 1:
            return
        missing = [run for run in todo if self.folder.load(run.file) is None]
        if len(missing) < 2:
            return
        if missing[0].stage != "plant":
            self._case(missing[0].seed), self._drift_text()  # before the processes part, so that they share them
        work = self._work_of(missing[0].stage)
        context = multiprocessing.get_context("fork")
        following = context.Value("i", 0)
        workers = [context.Process(target=self._work, args=(missing, following, os.getpid())) for _ in range(self.jobs)]
        waiting = {self.folder.path / "runs" / run.file: run for run in missing}
        try:
            with warnings.catch_warnings():
                # Python warns of threads at a fork; the workers use none of this process's.
                warnings.simplefilter("ignore", DeprecationWarning)
                for worker in workers:
                    worker.start()
            while any(worker.is_alive() for worker in workers):
                time.sleep(0.05)
                for path in [path for path in waiting if path.exists()]:
                    self.bar.done(str(waiting.pop(path)), work)
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()
        for path in [path for path in waiting if path.exists()]:
            self.bar.done(str(waiting.pop(path)), work)
        # These are read again in a moment, and must not count as results of an earlier call.
        self.bar.extend(work * (len(missing) - len(waiting)))

    def _work(self, todo: Sequence[Run], following: Any, parent: int) -> None:
        """A worker: take the next run until there is none left, or the parent is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.folder = replace(self.folder, say=lambda text: None)
        self.bar = Progress(0, enabled=False)
        while os.getppid() == parent:
            with following.get_lock():
                i, following.value = following.value, following.value + 1
            if i >= len(todo):
                return
            try:
                self._result(todo[i])
            except Exception:
                return  # the parent meets the same error, and can say it

    def _drift_text(self) -> DriftText:
        if self._text is None:
            self._text = drift_text(self.model)
        return self._text

    def _case(self, seed: int) -> Case:
        if seed not in self._cases:
            draws = 1 if seed == self.plan.tuning_seed else self.plan.draws
            # One seed at a time: the masks of a large model are large.
            prepare = controlled.prepare if self.plan.planting else runs.prepare
            self._cases = {seed: prepare(self.model, self.facts, self.other, self.plan, seed, draws=draws)}
        return self._cases[seed]


def _jobs(wanted: int | None, model: HookedModel, plan: Plan) -> int:
    """How many runs at a time. Forked processes share the model; with threads of their own they could hang."""
    require(COUNT.or_none, jobs=wanted)
    possible = plan.threads == 1 and model.device.type == "cpu" and sys.platform == "linux"
    if wanted is not None and wanted > 1 and not possible:
        raise ValueError(
            f"jobs={wanted} needs Linux, a model on the CPU and a plan with threads=1; got {sys.platform}, "
            f"{model.device.type} and threads={plan.threads}. Leave jobs out to do one run at a time."
        )
    if wanted is not None:
        return wanted
    return len(os.sched_getaffinity(0)) if possible else 1


def _settings(model: HookedModel, facts: Facts, other: Facts | None, plan: Plan) -> dict[str, Any]:
    """All that decides a number of the study, as JSON."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    fields |= {name: [repr(method) for method in fields[name]] for name in ("localizers", "objectives")}
    for name in ("seeds", *(("kind", "budget") if plan.planting else ())):  # the planting has its own
        del fields[name]
    fields["looks"] = dataclasses.asdict(plan.looks) if plan.looks else None
    if plan.planting:
        fields["planting"] = dataclasses.asdict(plan.planting) | {"attacks": [repr(a) for a in plan.planting.attacks]}
    listed = [[dataclasses.astuple(fact) for fact in some or ()] for some in (facts, other)]
    names = ("locus-interp", "torch", "transformers", "transformer-lens")
    settings = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "facts": facts.name,
        "known facts": len(facts),
        "facts sha256": hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:12],
        **fields,
        "versions": {name: version(name) for name in names},
    }
    return json.loads(json.dumps(settings))


def _layers(n: int, wanted: int | None) -> list[int]:
    """`wanted` layers, evenly spaced from the first to the last; all if there are no more."""
    if wanted is None or wanted >= n:
        return list(range(n))
    return sorted({round(x) for x in np.linspace(0, n - 1, wanted).tolist()})


def _table(model: str, facts: str, plan: Plan, results: Sequence[tuple[Run, dict[str, Any]]]) -> pd.DataFrame:
    rows = []
    common = _common_areas(plan, results)
    names = {f"{side}_{kind}": f"{side}_strength_{kind}" for side in ("forget", "retain") for kind in runs.KINDS}
    names |= {f"{side}_{plan.strength}": f"{side}_strength" for side in ("forget", "retain")}
    for i, (run, result) in enumerate(results):
        head = _head(model, facts, plan, run)
        numbers = [*result["rows"], [-1, "aues_common", common[i]]]
        rows += [
            (*head, step, names.get(m, m) if step >= 0 else m, value, result["status"], "")
            for step, m, value in numbers
        ]
    return pd.DataFrame(rows, columns=COLUMNS).astype({"value": float})


def _head(model: str, facts: str, plan: Plan, run: Run) -> tuple[Any, ...]:
    place = plan.planting
    kind, budget = (place.kind, place.share) if place else (plan.kind, plan.budget)
    return (model, facts, run.localizer, run.arm, kind, budget, run.objective, run.seed, run.draw)


def _common_areas(plan: Plan, results: Sequence[tuple[Run, dict[str, Any]]]) -> list[float]:
    """AUES over the range of retain strength that every run of its seed and objective reaches; NaN if there is none."""
    points = [runs.points(result["rows"], plan.strength) for _, result in results]
    areas = []
    for run, _ in results:
        peers = [
            p for p, (r, _) in zip(points, results, strict=True) if (r.seed, r.objective) == (run.seed, run.objective)
        ]
        low = max(min(retained for retained, _ in p) for p in peers)
        high = min(max(retained for retained, _ in p) for p in peers)
        areas.append((low, high))
    return [
        aues(p, between=(max(0.0, low), min(1.0, high))) if min(1.0, high) - max(0.0, low) > 0.01 else math.nan
        for p, (low, high) in zip(points, areas, strict=True)
    ]


def density(table: pd.DataFrame, *, limit: float = 0.005) -> dict[str, Any]:
    """Whether the checkpoints are dense enough: how far AUES moves when every other one is left out."""
    whole = table[(table.step == -1) & ~table.arm.isin(runs.STATES)]
    keys = ["localizer", "arm", "objective", "seed", "draw"]
    wide = whole[whole.metric.isin(["aues", "aues_halved"])].pivot(index=keys, columns="metric", values="value")
    moved = (wide["aues"] - wide["aues_halved"]).abs()
    mean, largest = float(moved.mean()), float(moved.max())
    return {
        "mean change of AUES when halved": mean,
        "largest": largest,
        "limit": limit,
        "met": bool(mean < limit),
    }
