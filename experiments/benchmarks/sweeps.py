"""How much faster exact sweeps are than `transformer_lens.patching`, both timed in turn in one run.

    python experiments/benchmarks/sweeps.py [--model smollm2] [--tokens 6 16 64] [--pairs 1 8] [--repeats 3]

Two kinds of prompts: `apart` have no token in common, so every cell changes something; `subject` differ in one token in
the middle, as contrast pairs do, so that the cells before it need no run. TransformerLens runs a sample of the cells,
and its time is extrapolated where there are more. The floor is the number of floating-point operations that no exact
residual sweep can leave out, at the rate of a large matrix product. One thread is timed in its own seconds of
processor, which other work on the machine moves little; several in seconds of wall clock.
"""

import argparse
import contextlib
import io
import os
import resource
import statistics
import time

import torch
import transformer_lens.patching as theirs

import locus
from locus import patching

CASES = (("resid_pre", (6, 16, 64)), ("attn_head_out_all_pos", (6,)), ("attn_head_out_by_pos", (16,)))


def timed(function, *arguments, **options):
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        result = function(*arguments, **options)
    return clock() - start, result


def prompts(kind, pairs, tokens, vocabulary):
    """Clean and corrupted tokens [pair, pos]."""
    clean, corrupted = torch.randint(
        vocabulary // 10, vocabulary - 1, (2, pairs, tokens), generator=torch.Generator().manual_seed(0)
    )
    corrupted = corrupted + (corrupted == clean)
    if kind == "subject":
        subject = torch.arange(tokens) == tokens // 2
        corrupted = torch.where(subject, corrupted, clean)
    return clean, corrupted


def floor(model, cells, clean, corrupted):
    """Floating-point operations of a residual sweep over cells (layer, position), the two runs left out."""
    layers, tokens = model.cfg.n_layers, clean.shape[1]
    block = 2 * sum(p.numel() for p in model.bridge.blocks[0].parameters() if p.ndim == 2)
    changed = (clean != corrupted).any(0)
    first = int(changed.nonzero()[0])
    run = [(k, p) for k, p in cells if (bool(changed[p]) if k == 0 else p >= first)]
    unembedding = 2 * model.cfg.d_model * model.cfg.d_vocab
    return len(clean) * sum(block * (layers - k) * (tokens - p) + unembedding for k, p in run)


def rate(size=2048):
    """Floating-point operations a second of a matrix product."""
    a = torch.randn(size, size)
    return 2 * size**3 / min(timed(torch.mm, a, a)[0] for _ in range(5))


def compare(model, sweep, kind, pairs, tokens, repeats, sample):
    clean, corrupted = prompts(kind, pairs, tokens, model.cfg.d_vocab)
    with torch.no_grad():
        _, cache = model.bridge.run_with_cache(clean)

    def metric(logits):
        return (logits[:, -1, 5] - logits[:, -1, 6]).mean()

    ours, other = (getattr(module, f"get_act_patch_{sweep}") for module in (patching, theirs))
    result, frame = ours(model, corrupted, cache, metric, return_index_df=True, progress=False)
    some = frame.sample(min(sample, len(frame)), random_state=0)
    keywords = {**other.keywords, "index_axis_names": None}
    seconds = ([], [])
    for _ in range(repeats):
        seconds[0].append(timed(ours, model, corrupted, cache, metric, progress=False)[0])
        took, expected = timed(other.func, model.bridge, corrupted, cache, metric, **keywords, index_df=some)
        seconds[1].append(took * len(frame) / len(some))
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    our, their = map(statistics.median, seconds)
    line = (
        f"{sweep}, {tokens} tokens, {pairs} pair{'s' * (pairs > 1)}, {kind}   locus {our:6.2f} s   "
        f"TransformerLens {their:7.2f} s   ratio {statistics.median(ratios):5.1f} ({min(ratios):.1f} to "
        f"{max(ratios):.1f})   {len(some)} of {len(frame)} cells of TransformerLens, largest difference "
        f"{float((result.flatten()[some.index.to_list()] - expected).abs().max()):.1e}"
    )
    if sweep == "resid_pre":
        line += f", {our * rate() / floor(model, frame.to_numpy().tolist(), clean, corrupted):.1f} times the floor"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="*", help="prompt lengths; default those of each sweep")
    parser.add_argument("--pairs", type=int, nargs="*", help="default one, and eight for residual sweeps of 6 tokens")
    parser.add_argument("--sweeps", nargs="*", default=[name for name, _ in CASES])
    parser.add_argument("--prompts", nargs="*", default=["apart", "subject"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sample", type=int, default=60, help="cells that TransformerLens runs, at most")
    options = parser.parse_args()
    model = locus.load(options.model)
    for sweep, lengths in CASES:
        for tokens in options.tokens or lengths:
            for pairs in options.pairs or ((1, 8) if (sweep, tokens) == ("resid_pre", 6) else (1,)):
                for kind in options.prompts:
                    if sweep in options.sweeps:
                        print(compare(model, sweep, kind, pairs, tokens, options.repeats, options.sample), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{model.name}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, {peak:.1f} GB at the peak")


if __name__ == "__main__":
    main()
