"""A study can be stopped anywhere, ends in the same table, and its numbers follow from its trajectories."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import as_users
from small import facts, model, unknown

from locus import runs, study
from locus.attacks import FullRelearn, LoRARelearn, Paraphrase
from locus.controlled import prepare
from locus.evaluate import DIRECTION, aues
from locus.folder import Folder
from locus.localize import Activations, AttributionPatching
from locus.plans import Plan, Planting
from locus.progress import Progress
from locus.runs import Run
from locus.sequential import Looks
from locus.study import compare
from locus.unlearn import NPO, MatchMLP

PLAN = Plan(
    localizers=(AttributionPatching(),),
    budget=0.1,
    draws=2,
    seeds=(0, 1),
    forget=4,
    part=6,
    steps=4,
    rates=(("masked", (1e-2, 3e-2)), ("kind", (1e-2,)), ("all", (1e-3, 3e-3))),
    extend=1,
    scan_layers=2,
    scan_steps=3,
    threads=1,
)


def run(out: Path, plan: Plan = PLAN, jobs: int = 1) -> pd.DataFrame:
    return compare(model(), facts(), plan, out=out, progress=False, jobs=jobs)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, pd.DataFrame]:
    out = tmp_path_factory.mktemp("study") / "run"
    return out, run(out)


def test_every_arm_of_every_seed_is_in_the_table(done):
    out, table = done
    assert list(table.columns) == study.COLUMNS
    ends = table[(table.metric == "aues") & (table.step == -1)]
    assert ends.groupby(["seed", "arm"]).size().to_dict() == {
        (seed, arm): 2 if arm == "random" else 1
        for seed in (0, 1)
        for arm in ("none", "top", "bottom", "random", "kind", "all")
    }
    size = table[table.metric == "n_parameters"].set_index(["seed", "arm", "draw"]).value
    assert size[0, "top", 0] == size[0, "bottom", 0] == size[0, "random", 0] == size[0, "random", 1]
    assert (
        size[0, "all", 0] == sum(w.numel() for w in model().weights.values()) > size[0, "kind", 0] > size[0, "top", 0]
    )
    norms = table[table.metric == "update_norm"]
    assert len(norms) == 2 * 6 and (norms.value > 0).all()
    assert (
        table[table.metric == "forget_strength"].groupby(["seed", "arm", "localizer", "draw"]).step.nunique().max() == 5
    )
    pd.testing.assert_frame_equal(table, pd.read_parquet(out / "table.parquet"))
    assert len(pd.read_csv(out / "table.csv")) == len(table)
    unknown = {m for m in table.metric.unique() if m not in DIRECTION}
    assert not unknown


def test_areas_follow_from_the_trajectories(done):
    _, table = done
    for key, part in table.groupby(["arm", "localizer", "objective", "seed", "draw"]):
        curve = part[part.step >= 0].pivot(index="step", columns="metric", values="value")
        points = list(zip(curve.retain_strength, curve.forget_strength, strict=True))
        value = part[part.step == -1].set_index("metric").value
        assert value["aues"] == aues(points) == value["aues_extraction"], key
        assert value["aues_halved"] == aues(points[::2])
        assert value["forget_at_95"] == max(f for r, f in points if r >= 0.95 * points[0][0])
    nothing = table[(table.arm == "none") & (table.metric == "aues")].value
    assert (nothing == 0).all()


def test_controls_match_the_located_mask_by_layer():
    case = runs.prepare(model(), facts(), None, PLAN, 0, draws=2)
    top = case.masks["AttributionPatching", "top", 0]
    for draw in (0, 1):
        random = case.masks["AttributionPatching", "random", draw]
        layers = top.components.layers
        for layer in layers.unique():
            assert top.selected[layers == layer].sum() == random.selected[layers == layer].sum()
    again = runs.prepare(model(), facts(), None, PLAN, 1, draws=1)
    assert set(case.split.forget) != set(again.split.forget)


def test_the_layer_scan_has_effect_and_unlearning_of_each_fact(done):
    out, _ = done
    scan = pd.read_parquet(out / "layer_scan.parquet")
    assert sorted(scan.layer.unique()) == [0, 2] and scan.groupby("layer").size().nunique() == 1
    assert scan.unlearning.between(0, 1).all() and scan.mean_unlearning.between(0, 1).all()
    case = runs.prepare(model(), facts(), None, PLAN, 0, draws=1)
    effects = runs.causal_effects(model(), case, 0)
    by_fact = dict(zip(effects["facts"], effects["values"], strict=True))
    for row in scan.itertuples():
        assert row.effect == by_fact[row.fact][row.layer]


def test_settings_say_everything(done):
    out, _ = done
    record = json.loads((out / "settings.json").read_text())
    assert record["settings"]["fingerprint"] == model().fingerprint and record["seeds"] == [0, 1]
    assert record["verdict rule"]["bound"] == PLAN.bound
    tuned = record["tuning"]["NPO"]
    assert set(tuned) == {"masked", "kind", "all"}
    for kind, found in tuned.items():
        areas = found["mean AUES by rate"]
        assert areas[f"{found['best']:.6g}"] == max(areas.values())
        assert found["chosen"] == min(float(rate) for rate, area in areas.items() if area >= max(areas.values()) - 0.01)
        assert len(areas) >= len(dict(PLAN.rates)[kind])
    assert record["checkpoints"]["limit"] == 0.005


def test_the_verdict_rule_is_written_before_the_first_run(tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    def execute(*_):
        assert json.loads((tmp_path / "run" / "settings.json").read_text())["verdict rule"] == study.rule(PLAN)
        raise Seen

    monkeypatch.setattr(runs, "execute", execute)
    threads = torch.get_num_threads()
    with pytest.raises(Seen):
        run(tmp_path / "run")
    assert torch.get_num_threads() == threads


def test_an_interrupted_study_goes_on_to_the_same_table(done, tmp_path, monkeypatch, capsys):
    _, expected = done
    out, save, count = tmp_path / "run", Folder.save, 0

    def stop_halfway(self, name, result):
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        save(self, name, result)

    monkeypatch.setattr(Folder, "save", stop_halfway)
    with pytest.raises(KeyboardInterrupt):
        run(out)
    monkeypatch.undo()
    files = sorted((out / "runs").glob("*.json"))
    assert len(files) == 8 and not (out / "table.parquet").exists()
    # A file cut short, one of another study, one with a number changed by hand, two in each other's place: each is
    # named and computed again.
    files[0].write_text(files[0].read_text()[:50])
    files[1].write_text(json.dumps(json.loads(files[1].read_text()) | {"settings": "0"}))
    changed = json.loads(files[2].read_text())
    changed["result"]["rows"][0][2] = 0.123
    files[2].write_text(json.dumps(changed))
    third, fourth = files[3].read_bytes(), files[4].read_bytes()
    files[3].write_bytes(fourth)
    files[4].write_bytes(third)
    pd.testing.assert_frame_equal(run(out), expected)
    said = capsys.readouterr().err
    for file, reason in zip(files, ("damaged", "other settings", "changed", "changed", "changed"), strict=False):
        assert any(file.name in line and reason in line for line in said.splitlines())


def test_several_jobs_give_the_same_table(done, tmp_path, monkeypatch):
    """Also when a worker fails: what it left is computed by the parent."""
    _, expected = done
    execute = runs.execute

    def fail_once(model, case, plan, run, text):
        if multiprocessing.parent_process() is not None and run.arm == "bottom":
            raise RuntimeError
        return execute(model, case, plan, run, text)

    monkeypatch.setattr(runs, "execute", fail_once)
    pd.testing.assert_frame_equal(run(tmp_path / "run", jobs=2), expected)
    with pytest.raises(ValueError, match="threads=1"):
        run(tmp_path / "other", replace(PLAN, threads=2), jobs=2)


def test_killed_at_any_moment(done, tmp_path):
    _, expected = done
    out = tmp_path / "run"
    code = "import sys, pathlib, test_study; test_study.run(pathlib.Path(sys.argv[1]), jobs=2)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], env=environment, cwd=Path(__file__).parent)
    deadline = time.monotonic() + 120
    while len(list((out / "runs").glob("*.json"))) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 3 <= len(list((out / "runs").glob("*.json")))
    pd.testing.assert_frame_equal(run(out), expected)


def test_a_folder_of_other_settings_is_refused(done, tmp_path):
    out, _ = done
    with pytest.raises(ValueError, match=r"other settings: steps was 4 and is now 6\. .*--out"):
        run(out, replace(PLAN, steps=6))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no study"):
        run(tmp_path)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        run(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_fails_has_a_status_and_the_study_goes_on(tmp_path):
    plan = replace(PLAN, seeds=(0,), draws=1, extend=0, rates=(("masked", (1e4,)), ("kind", (1e-2,)), ("all", (1e-2,))))
    table = run(tmp_path / "run", plan)
    status = table[table.metric == "aues"].set_index("arm").status
    assert status["top"] in ("diverged", "collapsed") and status["none"] == "finished"
    assert table[table.metric == "aues"].value.notna().all()


def test_the_best_rate_at_an_edge_extends_the_grid(tmp_path):
    def tuned(best: float, extend: int) -> dict:
        record: dict = {}
        plan = replace(PLAN, extend=extend, near=0.0)
        made = study._Study(
            model(), facts(), None, plan, Folder(tmp_path, "", print), Progress(0, enabled=False), record
        )
        made._tuning_area = lambda objective, kind, rate: -abs(rate - best)
        made._tune("NPO")
        return record["tuning"]["NPO"]["masked"]

    assert tuned(0.01 / 9, 3)["chosen"] == pytest.approx(0.01 / 9)
    found = tuned(0.03 * 3, 3)
    assert found["chosen"] == pytest.approx(0.09) and not found["at the edge"] and len(found["mean AUES by rate"]) == 4
    assert tuned(0.0299, 0)["best"] == 0.03
    assert tuned(10.0, 2)["at the edge"] and tuned(10.0, 2)["chosen"] == pytest.approx(0.27)


# ------------------------------------------------------------------------------------------------ planted knowledge

PLANTED = replace(
    PLAN,
    part=20,
    localizers=(AttributionPatching(),),
    rates=(("masked", (1e-2,)), ("kind", (1e-2,)), ("all", (1e-3,))),
    extend=0,
    planting=Planting(
        share=0.2,
        arms=("oracle", "random", "random-uniform", "complement", "kind", "all", "top", "bottom", "revert"),
        attacks=(FullRelearn(lr=1e-3, steps=2), Paraphrase()),
    ),
)


def planted(out: Path, plan: Plan = PLANTED, jobs: int = 1) -> pd.DataFrame:
    return compare(model(), unknown(24), plan, out=out, other=facts(), progress=False, jobs=jobs)


@pytest.fixture(scope="module")
def controlled(tmp_path_factory) -> tuple[Path, pd.DataFrame]:
    out = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCUS_CACHE", str(out / "cache"))
        return out, planted(out / "run")


def test_planted_arms_are_as_large_as_the_region_and_apart_from_it(controlled):
    _, table = controlled
    whole = table[(table.step == -1) & (table.attack == "")]
    size = whole[whole.metric == "n_parameters"].groupby(["seed", "arm"]).value.agg(["min", "max", "count"])
    for seed in (0, 1):
        place = size.loc[(seed, "oracle"), "max"]
        for arm, n in (("random", 2), ("random-uniform", 2), ("top", 1), ("bottom", 1)):
            assert tuple(size.loc[(seed, arm)]) == (place, place, n), arm
        assert size.loc[(seed, "complement"), "max"] + place == size.loc[(seed, "kind"), "max"]
        assert size.loc[(seed, "all"), "max"] == sum(w.numel() for w in model().weights.values())
    unknown_metrics = {m for m in table.metric.unique() if m not in DIRECTION}
    assert not unknown_metrics


def test_planted_states_are_floor_and_ceiling(controlled):
    _, table = controlled
    value = table[table.step == -1].set_index(["seed", "arm", "metric"]).value
    for seed in (0, 1):
        assert value[seed, "pretrained", "forget_exact"].max() < 0.5 < 0.9 < value[seed, "none", "forget_exact"].max()
        assert value[seed, "retain", "forget_exact"].max() < 0.5
        assert value[seed, "retain", "holdout_extraction_strength"].max() > 0.9
        assert value[seed, "retain", "forget_quality"].max() == 1 > value[seed, "none", "forget_quality"].max()
        assert value[seed, "revert", "distance_to_retained"].max() == 0
        assert value[seed, "revert", "aues"].max() >= value[seed, "none", "aues"].max()
        # An update that moves other entries than V's cannot come nearer to θ_r than V's own change is long.
        planted_norm = value[seed, "revert", "update_norm"].max()
        moved = table[(table.seed == seed) & (table.arm == "random")].set_index(["draw", "metric"]).value
        for draw in (0, 1):
            apart = (planted_norm**2 + moved[draw, "update_norm"] ** 2) ** 0.5
            assert moved[draw, "distance_to_retained"] == pytest.approx(apart, rel=1e-4)


def test_attacks_are_read_against_the_attacked_retained_model(controlled):
    _, table = controlled
    attacks = table[table.attack != ""].set_index(["seed", "arm", "metric", "attack"]).value
    assert set(table.attack) == {"", "full", "paraphrase", "any"}
    for seed in (0, 1):
        for arm in ("oracle", "random"):
            for point in ("matched", "best"):
                raw = attacks[seed, arm, f"attacked_{point}", "full"]
                lowest, original = attacks[seed, "retain", "attacked", "full"], 1.0
                assert attacks[seed, arm, f"recovery_{point}", "full"] == pytest.approx(
                    (raw - lowest) / (original - lowest), abs=0.2
                )
    assert (attacks.loc[:, "none", "attacked", "full"] > 0.9).all()


def test_more_seeds_are_added_to_a_study_and_a_killed_one_ends_the_same(controlled, monkeypatch):
    out, table = controlled
    monkeypatch.setenv("LOCUS_CACHE", str(out / "cache"))
    short = replace(PLANTED, seeds=(0,))
    first = planted(out / "grown", short)
    again = planted(out / "grown", PLANTED, jobs=2)
    pd.testing.assert_frame_equal(again, table)
    pd.testing.assert_frame_equal(first, table[table.seed == 0].reset_index(drop=True), check_exact=False)


def test_a_study_ends_when_a_look_decides(controlled, tmp_path, monkeypatch):
    out, _ = controlled
    monkeypatch.setenv("LOCUS_CACHE", str(out / "cache"))
    seen: list[int] = []

    class Decided:
        def __init__(self, table, **_):
            seen.append(table.seed.nunique())
            self.status = "go on" if len(seen) < 2 else "decided"

    monkeypatch.setattr(study, "verdict", Decided)
    place = replace(PLANTED.planting, attacks=(), arms=("oracle", "random"))
    plan = replace(PLANTED, planting=place, looks=Looks((3, 4, 5)), seeds=(0, 1, 2, 3, 4), steps=2)
    assert set(planted(tmp_path / "run", plan).seed) == {0, 1, 2, 3} and seen == [3, 4]


def test_a_plan_that_names_match_mlp_matches_the_retained_model_of_each_seed(controlled, monkeypatch):
    monkeypatch.setenv("LOCUS_CACHE", str(controlled[0] / "cache"))
    place = replace(PLANTED.planting, arms=("oracle", "random"))
    plan = replace(PLANTED, localizers=(), objectives=(MatchMLP(),), planting=place, steps=30, every=30, dense=1)
    case = prepare(model(), unknown(24), facts(), plan, 0, draws=1)
    away, steps = case.planted.planted.norm, []
    runs_of = [Run("compare", 0, "MatchMLP", arm, rate=1e-2) for arm in ("oracle", "random")]
    oracle, random = (runs.update_of(model(), case, plan, run, steps.append) for run in runs_of)
    assert steps == [0, 1, 30, 0, 1, 30] and model().state == model().fingerprint
    with case.planted.applied(model(), "retained"):
        retained = MatchMLP.towards(model(), case.split).reference
    assert oracle.objective.reference == random.objective.reference == retained
    # V can go back to θ_r, other entries can only make up for it.
    assert oracle.history[-1]["loss"] < 0.2 * oracle.history[0]["loss"]
    assert runs._distance_to_retained(model(), case.planted, oracle) < away
    assert runs._distance_to_retained(model(), case.planted, random) > away
    with pytest.raises(ValueError, match="only a planting has"):
        replace(PLAN, objectives=(MatchMLP(),))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"seeds": ()}, "seeds must be a tuple of ints"),
        ({"seeds": 2}, "seeds must be a tuple of ints"),
        ({"seeds": (True,)}, "seeds must be a tuple of ints"),
        ({"seeds": (-1, 0.5)}, "seeds must be a tuple of ints"),
        ({"seeds": (1, 1)}, "Seeds must differ"),
        ({"seeds": (1000,)}, "from tuning_seed=1000"),
        *(({"rates": rates}, "rates must be grids") for rates in (5, (), (("masked", (1e-3,)),), {"masked": 1e-3})),
        *(({"rates": (*PLAN.rates[:2], ("all", (x,)))}, "rates must be grids") for x in (0, -1e-3, math.nan, "1")),
        ({"rates": (*PLAN.rates[:2], ("all", (1e-3, 1e-3)))}, "grids of different rates"),
        ({"looks": Looks((3, 5)), "seeds": (0, 1, 2)}, "need as many seeds"),
        ({"looks": (3, 5)}, r"looks must be a Looks, like Looks\(\(5, 8, 12\)\), or None; got \(3, 5\)"),
        ({"looks": Looks}, "looks must be a Looks"),
        ({"planting": Planting}, r"planting must be a Planting, like Planting\(\), or None; got <class"),
        *(
            ({name: x}, f"{name} must be an int, 1")
            for name in ("draws", "steps", "scan_steps")
            for x in (0, 1.5, True)
        ),
        *(({name: 0}, f"{name} must be an int, 1 or more, or None; got 0") for name in ("batch_size", "scan_layers")),
        *(({name: -1}, f"{name} must be an int, 0 or more; got -1") for name in ("dense", "extend", "tuning_seed")),
        *(({"budget": x}, "budget must be a fraction in") for x in (0, 1.5, math.nan)),
        *(({n: x}, f"{n} must be a finite number above 0") for n in ("bound", "scan_rate") for x in (0, -1, math.nan)),
        *(({"near": x}, "near must be a finite number, 0 or more") for x in (-0.1, math.nan)),
        ({"strength": "xx"}, "strength must be one of extraction, probability; got 'xx'"),
        ({"kind": "neurons"}, "kind must be one of head, kv, neuron"),
        ({"localizers": AttributionPatching()}, r"give a tuple, like \(AttributionPatching\(\),\)"),
        ({"localizers": ("relp",)}, r"objects like AttributionPatching\(\); got 'relp'"),
        ({"localizers": ()}, "at least one of its localizers"),
        ({"localizers": (AttributionPatching(),) * 2}, "given twice"),
        ({"localizers": (Activations(),), "kind": "head"}, "Activations does not score components of kind 'head'"),
        ({"planting": Planting(kind="weight")}, "AttributionPatching scores no single weights"),
        ({"objectives": NPO()}, r"give a tuple, like \(NPO\(\),\)"),
        ({"objectives": (MatchMLP,), "planting": Planting()}, r"give an instance, MatchMLP\(\)"),
    ],
)
def test_plan_refuses_what_cannot_be(wrong, said):
    with pytest.raises(ValueError, match=said):
        as_users(Plan, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"arms": ("oracle",)}, "needs both arms"),
        ({"arms": ("oracle", "random", "elsewhere")}, "some of oracle, random, .*elsewhere"),
        ({"arms": "oracle"}, "some of oracle, random"),
        ({"attacked": ("top",), "arms": ("oracle", "random")}, r"the edited arms, \('oracle', 'random'\); got \('top'"),
        ({"attacked": ("revert",)}, "edited arms"),
        ({"attacks": (LoRARelearn,)}, r"give an instance, LoRARelearn\(\)"),
        ({"attacks": FullRelearn()}, "give a tuple"),
        *(
            ({"attacked_objectives": x}, "attacked_objectives must be an int, 1 or more, or None")
            for x in (0, -1, True)
        ),
        *(({name: x}, f"{name} must be a fraction") for name in ("share", "strength") for x in (0, 1.1, math.nan)),
        ({"kind": "neurons"}, "kind must be one of head, .*weight; got 'neurons'"),
    ],
)
def test_planting_refuses_what_cannot_be(wrong, said):
    with pytest.raises(ValueError, match=said):
        as_users(Planting, **wrong)


def test_jobs_are_checked_before_a_file_is_made(tmp_path):
    for jobs in (0, -1):
        with pytest.raises(ValueError, match="jobs must be an int, 1 or more, or None"):
            run(tmp_path / "run", jobs=jobs)
    assert not (tmp_path / "run").exists()


def test_checkpoints_and_files():
    assert Plan(steps=10, dense=3, every=4).checkpoints == [0, 1, 2, 3, 7, 10]
    assert Plan(steps=2, dense=5).checkpoints == [0, 1, 2]
    assert Run("compare", 3, "NPO", "random", "Activations()", 2, 1e-3).file == (
        "compare-seed3-NPO-Activations__-random-draw2-0.001.json"
    )


def test_progress_is_plain_lines_when_nobody_watches(capsys):
    bar = Progress(3, seconds=0.0)
    bar.stage("seed 0")
    bar.done("top")
    bar.extend(-1)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "seed 0" and "33%, top" in lines[1] and "left" in lines[1] and "\r" not in "".join(lines)


def test_all_runs_are_counted_before_the_first_and_none_twice(controlled, tmp_path, monkeypatch):
    """The time left is that of the whole study: nothing is added on the way but what tuning adds."""
    out, _ = controlled
    monkeypatch.setenv("LOCUS_CACHE", str(out / "cache"))
    bars = []

    class Counted(Progress):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            bars.append(self)

        def stage(self, name):
            if name == "tuning learning rates":
                self.expected = self._total
            super().stage(name)

    monkeypatch.setattr(study, "Progress", Counted)
    for make, plan in ((run, replace(PLAN, extend=0)), (planted, PLANTED)):
        make(tmp_path / make.__name__, replace(plan, seeds=(0,)))
        assert bars[-1]._done == bars[-1]._total == bars[-1].expected
