"""How much faster exact sweeps are than `transformer_lens.patching`, both timed in turn in one run.

    python experiments/benchmarks/sweeps.py [--model smollm2] [--repeats 3]

Prints one line a sweep: seconds of each, their ratio (median of the repeats, with the smallest and the largest), and
the largest difference of the results.
"""

import argparse
import contextlib
import io
import statistics
import time

import torch
import transformer_lens.patching as theirs

import locus
from locus import patching


def timed(function, *arguments, **options):
    start = time.perf_counter()
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        result = function(*arguments, **options)
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = locus.load(options.model)
    words = model.tokenizer
    clean = torch.tensor([words(" The capital of France is")["input_ids"]])
    corrupted = torch.tensor([words(" The capital of Japan is")["input_ids"]])
    answer, distractor = (words(word)["input_ids"][0] for word in (" Paris", " Tokyo"))
    clean, corrupted = (torch.cat([t[:, :1], t], dim=1)[:, -6:] for t in (clean, corrupted))

    def metric(logits):
        return logits[0, -1, answer] - logits[0, -1, distractor]

    with torch.no_grad():
        _, cache = model.bridge.run_with_cache(clean)
    print(f"{model.name}, {clean.shape[1]} tokens, {torch.get_num_threads()} threads, median of {options.repeats}")
    for name in ("resid_pre", "attn_head_out_all_pos"):
        sweep = f"get_act_patch_{name}"
        getattr(patching, sweep)(model, corrupted, cache, metric, progress=False)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.repeats):
            ours, result = timed(getattr(patching, sweep), model, corrupted, cache, metric, progress=False)
            slow, expected = timed(getattr(theirs, sweep), model.bridge, corrupted, cache, metric)
            seconds[0].append(ours)
            seconds[1].append(slow)
        ratios = [b / a for a, b in zip(*seconds, strict=True)]
        print(
            f"{name:22} locus {statistics.median(seconds[0]):6.2f} s   TransformerLens "
            f"{statistics.median(seconds[1]):6.2f} s   ratio {statistics.median(ratios):5.1f} "
            f"({min(ratios):.1f} to {max(ratios):.1f})   largest difference {(result - expected).abs().max():.1e}"
        )


if __name__ == "__main__":
    main()
