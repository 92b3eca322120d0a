"""Many interventions to a forward pass: the engine of `locus.patching` and of the exact localizers.

Rows join the batch at the layer at which they are changed (`hooks.Trace.grow`); of each row, only the positions from
its first change on are computed; cells that change nothing at all (the prompts are the same up to there) are not run.

A pass takes `max_tokens` tokens at the most. That is a setting, not a function of free memory, so that results do not
depend on the machine (the composition of a batch moves float32 logits by about 1e-5).
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locus import hooks
from locus.progress import tqdm
from locus.reads import gather, unembed

MAX_TOKENS = 4096
LONG = 10.0  # seconds; of a sweep that takes longer, time and memory are said beforehand

Starter = Callable[[list[int]], hooks.Start]


def sweep(
    recorded: hooks.Trace,
    layers: Sequence[int],
    start: Starter,
    read: Int[Tensor, "batch read"],
    *,
    max_tokens: int = MAX_TOKENS,
    progress: str | None = None,
    done: Collection[int] = (),
) -> Iterator[tuple[list[int], Float[Tensor, "cell batch read d_vocab"]]]:
    """Run many cells (interventions), each on the whole recorded batch, as few passes as `max_tokens` allows.

    Args:
        recorded: the run that is intervened on.
        layers: the layer of each cell.
        start: cells of one layer → the rows they begin with, cell by cell, each with the batch's rows in order. May
            be called more than once for a cell.
        read: positions to unembed, for each row of the batch.
        max_tokens: tokens (rows × positions) in one pass at the most.
        progress: label of the progress bar; None for none.
        done: cells whose results are there already. A pass is left out when all of its cells are, so that what is
            run is run in the same company as in an uninterrupted sweep.

    Yields:
        The numbers of some cells, and their logits.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
    batch, positions = recorded.inputs[0].shape[:2]
    done = frozenset(done)
    if not recorded.model.fast:
        say_once(f"{recorded.model.name} cannot be continued from an inner layer: one whole forward pass a cell")
        yield from _one_by_one(recorded, layers, start, read, progress, done)
        return
    with torch.no_grad():
        first = _first_changes(recorded, layers, start, max_tokens)
    # No position reads a later one, so what changes after all that is read changes nothing.
    first = first.masked_fill(first > read.to(first.device).amax(1), positions)
    tokens = (positions - first).sum(1)
    together = max(1, max_tokens // (8 * read.numel()))  # logits are large: those of a few cells at a time
    passes = [p for p in _passes(layers, first, positions, max_tokens) if not done.issuperset(p)]
    same = [cell for cell in (tokens == 0).nonzero().flatten().tolist() if cell not in done]
    work = tokens.cpu() * (len(recorded.calls) - torch.tensor(layers))
    if progress and len(passes) > 1:
        _announce(recorded, progress, sum(map(len, passes)), len(passes), int(work[sum(passes, [])].sum()), max_tokens)
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    bar = tqdm(
        total=int(work.sum()), desc=progress, disable=progress is None, file=sys.stderr, leave=False, bar_format=form
    )
    with bar, torch.no_grad():
        if same:
            base = unchanged(recorded, read)
            for some in _batches(same, together):
                yield some, base.expand(len(some), *base.shape)
        for cells in passes:
            residual = recorded.grown(_starts(cells, layers, start, first), read).unflatten(0, (len(cells), batch))
            for some, part in zip(_batches(cells, together), residual.split(together), strict=True):
                yield some, unembed(recorded.model, part)
            bar.update(int(work[cells].sum()))


def unchanged(recorded: hooks.Trace, read: Int[Tensor, "batch read"]) -> Float[Tensor, "batch read d_vocab"]:
    """The logits of the run that is intervened on."""
    with torch.no_grad():
        if recorded.model.fast:
            return unembed(recorded.model, gather(recorded.inputs[-1], read.to(recorded.inputs[0].device)))
        return _whole(recorded, read, [])


def _whole(
    recorded: hooks.Trace, read: Int[Tensor, "batch read"], edits: Iterable[tuple[str, hooks.Edit]]
) -> Float[Tensor, "batch read d_vocab"]:
    """A whole forward pass from the recorded embeddings on."""
    assert recorded.prompts is not None
    entry = ("blocks.0.hook_resid_pre", lambda _: recorded.inputs[0])
    with hooks.edits(recorded.model, [entry, *edits]), hooks.read_only(recorded.model, read):
        return recorded.model.logits(*recorded.prompts)


def _one_by_one(
    recorded: hooks.Trace,
    layers: Sequence[int],
    start: Starter,
    read: Int[Tensor, "batch read"],
    progress: str | None,
    done: Collection[int],
) -> Iterator[tuple[list[int], Float[Tensor, "cell batch read d_vocab"]]]:
    """The slow way of `sweep`, which every model takes."""
    left = [cell for cell in range(len(layers)) if cell not in done]
    for cell in tqdm(left, desc=progress, disable=progress is None, file=sys.stderr, leave=False):
        begun, layer = start([cell]), layers[cell]
        name = "ln_final.hook_in" if layer == len(recorded.calls) else f"blocks.{layer}.hook_resid_pre"
        enter = [(name, begun.enter)] if begun.enter else []
        with torch.no_grad():
            logits = _whole(recorded, read, [*enter, *begun.edits.items()])
        yield [cell], logits[None]


def ablated(
    activation: Float[Tensor, "batch pos *rest"], attention_mask: Bool[Tensor, "batch pos"], how: str, seed: int = 0
) -> Float[Tensor, "batch pos *rest"]:
    """What a knockout puts in the place of an activation.

    "zero"; "mean": the mean over the tokens of all prompts; "resample": the activation on another prompt of as many
    tokens (a permutation drawn by `seed`, in which none keeps its own).

    Raises:
        ValueError: `how` is none of these, or a prompt is the only one of its length ("resample").
    """
    if how == "zero":
        return torch.zeros_like(activation)
    if how == "mean":
        weight = attention_mask.to(activation).reshape(*attention_mask.shape, *[1] * (activation.ndim - 2))
        return ((activation * weight).sum((0, 1)) / weight.sum()).expand_as(activation)
    if how != "resample":
        raise ValueError(f"an ablation is 'zero', 'mean' or 'resample', got {how!r}")
    generator = torch.Generator().manual_seed(seed)
    other = torch.empty(len(activation), dtype=torch.long)
    # Among prompts of one length: at another's padding there is nothing to take.
    for shape in attention_mask.unique(dim=0):
        alike = (attention_mask == shape).all(1).nonzero().flatten().cpu()
        if len(alike) < 2:
            raise ValueError(
                "resample knockout takes activations from another fact of as many tokens, and fact "
                f"{int(alike[0])} of {len(activation)} is the only one of {int(shape.sum())}; leave it out, or use "
                "ablation='mean'"
            )
        # A random cycle: every fact gets another fact's activation, none its own.
        cycle = alike[torch.randperm(len(alike), generator=generator)]
        other[cycle] = cycle.roll(1)
    return activation[other.to(activation.device)]


@cache
def say_once(text: str) -> None:
    """Tell the user which way is taken where there are two, once a process."""
    print(text, file=sys.stderr)


def _starts(
    cells: list[int], layers: Sequence[int], start: Starter, first: Int[Tensor, "cell batch"]
) -> dict[int, hooks.Start]:
    groups = _by_layer(cells, layers).items()
    return {layer: replace(start(some), first=first[some].flatten()) for layer, some in groups}


def _first_changes(
    recorded: hooks.Trace, layers: Sequence[int], start: Starter, max_tokens: int
) -> Int[Tensor, "cell batch"]:
    """The first position that each cell changes in each row of the batch."""
    batch, positions = recorded.inputs[0].shape[:2]
    first = torch.zeros(len(layers), batch, dtype=torch.long, device=recorded.inputs[0].device)
    if recorded.keys is None:
        return first
    for layer, cells in _by_layer(range(len(layers)), layers).items():
        for some in _batches(cells, max(1, max_tokens // (batch * positions))):
            begun = start(some)
            known = recorded.first_changes(layer, begun) if begun.first is None else begun.first
            first[some] = known.unflatten(0, (-1, batch))
    return first


def _by_layer(cells: Iterable[int], layers: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for cell in cells:
        found.setdefault(layers[cell], []).append(cell)
    return found


def _batches(cells: list[int], n: int) -> list[list[int]]:
    return [cells[i : i + n] for i in range(0, len(cells), n)]


def _passes(
    layers: Sequence[int], first: Int[Tensor, "cell batch"], positions: int, max_tokens: int
) -> list[list[int]]:
    """Cells that change something, in passes of at most `max_tokens` tokens (but a cell at least).

    By first change, since attention lays out all rows of a pass from the earliest one on: a pass ends when it would
    lay out many more tokens than are computed. A row's keys and values are always laid out whole, at about a quarter
    of the memory of as many computed tokens.
    """
    tokens, rows = (positions - first).sum(1).tolist(), (first < positions).sum(1).tolist()
    earliest = first.amin(1).tolist()
    passes: list[list[int]] = []
    room = computed = laid_out = start = 0
    for cell in sorted((c for c, n in enumerate(tokens) if n), key=lambda cell: (earliest[cell], layers[cell])):
        size = max(tokens[cell], rows[cell] * positions // 4)
        waste = laid_out + rows[cell] * (positions - start) - computed - tokens[cell]
        if size > room or waste > max(512, (computed + tokens[cell]) // 5):
            passes.append([])
            room, computed, laid_out, start = max_tokens, 0, 0, earliest[cell]
        passes[-1].append(cell)
        room -= size
        computed += tokens[cell]
        laid_out += rows[cell] * (positions - start)
    # Layer by layer, which is the order that a pass gives its rows in.
    return [sorted(cells, key=lambda cell: layers[cell]) for cells in passes]


def _announce(recorded: hooks.Trace, label: str, cells: int, passes: int, work: int, max_tokens: int) -> None:
    """Say how long a long sweep will take, from the time of one block, and how much memory."""
    batch, positions = recorded.inputs[0].shape[:2]
    rows = torch.arange(batch, device=recorded.inputs[0].device).repeat(max(1, 512 // (batch * positions)))
    residual = recorded.inputs[-2].index_select(0, rows)
    seconds = []
    with torch.no_grad():
        for _ in range(2):  # the first call warms up
            before = time.perf_counter()
            recorded.block(len(recorded.calls) - 1, residual, rows)
            seconds.append(time.perf_counter() - before)
    total = seconds[-1] / (len(rows) * positions) * work
    if total > LONG:
        print(
            f"{label}: {cells:,} cells in {passes:,} passes, about {total:.0f} s and "
            f"{pass_bytes(recorded.model, positions, max_tokens) / 1e9:.1f} GB beside the model",
            file=sys.stderr,
        )


def pass_bytes(model: Any, positions: int, max_tokens: int) -> int:
    """About how much memory a pass takes: activations of a block, whole rows of its attention, logits."""
    cfg = model.bridge.cfg
    width = 3 * (getattr(cfg, "d_mlp", None) or 4 * cfg.d_model) + 8 * cfg.d_model
    attention = 4 * max_tokens * (6 * cfg.n_heads * cfg.d_head + 3 * cfg.n_heads * positions)
    return model.dtype.itemsize * (max_tokens * width + attention + max_tokens // 8 * cfg.d_vocab)
