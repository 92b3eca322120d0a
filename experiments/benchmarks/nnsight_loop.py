"""A residual (layer × position) sweep in locus, against the loop that a user of nnsight writes.

    pip install --no-deps nnsight websocket-client zstandard      # nothing else is changed by it
    python experiments/benchmarks/nnsight_loop.py [--model smollm2] [--repeats 3] [--tokens 6]

The loop is one trace a cell on the plain Hugging Face model, which keeps the last logits only. Both in turn in one run.
"""

import argparse
import sys
import time
from statistics import median

import torch
from updates import plain

import locus
from locus import patching

try:
    from nnsight import NNsight
except ImportError:
    print("nnsight is not installed, so there is no loop of it to compare with (nnsight_loop.py says how)")
    sys.exit()


def loop(model: NNsight, corrupted: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
    """Last logits of each cell: [layer, pos, d_vocab]."""
    rows = []
    for layer, state in zip(model.model.layers, states, strict=True):
        for position in range(corrupted.shape[1]):
            with model.trace(input_ids=corrupted):
                layer.input[:, position] = state[:, position]
                logits = model.lm_head.output[0, -1].save()
            rows.append(logits)
    return torch.stack(rows).unflatten(0, (len(states), -1))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6)
    options = parser.parse_args()
    model, peer = locus.load(options.model, quiet=True), NNsight(plain(options.model))
    clean, corrupted = torch.randint(
        model.cfg.d_vocab, (2, 1, options.tokens), generator=torch.Generator().manual_seed(0)
    )
    _, cache = model.bridge.run_with_cache(clean)
    states = [cache["resid_pre", layer] for layer in range(model.cfg.n_layers)]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, 5] - logits[0, -1, 6]

    seconds: tuple[list[float], list[float]] = ([], [])
    patching.get_act_patch_resid_pre(model, corrupted, cache, metric, progress=False)
    for _ in range(options.repeats):
        start = time.perf_counter()
        ours = patching.get_act_patch_resid_pre(model, corrupted, cache, metric, progress=False)
        middle = time.perf_counter()
        logits = loop(peer, corrupted, states)
        seconds[0].append(middle - start)
        seconds[1].append(time.perf_counter() - middle)
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    gap = float((ours - (logits[..., 5] - logits[..., 6])).abs().max())
    print(
        f"residual sweep, {options.tokens} tokens   locus {median(seconds[0]):6.2f} s   nnsight loop "
        f"{median(seconds[1]):6.2f} s   ratio {median(ratios):5.1f} ({min(ratios):.1f} to {max(ratios):.1f})   "
        f"largest difference {gap:.1e}"
    )


if __name__ == "__main__":
    main()
