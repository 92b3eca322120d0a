"""Rows of which only the positions from their first change on are computed, laid end to end as one row of tokens.

All of a decoder block but the attention itself works token by token, so it need not know. Queries, keys and values are
laid out as rows between their projections and the output's (`hooks.Trace.grow`), from the earliest first change of all
on; keys and values before a row's first change are those of the recorded run, which in a causal model are what they
would be.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Hooks of [batch, head, pos, …]; hooks of the attention that see packed tokens; hooks that packed rows do not reach.
HEADS_FIRST = ("hook_pattern", "hook_attn_scores", "hook_rot_q", "hook_rot_k", "hook_q_normed", "hook_k_normed")
OF_TOKENS = ("attn.hook_out", "hook_hidden_states", "o.hook_out", "q.hook_in", "k.hook_in", "v.hook_in")
UNPACKED = ("attn.hook_in", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")

Edit = Callable[[Tensor], Tensor]


def acts_in(layer: int, name: str) -> bool:
    """Whether a hook is inside a layer."""
    return name.startswith(f"blocks.{layer}.")


def positions_second(name: str, activation: Tensor) -> Tensor:
    """An activation as [batch, pos, …], whatever its hook has; the same again turns it back."""
    return activation.transpose(1, 2) if activation.ndim == 4 and name.endswith(HEADS_FIRST) else activation


class Packing:
    """Which tokens are there.

    Attributes:
        rows: Int[" row"], the row of the recorded batch that each row is a copy of.
        first: Int[" row"], the first position of each that is computed; `positions` for none.
        start: the first position that attention lays out, at most any of `first`.
        row, position: Int[" token"], of each packed token.
        whole_token, token: where it is among the tokens of whole rows, and of rows as they are laid out.
    """

    def __init__(self, rows: Int[Tensor, " row"], first: Int[Tensor, " row"], start: int, positions: int) -> None:
        self.rows, self.first, self.start, self.positions = rows, first, start, positions
        lengths = positions - first
        self.row = torch.arange(len(rows), device=rows.device).repeat_interleave(lengths)
        begin = lengths.cumsum(0) - lengths - first
        self.position = torch.arange(len(self.row), device=rows.device) - begin[self.row]
        self.whole_token = self.row * positions + self.position
        self.token = self.row * (positions - start) + self.position - start

    def select(self, rows: slice | Bool[Tensor, " row"]) -> "Packing":
        return Packing(self.rows[rows], self.first[rows], self.start, self.positions)

    def join(self, other: "Packing") -> "Packing":
        rows, first = torch.cat([self.rows, other.rows]), torch.cat([self.first, other.first])
        return Packing(rows, first, self.start, self.positions)

    def lay_out(self, tokens: Float[Tensor, "some d"], at: Int[Tensor, " some"]) -> Float[Tensor, "row pos d"]:
        """Rows from `start` on, 0 where no token is."""
        rows = tokens.new_zeros(len(self.rows), self.positions - self.start, tokens.shape[-1])
        rows.flatten(0, 1).index_copy_(0, at, tokens)
        return rows

    def pack(self, rows: Float[Tensor, "row pos *rest"]) -> Float[Tensor, "token *rest"]:
        """The tokens of whole rows, or of rows as they are laid out."""
        return rows.flatten(0, 1)[self.whole_token if rows.shape[1] == self.positions else self.token]

    def whole(
        self, tokens: Float[Tensor, "token *rest"], base: Float[Tensor, "batch pos *rest"]
    ) -> Float[Tensor, "row pos *rest"]:
        """Whole rows, before each one's first those of `base`."""
        rows = base.index_select(0, self.rows)
        rows.flatten(0, 1).index_copy_(0, self.whole_token, tokens)
        return rows

    def edit(self, name: str, base: Float[Tensor, "batch *rest"], span: slice, edit: Edit) -> Edit:
        """A function of whole rows as an edit of some of these rows, at one hook."""
        mine = self.select(span)
        begin = int((self.row < span.start).sum())
        base = positions_second(name, base)

        def edited(tokens: Tensor) -> Tensor:
            whole = positions_second(name, mine.whole(tokens, base))
            return positions_second(name, edit(whole))

        def of_rows(activation: Tensor) -> Tensor:
            before, rows, after = activation.tensor_split([span.start, span.stop])
            new = edited(mine.pack(positions_second(name, rows)))[:, self.start :]
            return torch.cat([before, positions_second(name, new), after])

        def of_tokens(activation: Tensor) -> Tensor:
            tokens = activation if activation.ndim == 2 else activation[0]  # a router's have no batch axis
            before, some, after = tokens.tensor_split([begin, begin + len(mine.row)])
            return torch.cat([before, mine.pack(edited(some)), after]).reshape(activation.shape)

        return of_rows if ".attn." in name and not name.endswith(OF_TOKENS) else of_tokens


class Keys:
    """Keys and values of every layer of a run: given to attention as its cache, records them and changes nothing."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.found[layer] = (k, v)
        return k, v

    def of(self, packing: Packing) -> "_Prefixed":
        return _Prefixed(self.found, packing)


class _Prefixed:
    """The cache of packed rows: completes their keys and values with the recorded ones."""

    def __init__(self, found: dict[int, tuple[Tensor, Tensor]], packing: Packing) -> None:
        self.found, self.packing = found, packing
        at = torch.arange(packing.start, packing.positions, device=packing.rows.device)
        self.computed = (at >= packing.first[:, None])[:, None, :, None]

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._whole(self.found[layer][0], k), self._whole(self.found[layer][1], v)

    def _whole(
        self, recorded: Float[Tensor, "batch head pos d"], new: Float[Tensor, "row head some d"]
    ) -> Float[Tensor, "row head pos d"]:
        whole = recorded.index_select(0, self.packing.rows)
        late = whole[:, :, self.packing.start :]
        torch.where(self.computed, new, late, out=late)
        return whole


class Spans:
    """Which rows of a growing batch each start began with."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, slice]] = []

    def edits(self, layer: int, start: Any, rows: int) -> list[tuple[str, slice, Edit]]:
        """The edits in one layer, and the rows that each is of; the last of `rows` have just begun with `start`."""
        if start is not None:
            self.begun.append((start, slice(rows - len(start.rows), rows)))
        return [(name, span, e) for s, span in self.begun for name, e in s.edits.items() if acts_in(layer, name)]


def share(span: slice, rows: int, edit: Edit) -> Edit:
    """An edit of some rows. A router flattens batch and position into one axis, of which they have their share."""

    def apply(activation: Tensor) -> Tensor:
        unit = activation.shape[0] // rows
        before, mine, after = activation.tensor_split([span.start * unit, span.stop * unit])
        return torch.cat([before, edit(mine), after])

    return apply
