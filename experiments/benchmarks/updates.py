"""What a masked update costs, against dense masking: time of a step and peak memory.

    python experiments/benchmarks/updates.py [--model smollm2] [--repeats 3] [--steps 3]

Dense masking is the loop of published code: the Hugging Face model, a forward pass over the forget prompts and one
over the retain prompts with logits at every token, gradients of all parameters, each multiplied by its mask, a
clipping norm, and AdamW over all parameters. (That leaks; here the weight decay is 0.) Both lower the same loss on the
same 32 forget and 32 retain prompts of 10 tokens, 2 of them the answer.

Times are of single steps, taken in turn in one process: one run of each, again and again; the first step of each
run warms up and does not count. Memory is the peak resident set of a process that does nothing else, weights and
libraries included, beside that of a process that only loads the model.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import locus
from locus import worlds
from locus.facts import Fact, Facts, FactSplit, encode

VARIANTS: dict[str, dict[str, Any]] = {"": {}, ", recomputed": {"recompute": True}}
WHERE = ("anywhere", "last third", "single weights")


class Row(NamedTuple):
    """One comparison: seconds a step of each repeat, and peak memory in MB."""

    where: str
    variant: str
    ours: list[float]
    theirs: list[float]
    memory: float
    their_memory: float
    loaded: float

    @property
    def ratios(self) -> list[float]:
        return [b / a for a, b in zip(self.ours, self.theirs, strict=True)]

    def __str__(self) -> str:
        ours, theirs, ratios = median(self.ours), median(self.theirs), self.ratios
        name = f"update, 5% {self.where}{self.variant}"
        return (
            f"{name:38} locus {ours:6.2f} s   dense masking {theirs:6.2f} s   ratio "
            f"{median(ratios):4.1f} ({min(ratios):.1f} to {max(ratios):.1f})   peak {self.memory:.0f} of "
            f"{self.their_memory:.0f} MB: {self.memory / self.their_memory:.2f}, loading alone {self.loaded:.0f}"
        )


def prompts(tokenizer: Any, n: int = 32, tokens: int = 10) -> FactSplit:
    """n forget and n retain prompts of random words of one token each; the last two are the answer."""
    whole = sorted(t for t in tokenizer.get_vocab() if t.isalpha() and t.isascii() and t.islower())
    words = [word for word in whole if len(tokenizer(f"a {word}")["input_ids"]) == len(tokenizer("a")["input_ids"]) + 1]
    draw = random.Random(0)
    made = []
    for _ in range(2 * n):
        text = draw.sample(words, tokens - 2)
        made.append(Fact(text[0], "r", " ".join(["a", *text[1:]]), " ".join(draw.sample(words, 2))))
    empty = Facts([])
    return FactSplit(Facts(made[:n]), Facts(made[n:]), empty, empty, 0)


def mask_of(model: Any, where: str) -> Any:
    """5% of the neurons, in any layer or all in the last third; or 5% of the single weights of all MLPs."""
    neurons = model.components("neuron")
    if where == "single weights":
        generator = torch.Generator().manual_seed(0)
        whole = locus.Mask.full(neurons).materialize(model)
        return locus.Mask.from_tensors(
            {name: torch.rand(mask.shape, generator=generator) < 0.05 for name, mask in whole.items()}, model
        )
    if where == "last third":
        below = locus.Mask(neurons, neurons.layers < 2 * model.cfg.n_layers // 3)
        return locus.Mask.random(neurons, budget=0.05, disjoint_from=below, seed=0)
    return locus.Mask.random(neurons, budget=0.05, seed=0)


@dataclass(frozen=True)
class Timed(locus.AdamW):
    """AdamW that notes when each step ended."""

    ends: list[float] = field(default_factory=list, compare=False)

    def build(self, values: Any) -> torch.optim.Optimizer:
        made = super().build(values)
        made.register_step_post_hook(lambda *_: self.ends.append(time.perf_counter()))
        return made


def compact(model: Any, split: FactSplit, mask: Any, steps: int, **options: Any) -> list[float]:
    """Seconds of each step but the first."""
    optimizer = Timed()
    locus.unlearn(
        model, split, mask, locus.GradientDifference(), optimizer=optimizer, steps=steps + 1, clip=1.0, **options
    )
    return [b - a for a, b in zip(optimizer.ends, optimizer.ends[1:], strict=False)]


def dense(model: Any, split: FactSplit, masks: dict[str, torch.Tensor], steps: int, encoded: Any) -> list[float]:
    """Seconds of each step but the first, of the loop of published code on a Hugging Face model."""
    n, stepper, ends = len(split.forget), torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), []
    labels = encoded.tokens.masked_fill(~encoded.answer_mask, -100)

    def loss(rows: slice) -> torch.Tensor:
        logits = model(encoded.tokens[rows], attention_mask=encoded.attention_mask[rows], use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[rows, 1:].flatten())

    for _ in range(steps + 1):
        stepper.zero_grad()
        (loss(slice(n, None)) - loss(slice(n))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, p in model.named_parameters():
            p.grad *= masks[name]
        stepper.step()
        ends.append(time.perf_counter())
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def plain(name: str) -> Any:
    """The same weights as a Hugging Face model, without TransformerLens around it."""
    built_in = {"tiny": worlds.tiny, "smollm2": worlds.smollm2}
    source = built_in[name]() if name in built_in else name
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def whole(model: Any, mask: Any) -> dict[str, torch.Tensor]:
    """A mask of every parameter, as dense masking keeps it."""
    mask = mask.materialize(model) if isinstance(mask, locus.Mask) else mask
    return {name: mask.get(name, torch.zeros(p.shape, dtype=torch.bool)) for name, p in model.weights.items()}


def alone(side: str, name: str, where: str, mask_file: str) -> None:
    """What a process that measures its own memory does: a few steps of one side; prints its peak in MB."""
    if side == "dense":
        model = plain(name)
        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
        split = prompts(tokenizer)
        facts = [*split.forget, *split.retain]
        encoded = encode(SimpleNamespace(tokenizer=tokenizer, device=model.device), facts)
        dense(model, split, load_file(mask_file), 2, encoded)
    else:
        model = locus.load(name, quiet=True)
        if side in VARIANTS:
            compact(model, prompts(model.tokenizer), mask_of(model, where), 2, **VARIANTS[side])
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def peak(*arguments: str) -> float:
    """Peak resident set in MB of this script in a process of its own."""
    command = [sys.executable, __file__, "--alone", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure(name: str, repeats: int, steps: int, places: Sequence[str] = WHERE) -> Iterator[Row]:
    """One row a place of the mask and a variant of locus."""
    model, hf_model = locus.load(name, quiet=True), plain(name)
    split = prompts(model.tokenizer)
    encoded = encode(model, [*split.forget, *split.retain])
    with tempfile.TemporaryDirectory() as folder:
        for where in places:
            mask = mask_of(model, where)
            masks, file = whole(model, mask), str(Path(folder) / "mask.safetensors")
            save_file(masks, file)
            seconds: dict[str, list[float]] = {side: [] for side in (*VARIANTS, "dense")}
            for _ in range(repeats):
                for side, settings in VARIANTS.items():
                    seconds[side].append(median(compact(model, split, mask, steps, **settings)))
                seconds["dense"].append(median(dense(hf_model, split, masks, steps, encoded)))
            memory = {side: peak(side, name, where, file) for side in (*VARIANTS, "dense", "nothing")}
            for side in VARIANTS:
                yield Row(
                    where, side, seconds[side], seconds["dense"], memory[side], memory["dense"], memory["nothing"]
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--places", nargs="+", default=WHERE, choices=WHERE)
    parser.add_argument(
        "--alone", nargs=4, metavar=("SIDE", "MODEL", "PLACE", "MASK"), help="measure the memory of one side"
    )
    options = parser.parse_args()
    if options.alone:
        return alone(*options.alone)
    print(f"{options.model}, 64 prompts of 10 tokens, {torch.get_num_threads()} threads, {options.repeats} repeats")
    for row in measure(options.model, options.repeats, options.steps, options.places):
        print(row, flush=True)


if __name__ == "__main__":
    main()
