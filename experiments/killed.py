"""Does a study that is killed again and again end with the same table?

    python experiments/killed.py --kills 10

Runs a small `locus study` once undisturbed, and once in a folder and cache of its own where it is killed (SIGKILL, with
its workers) at random moments and started again with the same command; then compares the tables bit for bit.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from locus.worlds import tiny

WORDS = "study --objectives npo --seeds 0 1 --draws 1 --arms oracle random revert".split()


def start(folder: Path) -> subprocess.Popen:
    """The command, in a process group of its own, with its own cache (that already holds the tiny model)."""
    code = "import sys; from locus.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *WORDS, "--out", str(folder / "run")]
    environment = os.environ | {"LOCUS_CACHE": str(folder / "cache")}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=quiet, stderr=quiet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    model = tiny()
    with tempfile.TemporaryDirectory() as scratch:
        whole, killed = Path(scratch) / "whole", Path(scratch) / "killed"
        for folder in (whole, killed):
            shutil.copytree(model, folder / "cache" / model.name)
        began = time.monotonic()
        assert start(whole).wait() == 0
        seconds = time.monotonic() - began
        draw, kills = random.Random(0), 0
        while kills < options.kills:
            process = start(killed)
            try:
                # From just after the imports to about a fifth of the whole, so that ten kills spread over it.
                process.wait(timeout=draw.uniform(6, 6 + seconds / 5))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                print(f"killed {kills}: {len(list((killed / 'run').glob('runs/*.json')))} results so far", flush=True)
            else:
                assert process.returncode == 0
                break
        assert start(killed).wait() == 0
        tables = [pd.read_parquet(folder / "run" / "table.parquet") for folder in (whole, killed)]
        print(f"undisturbed: {seconds:.0f} s; killed {kills} times; equal tables: {tables[0].equals(tables[1])}")


if __name__ == "__main__":
    main()
