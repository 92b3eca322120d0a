"""The most memory that EAP-IG of all edges takes: every sender's output and every input's gradient, for many prompts.

    python experiments/benchmarks/memory.py [--model smollm2] [--pairs 32] [--tokens 12] [--steps 5]

A process of its own, since what a process has held at the most never falls.
"""

import argparse
import resource
import time

from knockouts import pairs_of
from sweeps import prompts

import locus


def peak() -> float:
    """Gigabytes that this process has held at the most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, help="taken for the sake of run.py; the peak is that of one run")
    options = parser.parse_args()
    model, n = locus.load(options.model, quiet=True), options.pairs
    clean, corrupted = prompts("apart", n, options.tokens, model.cfg.d_vocab)
    pairs = pairs_of(clean, corrupted)
    loaded, start = peak(), time.perf_counter()
    scores = locus.localize_edges(model, pairs, locus.EAP(steps=options.steps), progress=False)
    print(
        f"EAP-IG, {options.steps} steps, {n} pairs of {options.tokens} tokens, all {len(scores.edges):,} edges: "
        f"{peak():.1f} GB at the peak, {loaded:.1f} GB with the model loaded, {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
