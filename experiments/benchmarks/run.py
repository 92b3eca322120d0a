"""All benchmarks of this folder, one after the other, and one table of what they measured.

    python experiments/benchmarks/run.py [--model smollm2] [--repeats 3] [--only updates.py …]

Each script takes --model and --repeats, times locus and a peer in turn in one run, so that a ratio holds on a busy
machine too, and prints lines of one form: what, "locus", seconds, the peer, seconds, "ratio", its median, (its smallest
"to" its largest), and whatever else is known. Above the table stand the date, the machine, and the rate that a product
of large float32 matrices reaches here.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import transformers
from sweeps import rate

SCRIPTS = ("sweeps.py", "knockouts.py", "attribution.py", "updates.py", "nnsight_loop.py", "memory.py")
LINE = re.compile(
    r"(?P<what>.+?)\s+locus\s+(?P<ours>[\d.]+) s\s+(?P<peer>.+?)\s+(?P<theirs>[\d.]+) s\s+ratio\s+(?P<ratio>[\d.]+)"
    r"\s+\((?P<range>[^)]*)\)\s*(?P<rest>.*)"
)


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
    options = parser.parse_args()
    printed = []
    for script in options.only:
        printed += lines(script, ["--model", options.model, "--repeats", str(options.repeats)])
    print(f"\n{date.today()}: {options.model}; {machine()}; a matrix product reaches {rate() / 1e9:.0f} GFLOP/s\n")
    print(table(printed))


if __name__ == "__main__":
    main()
