"""Attribution patching of heads and MLPs against TransformerLens': time, in turn in one run, and peak memory.

    python experiments/benchmarks/attribution.py [--model smollm2] [--tokens 6 16 64] [--pairs 1 8] [--repeats 3]

Same nodes, same prompts, same difference of logits at the last token. TransformerLens scores each position apart, so
its scores are summed over positions. Further rows have the neurons too, which TransformerLens lacks: there locus does
more than its peer; "layer by layer" keeps the graph of one layer at a time; "one pair at a time" runs several pairs as
TransformerLens does. Memory is how far the resident set of a process that does nothing else grows beyond that of the
loaded model; it is given with the model too.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from knockouts import pairs_of
from sweeps import timed
from torch import Tensor
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

import locus
from locus.components import Components
from locus.facts import ContrastPairs
from locus.metrics import logit_difference

BOTH, ALL = ("head", "mlp"), ("head", "mlp", "neuron")
METHODS = {
    "heads + MLPs": (BOTH, locus.AttributionPatching()),
    "heads + MLPs + neurons": (ALL, locus.AttributionPatching()),
    "heads + MLPs + neurons, layer by layer": (ALL, locus.AttributionPatching(recompute=True)),
}
SINGLY = {"heads + MLPs, one pair at a time": (BOTH, locus.AttributionPatching(batch_size=1))}  # of several pairs


def drawn(model: Any, pairs: int, tokens: int) -> ContrastPairs:
    generator = torch.Generator().manual_seed(0)
    return pairs_of(*torch.randint(model.cfg.d_vocab, (2, pairs, tokens), generator=generator))


def components(model: Any, kinds: tuple[str, ...]) -> Components:
    first, *others = (model.components(kind) for kind in kinds)
    return sum(others, start=first)


def ours(model: Any, prompts: ContrastPairs, chosen: Components, method: locus.AttributionPatching) -> Tensor:
    """Scores [component], mean over the pairs."""
    return method.score(model, prompts, chosen, logit_difference, False).mean(0)


def theirs(model: Any, prompts: ContrastPairs) -> Any:
    with torch.enable_grad():
        return attribution_patch(
            model.bridge, prompts.clean, prompts.corrupted, lambda logits: logits[0, -1, 5] - logits[0, -1, 6]
        )


def summed(found: Any, chosen: Components) -> Tensor:
    """TransformerLens' scores as ours: of each head and MLP, over its positions."""
    sums: dict[tuple[int | None, int | None], float] = {}
    for node, score in found.node_scores.items():
        sums[node.layer, node.head] = sums.get((node.layer, node.head), 0.0) + score
    return torch.tensor([sums[c.layer, c.index] for c in chosen if c.kind in ("head", "mlp")])


class Peak(NamedTuple):
    """Resident set in MB."""

    loaded: float
    grown: float

    @property
    def whole(self) -> float:
        return self.loaded + self.grown


def peak(side: str, model: str, pairs: int, tokens: int) -> Peak:
    """Of this script in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--alone", side, str(pairs), str(tokens)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return Peak(float(printed[-2]), float(printed[-1]))


def alone(side: str, name: str, pairs: int, tokens: int) -> None:
    """What a process that measures its own memory does; prints that of the loaded model and what it grew, in MB."""
    model = locus.load(name, quiet=True)
    kinds, method = (METHODS | SINGLY).get(side, METHODS["heads + MLPs"])
    prompts, chosen = drawn(model, pairs, tokens), components(model, kinds)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what loading took and gave back is used again, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: that of loading is higher
    loaded = resident("VmRSS")
    theirs(model, prompts) if side == "theirs" else ours(model, prompts, chosen, method)
    print(loaded, resident("VmHWM") - loaded)


def resident(what: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) / 1024


def compare(model: Any, options: argparse.Namespace, pairs: int, tokens: int) -> list[str]:
    prompts, lines = drawn(model, pairs, tokens), []
    methods = METHODS | SINGLY if pairs > 1 else METHODS
    chosen = {side: components(model, kinds) for side, (kinds, _) in methods.items()}
    seconds: dict[str, list[float]] = {side: [] for side in (*methods, "theirs")}
    timed(
        ours, model, prompts, chosen["heads + MLPs"], locus.AttributionPatching()
    )  # the first pass of a process is slower
    for _ in range(options.repeats):
        for side, (_, method) in methods.items():
            took, scores = timed(ours, model, prompts, chosen[side], method)
            seconds[side].append(took)
        took, found = timed(theirs, model, prompts)
        seconds["theirs"].append(took)
    model.bridge.zero_grad(set_to_none=True)
    expected = summed(found, chosen["heads + MLPs"])
    gap = float((scores[: len(expected)] - expected).abs().max() / expected.abs().max())
    memory = {side: peak(side, options.model, pairs, tokens) for side in (*methods, "theirs")}
    for side in methods:
        ratios = [b / a for a, b in zip(seconds[side], seconds["theirs"], strict=True)]
        lines.append(
            f"attribution patching, {side}, {tokens} tokens, {pairs} pair{'s' * (pairs > 1)}   locus "
            f"{statistics.median(seconds[side]):6.2f} s   TransformerLens {statistics.median(seconds['theirs']):6.2f} s"
            f"   ratio {statistics.median(ratios):5.1f} ({min(ratios):.1f} to {max(ratios):.1f})   memory beyond the "
            f"model {memory[side].grown:.0f} of {memory['theirs'].grown:.0f} MB: "
            f"{memory[side].grown / memory['theirs'].grown:.2f}, with it {memory[side].whole:.0f} of "
            f"{memory['theirs'].whole:.0f} MB: {memory[side].whole / memory['theirs'].whole:.2f}, largest relative "
            f"difference {gap:.1e}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="*", default=[6, 16, 64])
    parser.add_argument("--pairs", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", nargs=3, metavar=("SIDE", "PAIRS", "TOKENS"), help="measure one side's memory")
    options = parser.parse_args()
    if options.alone:
        side, pairs, tokens = options.alone
        return alone(side, options.model, int(pairs), int(tokens))
    model = locus.load(options.model, quiet=True)
    for pairs in options.pairs:
        for tokens in options.tokens:
            print("\n".join(compare(model, options, pairs, tokens)), flush=True)


if __name__ == "__main__":
    main()
