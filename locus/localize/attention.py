"""Attention knockout: what the answer loses when a position can no longer attend to others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.interventions import targets
from locus.localize.tracing import layers_together
from locus.metrics import probability
from locus.sweeps import MAX_TOKENS, sweep, unchanged

SOURCES = ("subject", "other", "last")


@dataclass(frozen=True)
class AttentionKnockout:
    """Attention knockout: m(clean) - m(clean, no attention from the last position to `source`).

    The last position is the one that the answer is read from; each of them, for an answer of several tokens. A head's
    score blocks these edges in that head alone; the score of an attention block of layer l blocks them in all heads of
    the `window` layers [l - window/2, l + window/2]. In units of the metric.

    Geva et al. 2023 (arXiv 2304.14767), §4; there m is the probability of the answer.

    Attributes:
        source: "subject" (its tokens), "other" (all tokens but these and the position itself) or "last" (the position
            itself).
        window: layers blocked together; None: the paper's 9, or a quarter of the layers where that is less.
        max_tokens: tokens in one forward pass at the most.
    """

    source: str = "subject"
    window: int | None = None
    max_tokens: int = MAX_TOKENS
    KINDS: ClassVar[tuple[str, ...]] = ("head", "attn")

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"attention knockout blocks {', '.join(SOURCES)}, not {self.source!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention knockout needs a window of at least one layer, got {self.window}")

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        blocked = edges(pairs, self.source).to(model.device)
        recorded = hooks.trace(model, pairs.clean, pairs.attention_mask)
        n, read, answers = len(pairs), pairs.read.to(model.device), targets(pairs)
        clean = metric(unchanged(recorded, read), answers)
        places = [self._layers(model, c.kind, c.layer) for c in components]
        heads = [c.index for c in components]
        lost = clean.new_zeros(n, len(components))

        def start(some: list[int]) -> hooks.Start:
            layers = dict.fromkeys(layer for c in some for layer in places[c])
            edits = {
                f"blocks.{layer}.attn.hook_attn_scores": _block([(heads[c], layer in places[c]) for c in some], blocked)
                for layer in layers
            }
            return hooks.Start(torch.arange(n).repeat(len(some)), edits)

        label = f"attention knockout, {self.source}" if progress else None
        first = [layers[0] for layers in places]
        for some, logits in sweep(recorded, first, start, read, max_tokens=self.max_tokens, progress=label):
            for c, cell_logits in zip(some, logits, strict=True):
                lost[:, c] = clean - metric(cell_logits, answers)
        return lost

    def _layers(self, model: Any, kind: str, layer: int) -> range:
        if kind == "head":
            return range(layer, layer + 1)
        window = layers_together(model, self.window, 9)
        return range(max(0, layer - window // 2), min(model.cfg.n_layers, layer + (window + 1) // 2))


def attention_curve(
    model: Any,
    pairs: Any,
    *,
    sources: Sequence[str] = SOURCES,
    window: int | None = None,
    metric: Callable = probability,
    max_tokens: int = MAX_TOKENS,
    progress: bool = True,
) -> pd.DataFrame:
    """Attention knockout in a window around every layer, from the last position to groups of positions.

    Returns rows: source, layer (the window's middle), fact (its prompt), clean and blocked (the metric), change (in per
    cent, 100 · (blocked - clean) / clean).
    """
    components = model.components("attn")
    with torch.no_grad(), hooks.read_only(model, pairs.read.to(model.device)):
        clean = metric(model.logits(pairs.clean, pairs.attention_mask), targets(pairs)).cpu()
    rows = []
    for source in sources:
        method = AttentionKnockout(source, window, max_tokens)
        blocked = clean[:, None] - method.score(model, pairs, components, metric, progress).cpu()
        for i, fact in enumerate(pairs.facts):
            for component, value in zip(components, blocked[i].tolist(), strict=True):
                rows.append((source, component.layer, fact.prompt, float(clean[i]), value))
    frame = pd.DataFrame(rows, columns=["source", "layer", "fact", "clean", "blocked"])
    return frame.assign(change=100 * (frame.blocked - frame.clean) / frame.clean)


def edges(pairs: Any, source: str) -> Bool[Tensor, "fact query key"]:
    """True at the attention edges from the positions that are read to the source.

    Raises:
        ValueError: a position would have nothing left to attend to.
    """
    mask, read = pairs.attention_mask, pairs.read_mask
    fact = torch.arange(len(pairs), device=read.device)[:, None].expand_as(read)
    query = torch.zeros_like(mask)
    query[fact[read], pairs.read[read]] = True
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    visible = mask[:, None, :] & torch.ones_like(itself).tril()
    key = {
        "subject": pairs.subject[:, None, :] & ~itself,
        "other": ~pairs.subject[:, None, :] & ~itself,
        "last": itself.expand(len(pairs), -1, -1),
    }[source]
    blocked = query[:, :, None] & visible & key
    if (query & ~(visible & ~blocked).any(-1)).any():
        raise ValueError(
            f"without the {source} tokens some answer would be read from a position that can attend to nothing: "
            "take prompts with other tokens, or another source"
        )
    return blocked


def _block(cells: Sequence[tuple[int | None, bool]], blocked: Bool[Tensor, "fact query key"]) -> hooks.Edit:
    """Masks the edges for each cell's rows: (the one head or None for all, whether in this layer)."""

    def edit(scores: Tensor) -> Tensor:
        # Finite, for the softmax is taken in float32.
        floor = max(torch.finfo(scores.dtype).min, torch.finfo(torch.float32).min / 2)
        rows = scores.clone().reshape(len(cells), len(blocked), *scores.shape[1:])
        for row, (head, here) in zip(rows, cells, strict=True):
            if here:
                part = row if head is None else row[:, head : head + 1]
                part.masked_fill_(blocked[:, None], floor)
        return rows.reshape(scores.shape)

    return edit
