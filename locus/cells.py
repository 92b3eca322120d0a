"""Cells of a patching sweep: from TransformerLens' setters and indices to the rows of `locus.sweeps`."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformer_lens.utilities as tl_utilities
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locus import hooks
from locus.reads import positions_read
from locus.resume import Partial
from locus.sweeps import ablated, say_once, sweep

Setter = Callable[[Tensor, Sequence[int], Any], Tensor]


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells to patch in the run on some tokens: the index of each, whose first entry is its layer."""

    model: Any
    tokens: Int[Tensor, "batch pos"]
    attention_mask: Bool[Tensor, "batch pos"] | None
    activation_name: str
    cells: list[list[int]]
    window: int
    max_tokens: int

    def layers(self, cell: int) -> range:
        """The layers that a cell patches."""
        layer = self.cells[cell][0]
        return range(max(0, layer - self.window // 2), min(self.model.bridge.cfg.n_layers, layer - (-self.window // 2)))

    def name(self, layer: int) -> str:
        return tl_utilities.get_act_name(self.activation_name, layer=layer)

    def run(
        self,
        clean_cache: Any,
        setter: Setter,
        evaluate: Callable[[Tensor], Tensor],
        seed: int,
        known: bool,
        resume: str | Path | None,
        progress: bool,
    ) -> tuple[Tensor, Tensor]:
        """The metrics of every cell, and those of the run itself."""
        layers = sorted({layer for cell in range(len(self.cells)) for layer in self.layers(cell)})
        names = [self.name(layer) for layer in layers]
        sites = [] if self.activation_name == "resid_pre" else names
        recorded, logits = hooks.record(self.model, self.tokens, self.attention_mask, sites, keys=self.model.packed)
        clean = _source(recorded, clean_cache, names, self.attention_mask, seed)
        if known:
            _check_shape(clean[names[0]], self.tokens, self.activation_name)
        with torch.no_grad():
            base = evaluate(logits.clone())  # it may write to them
        values = torch.zeros(len(base), len(self.cells), *base.shape[1:], dtype=base.dtype, device=base.device)
        key: tuple[Any, ...] = ()
        if resume:
            # Two metrics may agree on this run, such as those that are 0 there, and be alike in all that can be seen.
            probe = evaluate(torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits))
            key = logits, self.attention_mask, base, probe, evaluate, setter, [clean[name] for name in names]
            key += self.cells, self.activation_name, self.window, self.max_tokens, seed
        kept = Partial(resume, values, key)
        run = partial(self._sweep, recorded, clean, setter, evaluate, logits, positions_read(evaluate, logits))
        if not self._still(run, kept, base):
            print(f"{resume} keeps other numbers than this sweep gives now, so it starts anew", file=sys.stderr)
            kept.forget()
        run(kept.put, kept.done(), progress)
        kept.save()
        return kept.values, base

    def _still(self, run: Callable, kept: Partial, base: Tensor) -> bool:
        """Whether the cell that moved each metric most gives what is kept: no record holds all that a metric reads."""
        done = kept.done()
        if not done:
            return True
        moved = (kept.values[:, done] - base[:, None]).abs().nan_to_num(0).reshape(len(base), len(done), -1).sum(2)
        chosen = {done[i] for i in moved.argmax(1).tolist()}
        found: dict[int, Tensor] = {}
        run(found.__setitem__, [cell for cell in range(len(self.cells)) if cell not in chosen], False)
        close = partial(torch.allclose, rtol=1e-4, atol=1e-6, equal_nan=True)  # not all devices give the same bits
        return all(close(found[cell], kept.values[:, cell]) for cell in set(done) & found.keys())

    def _sweep(
        self,
        recorded: hooks.Trace,
        clean: Any,
        setter: Setter,
        evaluate: Callable[[Tensor], Tensor],
        logits: Float[Tensor, "batch pos d_vocab"],
        read: Int[Tensor, " read"],
        put: Callable[[int, Tensor], None],
        done: Collection[int],
        progress: bool,
    ) -> None:
        if recorded.keys is None and self.model.fast:
            say_once(f"{self.model.name} cannot leave out the positions before a patch: whole rows are computed")
        seen = torch.full_like(logits, float("nan"))
        batch = len(recorded)

        def start(some: list[int]) -> hooks.Start:
            edits = {
                self.name(layer): self._edit(layer, some, clean[self.name(layer)], setter)
                for layer in sorted({layer for c in some for layer in self.layers(c)})
            }
            enter = edits.pop(next(iter(edits))) if self.activation_name == "resid_pre" else None
            return hooks.Start(torch.arange(batch).repeat(len(some)), edits, enter)

        label = f"patching {self.activation_name}" if progress else None
        firsts = [self.layers(cell)[0] for cell in range(len(self.cells))]
        options: dict[str, Any] = {"max_tokens": self.max_tokens, "progress": label, "done": done}
        for some, found in sweep(recorded, firsts, start, read.repeat(batch, 1), **options):
            for cell, cell_logits in zip(some, found, strict=True):
                seen[:, read] = cell_logits
                put(cell, evaluate(seen))

    def _edit(self, layer: int, some: list[int], clean: Tensor, setter: Setter) -> hooks.Edit:
        """An edit of the rows of several cells, in one of the layers that they patch."""

        def edit(activation: Tensor) -> Tensor:
            parts = zip(activation.clone().chunk(len(some)), some, strict=True)
            return torch.cat(
                [
                    setter(part, [layer, *self.cells[c][1:]], clean) if layer in self.layers(c) else part
                    for part, c in parts
                ]
            )

        return edit


def _source(recorded: hooks.Trace, clean_cache: Any, names: list[str], attention_mask: Tensor | None, seed: int) -> Any:
    """What is patched in, by hook name."""
    if isinstance(clean_cache, Tensor):
        with torch.no_grad(), hooks.capture(recorded.model, names) as found:
            recorded.model.logits(clean_cache, attention_mask)
        return found
    if not isinstance(clean_cache, str):
        return clean_cache
    if clean_cache != "zero" and recorded.site(names[0]).shape[1] != recorded.inputs[0].shape[1]:
        raise ValueError(f"{names[0]} can be set to 'zero' only: its activations are not by position")
    batch, positions = recorded.inputs[0].shape[:2]
    mask = torch.ones(batch, positions, dtype=torch.bool) if attention_mask is None else attention_mask
    mask = mask.to(recorded.inputs[0].device)
    return {name: ablated(recorded.site(name), mask, clean_cache, seed) for name in names}


def masks(
    positions: Sequence[Sequence[int]] | Bool[Tensor, "set batch pos"], tokens: Int[Tensor, "batch pos"]
) -> Bool[Tensor, "set batch pos"]:
    if isinstance(positions, np.ndarray):
        positions = torch.as_tensor(positions)
    sets = [] if isinstance(positions, str) or not hasattr(positions, "__len__") else list(positions)
    if not sets:
        raise ValueError(f"positions must be at least one set of positions, like [[0, 1], [2]]; got {positions!r}")
    if isinstance(positions, Tensor):
        if positions.dtype != torch.bool or positions.shape[1:] != tokens.shape:
            raise ValueError(
                f"positions as masks are bool [set, batch, pos] = [set, {', '.join(map(str, tokens.shape))}], got "
                f"{str(positions.dtype).removeprefix('torch.')} {list(positions.shape)}"
            )
        return positions.to(tokens.device)
    masks = torch.zeros(len(sets), *tokens.shape, dtype=torch.bool, device=tokens.device)
    for mask, given in zip(masks, sets, strict=True):
        chosen = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
        if not isinstance(chosen, Collection) or isinstance(chosen, str):
            raise ValueError(f"each set of positions is several, like [[0, 1], [2]]; got {given!r}")
        check_range("positions", chosen, -tokens.shape[1], tokens.shape[1])
        mask[:, list(chosen)] = True
    return masks


def check_range(name: str, values: Collection[Any], low: int, high: int) -> None:
    """Raises: ValueError: a value is no whole number from `low` to below `high`."""
    for value in values:
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value < high:
            raise ValueError(f"{name} are whole numbers from {low} to {high - 1} here, got {value!r}")


def at_once(setter: Setter, sets: Bool[Tensor, "set batch pos"], axis: int) -> Setter:
    """A setter whose index names a set of positions, from one whose index names a position."""

    def set_all(activation: Tensor, index: Sequence[int], clean: Any) -> Tensor:
        mask, new = sets[index[axis]], activation.clone()
        for at in mask.any(0).nonzero().flatten().tolist():
            new = setter(new, [*index[:axis], at, *index[axis + 1 :]], clean)
        return torch.where(mask.reshape(*mask.shape, *[1] * (activation.ndim - 2)), new, activation)

    return set_all


def _check_shape(clean: Tensor, tokens: Tensor, activation_name: str) -> None:
    found = clean.shape[2 if activation_name in ("pattern", "attn_scores") else 1]
    if found != tokens.shape[1]:
        raise ValueError(
            f"the clean cache is of {found} positions and the corrupted tokens have {tokens.shape[1]}; "
            "patching needs prompts of the same length, token by token"
        )
    if len(clean) not in (1, len(tokens)):  # one clean prompt serves all, as in TransformerLens
        raise ValueError(f"the clean cache is of {len(clean)} prompts and there are {len(tokens)} corrupted ones")
