"""All benchmarks of this folder, one after the other, and one table of what they measured.

    python experiments/benchmarks/run.py [--model smollm2] [--repeats 3] [--only updates.py …]

Each script takes --model and --repeats, times locus and a peer in turn in one run, so that a ratio holds on a busy
machine too, and prints lines of one form: what, "locus", seconds, the peer, seconds, "ratio", its median, (its smallest
"to" its largest), and whatever else is known. Above the table stand the
date, the machine, and the rate that a product of large float32 matrices reaches here; below it how far residual sweeps
are from the least number of operations at that rate:

    F = c · n_layers (n_layers + 1) / 2 · T (T + 1) / 2 + n_layers · T · u

c: operations a token and block, twice its parameters in matrices; u: those of unembedding one token; T: tokens, of
which none is shared. A cell (layer l, position p) cannot do with fewer than the blocks from l on at the positions from
p on, and one unembedding. Attention scores (2% of SmolLM2's c at 64 tokens) and the two plain runs are left out.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import locus
from locus import patching

SCRIPTS = ("sweeps.py", "knockouts.py", "attribution.py", "updates.py", "nnsight_loop.py")
LINE = re.compile(
    r"(?P<what>.+?)\s+locus\s+(?P<ours>[\d.]+) s\s+(?P<peer>.+?)\s+(?P<theirs>[\d.]+) s\s+ratio\s+(?P<ratio>[\d.]+)"
    r"\s+\((?P<range>[^)]*)\)\s*(?P<rest>.*)"
)


def matrix_rate(size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations a second of a product of two square float32 matrices; the best of some."""
    a, b = torch.rand(2, size, size)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def least_operations(model: Any, tokens: int) -> float:
    """F of the module's docstring."""
    inside = [p.numel() for n, p in model.weights.items() if p.ndim == 2 and re.search(r"\.\d+\.", n)]
    layers, block = model.cfg.n_layers, 2 * sum(inside) / model.cfg.n_layers
    unembedding = 2 * model.cfg.d_model * model.cfg.d_vocab
    return block * layers * (layers + 1) / 2 * tokens * (tokens + 1) / 2 + layers * tokens * unembedding


@torch.no_grad()
def residual_sweep(model: Any, tokens: int, repeats: int) -> float:
    """Median seconds of an exact residual (layer × position) sweep of one pair that shares no token."""
    clean, corrupted = torch.randint(model.cfg.d_vocab, (2, 1, tokens), generator=torch.Generator().manual_seed(0))
    _, cache = model.bridge.run_with_cache(clean)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        patching.get_act_patch_resid_pre(
            model, corrupted, cache, lambda logits: logits[0, -1, 5] - logits[0, -1, 6], progress=False
        )
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])  # the first one warms up


def machine() -> str:
    """Processor, cores, threads and versions, in one line."""
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return (
        f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def lines(script: str, arguments: list[str]) -> list[str]:
    """What a script printed; it is shown as it comes, and a script that fails says so and ends nothing else."""
    path = Path(__file__).parent / script
    if not path.exists():
        return [f"{script} is not there"]
    print(f"{script}:", file=sys.stderr, flush=True)
    printed = []
    with subprocess.Popen([sys.executable, str(path), *arguments], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print("  " + line, end="", file=sys.stderr, flush=True)
            printed.append(line.strip())
    return printed if process.returncode == 0 else [*printed, f"{script} ended with status {process.returncode}"]


def table(printed: list[str]) -> str:
    """The lines that compare as a Markdown table, the others below it."""
    rows = ["| work | against | locus | peer | ratio | |", "|---|---|---|---|---|---|"]
    notes = []
    for line in printed:
        found = LINE.fullmatch(line)
        if found is None:
            notes += [line] if line else []
            continue
        f = found.groupdict()
        ratio = f"{f['ratio']} × ({f['range']})"
        rows.append(f"| {f['what']} | {f['peer']} | {f['ours']} s | {f['theirs']} s | {ratio} | {f['rest']} |")
    return "\n".join([*rows, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=SCRIPTS, choices=SCRIPTS, metavar="SCRIPT")
    parser.add_argument("--tokens", nargs="+", type=int, default=(6, 16, 64), help="lengths of the floor's sweeps")
    options = parser.parse_args()
    printed = []
    for script in options.only:
        printed += lines(script, ["--model", options.model, "--repeats", str(options.repeats)])
    model = locus.load(options.model, quiet=True)
    print(f"\n{date.today()}: {model.name}; {machine()}")
    before = matrix_rate()
    floors = [(n, residual_sweep(model, n, options.repeats), least_operations(model, n)) for n in options.tokens]
    rate = max(before, matrix_rate())
    print(f"A matrix product reaches {rate / 1e9:.0f} GFLOP/s.\n\n{table(printed)}\n")
    print("| residual sweep | locus | floor | locus / floor |\n|---|---|---|---|")
    for n, seconds, least in floors:
        floor = least / rate
        print(f"| {n} tokens | {seconds:.2f} s | {floor:.2f} s ({least / 1e9:.0f} GFLOP) | {seconds / floor:.1f} |")


if __name__ == "__main__":
    main()
