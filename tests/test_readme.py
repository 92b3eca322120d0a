"""What the README shows must run as it stands."""

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


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_run(path):
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) <= 25
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            assert "def " not in source and "class " not in source, "notebooks tell a story, without definitions"
            exec(compile(source, path.name, "exec"), names)


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
