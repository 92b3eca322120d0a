"""The command line: exit codes, one clear line for a mistake, and the commands really run."""

import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
from small import facts, model, unknown

import locus
from locus import cli, plans
from locus.localize import METHODS, AttributionPatching, name_of
from locus.plans import Plan

# What a log or a pipe should not hold: escapes, carriage returns, boxes and bars.
CONTROLS = re.compile("[\x1b\r\u2500-\u259f]")


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def shrink(put=setattr) -> None:
    """The commands on the small model instead of a built-in one."""
    put(cli, "_load", lambda name: model())
    put(cli, "_facts", lambda name, of: (facts(), None))


def shrink_study(put=setattr) -> None:
    """And a study of ten runs or so."""
    shrink(put)
    rates = (("masked", (1e-2,)), ("kind", (1e-2,)), ("all", (1e-3,)))
    plan = Plan((AttributionPatching(),), rates=rates, extend=0, draws=1, seeds=(0,), steps=4, forget=4, scan_seeds=0)
    put(plans, "comparison_plan", lambda model, full: plan)


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch.setattr)


def test_help_is_quick_and_shows_an_example_of_each():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", "import locus.cli; locus.cli.main(['--help'])"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    # Processor time: the clock on the wall measures who else is at work.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5
    assert "The loop: model + facts" in done.stdout and not CONTROLS.search(done.stdout)
    for command in ("compare", "study", "inj", "localize", "unlearn", "sites", "report", "fetch"):
        assert command in done.stdout
    assert done.stdout.count("Example:") == 8


@pytest.mark.parametrize("words", [("nonsense",), ("compare", "--budget", "much"), ("fetch", "gpt5"), ("report",)])
def test_wrong_words_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(words))
    assert stop.value.code == 2


def test_mistakes_are_one_line_with_the_way_out(tmp_path, capsys):
    for words in (
        ("sites", str(tmp_path / "absent")),
        ("sites", str(tmp_path)),
        ("report", str(tmp_path)),
    ):
        code, out, err = run(capsys, *words)
        assert code == 2 and out == "" and err.startswith("locus: ") and err.count("\n") == 1, words
        assert "Traceback" not in err


