"""What a localizer costs, in passes through the model, whatever its batches."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from locus import hooks


class Passes:
    """Forward and backward passes counted by `passes`."""

    def __init__(self) -> None:
        self.forward = 0.0
        self.backward = 0.0


@contextmanager
def passes(model: Any, positions: int) -> Iterator[Passes]:
    """Within the block, counts passes through the model, in units of one prompt of so many tokens through all blocks.

    Counted by tokens and blocks: a row that starts at layer l of L, or of which half of the tokens are computed, is
    less than one. So a sweep and a loop over whole passes are counted by their work, whatever their batches.
    """
    found = Passes()
    blocks = list(model.bridge.blocks)

    def count(entering: Any, output: Any) -> Any:
        residual = output[0] if isinstance(output, tuple) else output
        share = residual.shape[:-1].numel() / positions / len(blocks)
        found.forward += share
        if residual.requires_grad:

            def back(gradient: Tensor) -> None:
                found.backward += share

            residual.register_hook(back)
        return output

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(hooks.linear_edit(block, count))
        yield found
