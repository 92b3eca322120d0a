"""How much faster exact knockouts of single neurons are than a loop of hooked forward passes, timed in turn in one run.

    python experiments/benchmarks/knockouts.py [--model smollm2] [--tokens 6] [--pairs 1] [--repeats 3]

Every neuron is set to zero, at all tokens or at the prompt's last, and one difference of logits is read. The loop is
what a user writes: the Hugging Face model, a hook before the neurons' output matrix, one forward pass a neuron. Both
run a sample, and the time of all neurons is extrapolated from it: locus runs `--neurons` of each of `--layers` layers
spread over the depth, for its cost depends on the layer; the loop runs `--loop` neurons.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from sweeps import timed
from torch import Tensor
from updates import plain

import locus
from locus.components import Component, Components
from locus.facts import ContrastPairs, Fact
from locus.metrics import logit_difference

OUTPUTS = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h")  # in Hugging Face's models
PLACES = {"all": "every position", "last": "one position"}


def pairs_of(tokens: Tensor, corrupted: Tensor) -> ContrastPairs:
    """Pairs that are read at the last token: of which token 5 is more likely than token 6."""
    n, length = tokens.shape
    return ContrastPairs(
        clean=tokens,
        corrupted=corrupted,
        attention_mask=torch.ones(n, length, dtype=torch.bool),
        read=torch.full((n, 1), length - 1),
        answer=torch.full((n, 1), 5),
        distractor=torch.full((n, 1), 6),
        read_mask=torch.ones(n, 1, dtype=torch.bool),
        subject=(torch.arange(length) == length // 2).expand(n, -1),
        facts=(Fact("a", "r", "a b", "c"),) * n,
    )


def sample(components: Components, layers: int, each: int) -> Components:
    """The first neurons of some layers, as far apart as can be, whose mean is the middle of the model."""
    depth = int(components.layers.max()) + 1
    chosen = [int((2 * i + 1) * depth / (2 * layers)) for i in range(layers)]
    kept = [i for i, c in enumerate(components) if c.layer in chosen and (c.index or 0) < each]
    return components.take(torch.tensor(kept))


def loop(hf_model: Any, tokens: Tensor, neurons: Sequence[Component], place: str) -> Tensor:
    """The difference of logits with each neuron at zero: [pair, neuron]."""
    outputs = [module for name, module in hf_model.named_modules() if name.endswith(OUTPUTS)]
    values = []
    for neuron in neurons:

        def off(module: Any, args: tuple[Tensor], index: int | None = neuron.index) -> tuple[Tensor]:
            activation = args[0].clone()
            activation[:, slice(None) if place == "all" else -1, index] = 0
            return (activation,)

        handle = outputs[neuron.layer].register_forward_pre_hook(off)
        logits = hf_model(tokens, use_cache=False).logits[:, -1]
        handle.remove()
        values.append(logits[:, 5] - logits[:, 6])
    return torch.stack(values, dim=1)


def compare(model: Any, hf_model: Any, options: argparse.Namespace, place: str, pairs: int) -> str:
    generator = torch.Generator().manual_seed(0)
    prompts = pairs_of(*torch.randint(model.cfg.d_vocab, (2, pairs, options.tokens), generator=generator))
    every = model.components("neuron")
    ours = sample(every, options.layers, options.neurons)
    looped = [int(i) for i in torch.linspace(0, len(ours) - 1, min(options.loop, len(ours)))]
    with torch.no_grad():
        logits = hf_model(prompts.clean, use_cache=False).logits[:, -1]
    intact = (logits[:, 5] - logits[:, 6])[:, None]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.repeats):
        arguments = (model, prompts, ours, logit_difference, False)
        took, found = timed(locus.Knockout(positions=place).score, *arguments)
        seconds[0].append(took * len(every) / len(ours))
        took, expected = timed(loop, hf_model, prompts.clean, [ours[i] for i in looped], place)
        seconds[1].append(took * len(every) / len(looped))
    ratios = [b / a for a, b in zip(*seconds, strict=True)]
    our, their = map(statistics.median, seconds)
    return (
        f"knockout of {len(every):,} neurons at {PLACES[place]}, {options.tokens} tokens, {pairs} "
        f"pair{'s' * (pairs > 1)}   locus {our:6.1f} s   loop of hooked forwards {their:7.1f} s   ratio "
        f"{statistics.median(ratios):5.1f} ({min(ratios):.1f} to {max(ratios):.1f})   from {len(ours)} neurons and "
        f"{len(looped)} of the loop, largest difference {float((found[:, looped] - intact + expected).abs().max()):.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--pairs", type=int, nargs="*", default=[1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--neurons", type=int, default=600, help="neurons of each of these layers, at most")
    parser.add_argument("--loop", type=int, default=30, help="neurons that the loop runs, at most")
    options = parser.parse_args()
    model, hf_model = locus.load(options.model, quiet=True), plain(options.model)
    for pairs in options.pairs:
        for place in PLACES:
            print(compare(model, hf_model, options, place, pairs), flush=True)


if __name__ == "__main__":
    main()