@pytest.mark.parametrize("command", ["compare", "study", "inj", "sites", "localize"])
def test_ctrl_c_says_how_to_go_on(command, monkeypatch, capsys):
    def stop(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", stop)
    words = (command,) if command in ("sites", "localize") else (command, "--out", "my run")
    code, _, err = run(capsys, *words)
    assert code == 130
    assert ("the same command goes on: locus " in err) == (command in ("compare", "study", "inj"))
    assert f"goes on: locus {command} --out 'my run'" in err or "Nothing was kept" in err


def test_a_study_that_was_interrupted_goes_on_to_the_same_table(monkeypatch, capsys, tmp_path):
    """SIGINT as a terminal sends it; then the very command that was said."""
    shrink_study(monkeypatch.setattr)
    monkeypatch.setattr(import_module("locus.report"), "report", str)  # takes longer than the study
    stopped, whole = tmp_path / "stopped run", tmp_path / "whole"
    script = (
        "import signal, sys; from test_cli import cli, shrink_study; shrink_study()\n"
        # A job that a shell started in the background is deaf to it otherwise.
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", script, "compare", "--budget", "0.1", "--out", str(stopped)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and len(list(stopped.glob("runs/*.json"))) < 3:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and not CONTROLS.search(out + err), err
    assert not (stopped / "table.csv").exists()
    made = {path.name: path.stat().st_mtime_ns for path in stopped.glob("runs/*.json")}
    again = shlex.split(err.split("goes on: locus ")[1])
    assert run(capsys, *again)[0] == 0 and run(capsys, "compare", "--budget", "0.1", "--out", str(whole))[0] == 0
    assert {name: (stopped / "runs" / name).stat().st_mtime_ns for name in made} == made
    pd.testing.assert_frame_equal(pd.read_csv(stopped / "table.csv"), pd.read_csv(whole / "table.csv"))


def test_long_work_in_a_log_is_plain_lines(monkeypatch, capsys):
    from locus import progress

    monkeypatch.setattr(progress, "SECONDS", 0.01)
    for _ in progress.tqdm(range(4), desc="patching", unit="cell", leave=True):
        time.sleep(0.02)
    with progress.tqdm(total=9, disable=True) as bar:
        bar.update()
    err = capsys.readouterr().err
    assert "patching: 75%; about 0 s left\n" in err and not CONTROLS.search(err) and err.count("\n") <= 4


def test_sites(small, capsys):
    code, out, _ = run(capsys, "sites", "tiny")
    assert code == 0 and "hook     blocks.LAYER.mlp.hook_post [batch, pos, 48]" in out
    assert "model.layers.0.mlp.down_proj.weight" in out and "the value vector that it adds" in out
    assert "blocks.LAYER.hook_resid_pre " in out
    assert "expert: none" in out


def test_every_method_has_a_name():
    assert [name_of(method) for method in METHODS] == list(get_args(cli.Method))
    for method in METHODS:
        assert type(cli._method(name_of(method), 3)) is method


def test_localize(small, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, *"localize tiny --components head --top 3 --method relp --sample 8".split())
    made = tmp_path / "runs" / "localize-tiny-head-relp"
    scores = locus.Scores.load(made / "scores.safetensors")
    ranked = pd.read_csv(made / "table.csv")
    assert code == 0 and list(ranked.component) == list(scores.top(len(scores.components)).component)
    assert all(label in out for label in ranked.component[:3]) and ranked.component[3] not in out
    assert "Pearson" in out and "stability" in out and "forward" in out
    assert "RelP" in (made / "chart.html").read_text(encoding="utf-8")
    code, out, _ = run(capsys, *"localize tiny --components mlp --method wagle --n 4 --sample 0".split())
    assert code == 0 and "WAGLE" in out and "Pearson" not in out
    code, _, err = run(capsys, "localize", "tiny", "--method", "activations", "--components", "head")
    assert code == 2 and "head" in err


def test_unlearn(small, capsys, tmp_path):
    edit = tmp_path / "edit"
    code, out, _ = run(
        capsys,
        "unlearn",
        "tiny",
        "--forget",
        "4",
        "--steps",
        "5",
        "--lr",
        "0.03",
        "--budget",
        "0.2",
        "--out",
        str(edit),
    )
    assert code == 0 and "entries changed" in out and "mean after" in out and edit.is_dir()


def test_mistakes_are_refused_before_any_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "_load", lambda name: pytest.fail("a model was loaded"))
    for words, said in (
        (("unlearn", "tiny", "--out", str(tmp_path)), "--out"),
        (("unlearn", "tiny", "--save-model", str(tmp_path)), "--save-model"),
        (("unlearn", "tiny", "--lr", "nan"), "lr must be finite"),
        (("unlearn", "tiny", "--lr", "-1"), "lr must be finite"),
        (("localize", "tiny", "--n", "0"), "--n"),
        (("localize", "tiny", "--top", "-1"), "--top"),
        (("localize", "tiny", "--sample", "-2"), "--sample"),
        (("localize", "tiny", "--out", __file__), "name of a folder"),
        *(((command, "--out", __file__), "name of a folder") for command in ("compare", "study", "inj")),
        (("study", "--out", __file__ + "/run"), "name of a folder"),
        (("unlearn", "tiny", "--steps", "0"), "steps must be an int, 1 or more; got 0"),
        (("study", "--cap", "8"), "--cap goes with --until-decided"),
        (("compare", "--draws", "0"), "draws must be an int, 1 or more; got 0"),
        (("compare", "--budget", "0"), "budget must be a fraction in (0, 1]; got 0.0"),
        (("compare", "--seeds", "1", "1"), "Seeds must differ"),
        (("compare", "--seeds", "-1"), "seeds must be a tuple of ints, 0 or more"),
        (("compare", "--components", "head", "--methods", "activations"), "does not score components of kind 'head'"),
        (("study", "--draws", "0"), "draws must be an int, 1 or more; got 0"),
        (("study", "--methods", "relp", "--arms", "oracle", "random"), "add them: --arms oracle random top"),
        (("study", "--share", "0"), "share must be a fraction in (0, 1]"),
        (("study", "--until-decided", "--cap", "0"), "cap must be an int, 1 or more; got 0"),
        (("study", "--until-decided", "--cap", "2"), "growing numbers of seeds"),
        (("inj", "--sentences", "-3"), "sentences must be an int, 1 or more; got -3"),
        (("inj", "--seed", "-1"), "seed must be an int, 0 or more; got -1"),
        (("inj", "--r", "0"), "r must be a fraction in (0, 1]"),
        (("inj", "--steps", "0"), "steps must be an int, 1 or more"),
    ):
        code, out, err = run(capsys, *words)
        assert code == 2 and out == "" and said in err and err.count("\n") == 1, words


def test_what_fails_for_no_mistake_exits_with_1(monkeypatch, capsys):
    def full(name):
        raise OSError("No space left on device")

    monkeypatch.setattr(cli, "_load", full)
    assert run(capsys, "sites") == (1, "", "locus: No space left on device\n")


def test_a_diverged_update_is_not_saved(small, capsys, tmp_path):
    edit = tmp_path / "edit"
    code, _, err = run(capsys, *"unlearn tiny --forget 4 --steps 5 --lr 1e20 --budget 0.2 --out".split(), str(edit))
    assert code == 1 and "diverged" in err and "smaller --lr" in err and not edit.exists()


def test_inj_says_how_many_sentences_were_not_learned(monkeypatch, small, capsys, tmp_path):
    monkeypatch.setattr(import_module("locus.inj"), "sentences", lambda model, n, seed: unknown(n))
    monkeypatch.setattr(plans, "planted_facts", lambda model: (unknown(), facts()))
    words = "inj --r 0.3 --steps 1 --methods random --out".split()
    code, out, _ = run(capsys, *words, str(tmp_path / "run"), "--sentences", "2")
    assert code == 0 and "\n4 of 4 were not learned: their recall is of a place where the sentence is not.\n" in out
    code, _, err = run(capsys, *words, str(tmp_path / "run"), "--sentences", "3")
    assert code == 2 and "sentences was a list of 4 and is now one of 6" in err and len(err) < 500


def test_compare_and_report(monkeypatch, capsys, tmp_path):
    shrink_study(monkeypatch.setattr)
    words = "compare --seeds 0 1 --draws 2 --steps 4 --forget 4 --methods attribution-patching --budget 0.1".split()
    code, out, err = run(capsys, *words, "--out", str(tmp_path / "run"))
    assert code == 0 and "Report: " in out and (tmp_path / "run" / "report.html").stat().st_size > 1000
    (tmp_path / "run" / "report.html").unlink()
    code, out, _ = run(capsys, "report", str(tmp_path / "run"))
    assert code == 0 and (tmp_path / "run" / "report.html").is_file()
    code, _, err = run(capsys, *words, "--out", str(tmp_path / "run"), "--budget", "0.2")
    assert code == 2 and "budget" in err and "--out" in err
