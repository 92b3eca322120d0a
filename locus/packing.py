"""Rows of which only the positions from their first change on are computed, laid end to end as one row of tokens.

All of a decoder block but the attention itself works token by token, so it need not know. Queries, keys and values are
laid out as whole rows between their projections and the output's (`hooks.Trace.grow`): there, keys and values before
the first change are those of the recorded run, which in a causal model are what they would be.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Hooks of [batch, head, pos, …]; hooks of the attention that see packed tokens; hooks that packed rows do not reach.
HEADS_FIRST = ("hook_pattern", "hook_attn_scores", "hook_rot_q", "hook_rot_k", "hook_q_normed", "hook_k_normed")
OF_TOKENS = ("attn.hook_out", "hook_hidden_states", "o.hook_out", "q.hook_in", "k.hook_in", "v.hook_in")
UNPACKED = ("attn.hook_in", "hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")


class Packing:
    """Which tokens are there.

    Attributes:
        rows: Int[" row"], the row of the recorded batch that each row is a copy of.
        first: Int[" row"], the first position of each that is computed; `positions` for none.
        row, position: Int[" token"], of each packed token.
        token: Int[" token"], where it is among the tokens of whole rows.
    """

    def __init__(self, rows: Int[Tensor, " row"], first: Int[Tensor, " row"], positions: int) -> None:
        self.rows, self.first, self.positions = rows, first, positions
        lengths = positions - first
        self.row = torch.arange(len(rows), device=rows.device).repeat_interleave(lengths)
        start = lengths.cumsum(0) - lengths - first
        self.position = torch.arange(len(self.row), device=rows.device) - start[self.row]
        self.token = self.row * positions + self.position

    def keep(self, which: Bool[Tensor, " row"]) -> "Packing":
        return self if bool(which.all()) else Packing(self.rows[which], self.first[which], self.positions)

    def join(self, other: "Packing") -> "Packing":
        return Packing(torch.cat([self.rows, other.rows]), torch.cat([self.first, other.first]), self.positions)

    def pack(self, whole: Float[Tensor, "row pos *rest"]) -> Float[Tensor, "token *rest"]:
        return whole.flatten(0, 1)[self.token]

    def whole(
        self, tokens: Float[Tensor, "token *rest"], base: Float[Tensor, "batch pos *rest"] | None
    ) -> Float[Tensor, "row pos *rest"]:
        """Whole rows; the positions that are not packed are those of `base`, or 0 (of queries, nobody asks)."""
        if base is None:
            rows = tokens.new_zeros(len(self.rows), self.positions, *tokens.shape[1:])
        else:
            rows = base.index_select(0, self.rows)
        rows.flatten(0, 1).index_copy_(0, self.token, tokens)
        return rows

    def edit(
        self, name: str, base: Float[Tensor, "batch *rest"], span: slice, edit: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """A function of whole rows as an edit of some of these rows, at one hook."""
        mine = Packing(self.rows[span], self.first[span], self.positions)
        start = int((self.row < span.start).sum())
        stop = start + len(mine.row)

        def of_rows(activation: Tensor) -> Tensor:
            before, rows, after = activation.tensor_split([span.start, span.stop])
            return torch.cat([before, edit(rows), after])

        def of_tokens(activation: Tensor) -> Tensor:
            tokens = activation if activation.ndim == 2 else activation[0]  # a router's have no batch axis
            before, some, after = tokens.tensor_split([start, stop])
            new = mine.pack(edit(mine.whole(some, base)))
            return torch.cat([before, new, after]).reshape(activation.shape)

        return of_rows if ".attn." in name and not name.endswith(OF_TOKENS) else of_tokens
