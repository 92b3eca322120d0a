"""The command line: exit codes, one clear line for a mistake, and the commands really run."""

import resource
import subprocess
import sys
from typing import get_args

import pandas as pd
import pytest
from small import facts, model

import locus
from locus import cli
from locus.localize import METHODS, name_of


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def small(monkeypatch):
    """The commands on the small model instead of a built-in one."""
    monkeypatch.setattr(cli, "_load", lambda name: model())
    monkeypatch.setattr(cli, "_facts", lambda name, of: (facts(), None))


def test_help_is_quick_and_shows_an_example_of_each():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", "import locus.cli; locus.cli.main(['--help'])"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    # Processor time: the clock on the wall measures who else is at work.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10
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


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def stop(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", stop)
    code, _, err = run(capsys, "compare", "--seeds", "0")
    assert code == 130 and "the same command goes on: locus compare --seeds 0" in err
    code, _, err = run(capsys, "sites", "tiny")
    assert code == 130 and "goes on" not in err


def test_sites(small, capsys):
    code, out, _ = run(capsys, "sites", "tiny")
    assert code == 0 and "hook     blocks.0.mlp.hook_post" in out and "model.layers.0.mlp.down_proj.weight" in out
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
    ):
        code, out, err = run(capsys, *words)
        assert code == 2 and out == "" and said in err and err.count("\n") == 1, words


def test_a_diverged_update_is_not_saved(small, capsys, tmp_path):
    edit = tmp_path / "edit"
    code, _, err = run(capsys, *"unlearn tiny --forget 4 --steps 5 --lr 1e20 --budget 0.2 --out".split(), str(edit))
    assert code == 2 and "diverged" in err and "smaller --lr" in err and not edit.exists()


def test_compare_and_report(small, capsys, tmp_path):
    words = "compare --seeds 0 1 --draws 2 --steps 4 --forget 4 --methods attribution-patching --budget 0.1".split()
    code, out, err = run(capsys, *words, "--out", str(tmp_path / "run"))
    assert code == 0 and "Report: " in out and (tmp_path / "run" / "report.html").stat().st_size > 1000
    (tmp_path / "run" / "report.html").unlink()
    code, out, _ = run(capsys, "report", str(tmp_path / "run"))
    assert code == 0 and (tmp_path / "run" / "report.html").is_file()
    code, _, err = run(capsys, *words, "--out", str(tmp_path / "run"), "--budget", "0.2")
    assert code == 2 and "budget" in err and "--out" in err
