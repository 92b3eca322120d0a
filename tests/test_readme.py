"""What the README shows must run as it stands."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    examples = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "# fragment" not in code]
    assert examples
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})
    assert "Update(" in capsys.readouterr().out


def test_the_file_tree_is_true():
    listed = set(re.findall(r"^      (\w+(?:\.py|/))", README, re.M))
    there = {p.name + ("/" if p.is_dir() else "") for p in (ROOT / "locus").iterdir() if p.name != "__pycache__"}
    assert listed == {name for name in there if name.endswith((".py", "/"))}


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text()
    for command in ("pip install torch==2.13.0 -e .", 'pip install torch==2.13.0 -e ".[dev]"', "ruff check", "mypy"):
        assert command in README
        assert command.replace("pip install", "pip install --quiet") in ci or command in ci


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stories_with_pictures_that_show_on_a_code_host(path):
    assert path.stat().st_size < 1e6
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) <= 25
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run notebooks/execute.py"
    for cell in code:
        source = "".join(cell["source"])
        assert "def " not in source and "class " not in source and "lambda" not in source
    shown = [output.get("data", {}) for cell in code for output in cell["outputs"]]
    assert sum("image/svg+xml" in data for data in shown) >= 2
    # A picture within HTML does not show there.
    assert not any("<img" in "".join(data.get("text/html", "")) for data in shown)


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "smollm2" not in p.name], ids=lambda p: p.stem)
def test_notebooks_run(path, monkeypatch):
    """Every cell, and every value that a cell shows."""
    monkeypatch.chdir(path.parent)
    names: dict = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, path.name, "exec"), names)
            value = eval(compile(ast.Expression(last.value), path.name, "eval"), names) if last else None
            if hasattr(value, "_repr_mimebundle_"):
                assert "<svg" in str(value._repr_mimebundle_())


OFFLINE = """
import socket

def blocked(*_, **__):
    raise AssertionError("the network was asked for")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = blocked
import locus

model = locus.load("tiny", quiet=True)
split = locus.facts.biographies().known_by(model, quiet=True).split(forget=4, seed=0)
scores = locus.localize(model, split.forget.contrast_pairs(model), locus.AttributionPatching(), progress=False)
update = locus.unlearn(model, split, locus.Mask.top(scores, 0.05), locus.NPO(), steps=2)
with update.applied(model):
    print("kept", locus.evaluate(model, split).mean("retain", "probability"))
"""


def test_nothing_asks_for_the_network():
    """With sockets blocked, and nothing told to stay offline, the main job runs."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.5 and "network" not in done.stderr
