"""Causal tracing: what restores the answer when noise has hidden the subject.

Left out: the severed variant, which holds MLPs or attention at their noised values while a state is restored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.interventions import last_subject, targets
from locus.metrics import probability
from locus.sweeps import MAX_TOKENS, sweep, unchanged

SITES = {"resid": "hook_resid_post", "mlp": "hook_mlp_out", "attn": "hook_attn_out"}


@dataclass(frozen=True)
class CausalTracing:
    """Causal tracing: noise on the subject's embeddings, then clean states put back where they were.

        m(x + ε, a_window ← a_window(x)) - m(x + ε),    ε ~ N(0, (noise · σ)²),    mean over the noise samples

    with σ the standard deviation of all entries of the embeddings of all subject tokens. A component's score restores
    its block's output at the last subject token, in the `window` layers [l - window/2, l + window/2); see
    `causal_trace` for all positions, and for the residual stream. In units of the metric.

    Meng et al. 2022 (ROME, arXiv 2202.05262), §2.2 and appendix B; there m is the probability of the answer.

    Attributes:
        noise: of the embeddings, in their standard deviations σ.
        samples: of the noise, averaged.
        window: layers restored together; None: the paper's 10, or a quarter of the layers where that is less.
        seed: of the noise; as in the paper's code every prompt has the same draws.
        max_tokens: tokens in one forward pass at the most.
    """

    noise: float = 3.0
    samples: int = 10
    window: int | None = None
    seed: int = 0
    max_tokens: int = MAX_TOKENS
    KINDS: ClassVar[tuple[str, ...]] = ("mlp", "attn")

    def __post_init__(self) -> None:
        if self.noise <= 0 or self.samples < 1 or (self.window is not None and self.window < 1):
            raise ValueError(
                f"causal tracing needs noise above 0 and at least one sample and one layer, got noise={self.noise}, "
                f"samples={self.samples}, window={self.window}"
            )

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        last = last_subject(pairs)
        cells = [_Cell(self._hooks(model, c.kind, c.layer), last) for c in components]
        _, corrupted, restored = _restored(model, pairs, self, cells, metric, progress)
        return restored - corrupted[:, None]

    def _hooks(self, model: Any, kind: str, layer: int) -> tuple[str, ...]:
        """The hooks that a cell restores; a single layer of the residual stream, which holds all earlier ones."""
        window = 1 if kind == "resid" else layers_together(model, self.window, 10)
        first, end = max(0, layer - window // 2), min(model.cfg.n_layers, layer + (window + 1) // 2)
        return tuple(f"blocks.{i}.{SITES[kind]}" for i in range(first, end))


ROLES = "before", "first subject", "middle subject", "last subject", "first after", "further", "last", "answer"


@dataclass(frozen=True, eq=False)
class CausalTrace:
    """Effects of restoring each layer and position, see `causal_trace`.

    Attributes:
        effect: m(restored) - m(noised), mean over the noise; NaN at padding.
        clean, corrupted: m of the clean and of the noised run.
        tokens: the tokens of each prompt; "" at padding.
        roles: what each token is, one of ROLES; last is the one that the answer is read from; "" at padding.
        kind: "resid", "mlp" or "attn".
        facts: their prompts.
    """

    effect: Float[Tensor, "fact layer pos"]
    clean: Float[Tensor, " fact"]
    corrupted: Float[Tensor, " fact"]
    tokens: tuple[tuple[str, ...], ...]
    roles: tuple[tuple[str, ...], ...]
    kind: str
    facts: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """Tidy rows: fact, layer, position, token, role, effect."""
        fact, layer, position = (~self.effect.isnan()).nonzero().T.tolist()
        return pd.DataFrame(
            {
                "fact": [self.facts[i] for i in fact],
                "layer": layer,
                "position": position,
                "token": [self.tokens[i][t] for i, t in zip(fact, position, strict=True)],
                "role": [self.roles[i][t] for i, t in zip(fact, position, strict=True)],
                "effect": self.effect[fact, layer, position].tolist(),
            }
        )

    def by_role(self) -> pd.DataFrame:
        """Mean effect of each role (rows) and layer (columns): over the tokens of a fact, then over facts."""
        within = self.to_frame().groupby(["role", "layer", "fact"], sort=False).effect.mean()
        table = within.groupby(["role", "layer"], sort=False).mean().unstack("layer")
        return table.reindex([role for role in ROLES if role in table.index])


def causal_trace(
    model: Any,
    pairs: Any,
    method: CausalTracing | None = None,
    *,
    kind: str = "resid",
    metric: Callable = probability,
    progress: bool = True,
) -> CausalTrace:
    """Causal tracing of every layer and position.

    Args:
        model: a `HookedModel`.
        pairs: `ContrastPairs`, of which only the clean prompts are used.
        method: the settings, by default those of the paper.
        kind: "resid" restores the residual stream after one layer; "mlp" and "attn" restore the outputs of a window.
        metric: per-example function of logits.
        progress: show a bar.
    """
    if kind not in SITES:
        raise ValueError(f"causal tracing restores {', '.join(SITES)}, not {kind!r}")
    method = method or CausalTracing()
    n, positions = pairs.clean.shape
    cells = [
        _Cell(method._hooks(model, kind, layer), torch.full((n,), t))
        for layer in range(model.cfg.n_layers)
        for t in range(positions)
    ]
    clean, corrupted, restored = _restored(model, pairs, method, cells, metric, progress)
    effect = (restored - corrupted[:, None]).reshape(n, -1, positions).cpu()
    effect = effect.masked_fill(~pairs.attention_mask.cpu()[:, None], torch.nan)
    roles = tuple(_roles(pairs, i) for i in range(n))
    words = [model.tokenizer.convert_ids_to_tokens(row.tolist()) for row in pairs.clean]
    tokens = tuple(
        tuple(w if r else "" for w, r in zip(row, of, strict=True)) for row, of in zip(words, roles, strict=True)
    )
    prompts = tuple(fact.prompt for fact in pairs.facts)
    return CausalTrace(effect, clean.cpu(), corrupted.cpu(), tokens, roles, kind, prompts)


def layers_together(model: Any, window: int | None, published: int) -> int:
    """The window, by default the published one, at most a quarter of the layers: else a few windows hold them all."""
    return window or min(published, max(1, model.cfg.n_layers // 4))


def subject_noise(
    model: Any, pairs: Any, noise: float, samples: int, seed: int
) -> Float[Tensor, "fact sample pos d_model"]:
    """Noise for the embeddings of each prompt: `noise` · σ · N(0, 1) at subject tokens, 0 elsewhere."""
    with torch.no_grad(), hooks.capture(model, ["hook_embed"]) as found:
        model.logits(pairs.clean, pairs.attention_mask)
    embedded = found["hook_embed"]
    subject = pairs.subject.to(embedded.device)
    size = noise * embedded[subject].std()
    drawn = embedded.new_zeros(len(pairs), samples, *embedded.shape[1:])
    for i, row in enumerate(subject):
        # As in the code of ROME, a generator for each prompt: a fact's noise does not depend on the other facts.
        draw = np.random.RandomState(seed).randn(samples, int(row.sum()), embedded.shape[-1])
        drawn[i, :, row] = torch.as_tensor(draw).to(drawn) * size
    return drawn


class _Cell(NamedTuple):
    """Restores some hooks at one position of each fact."""

    hooks: tuple[str, ...]
    at: Int[Tensor, " fact"]


def _restored(
    model: Any, pairs: Any, method: CausalTracing, cells: Sequence[_Cell], metric: Callable, progress: bool
) -> tuple[Float[Tensor, " fact"], Float[Tensor, " fact"], Float[Tensor, "fact cell"]]:
    """The metric of the clean run, of the noised run, and with each cell restored; the latter two over the noise."""
    noise = subject_noise(model, pairs, method.noise, method.samples, method.seed)
    facts = max(1, method.max_tokens // (method.samples * pairs.clean.shape[1]))
    parts = []
    for first in range(0, len(pairs), facts):
        some = slice(first, first + facts)
        here = [_Cell(cell.hooks, cell.at[some]) for cell in cells]
        parts.append(_restored_some(model, pairs[some], noise[some], here, metric, method.max_tokens, progress))
    clean, corrupted, restored = (torch.cat(found) for found in zip(*parts, strict=True))
    return clean, corrupted, restored


def _restored_some(
    model: Any,
    pairs: Any,
    noise: Float[Tensor, "fact sample pos d_model"],
    cells: Sequence[_Cell],
    metric: Callable,
    max_tokens: int,
    progress: bool,
) -> tuple[Float[Tensor, " fact"], Float[Tensor, " fact"], Float[Tensor, "fact cell"]]:
    n, samples = noise.shape[:2]
    answers, read = targets(pairs), pairs.read.to(model.device)
    names = list(dict.fromkeys(name for cell in cells for name in cell.hooks))
    with torch.no_grad(), hooks.capture(model, names) as states:
        whole = hooks.trace(model, pairs.clean, pairs.attention_mask)
        clean = metric(unchanged(whole, read), answers)
    many = pairs[torch.arange(n).repeat_interleave(samples)]
    with hooks.edits(model, [("hook_embed", lambda embedded: embedded + noise.flatten(0, 1))]):
        noised = hooks.trace(model, many.clean, many.attention_mask)
    answers, read = targets(many), many.read.to(model.device)
    corrupted = metric(unchanged(noised, read), answers)
    restored = corrupted.new_zeros(n, len(cells))

    def start(some: list[int]) -> hooks.Start:
        found = dict.fromkeys(name for c in some for name in cells[c].hooks)
        edits = {name: _put_back([cells[c] for c in some], name, states[name], samples) for name in found}
        return hooks.Start(torch.arange(n * samples).repeat(len(some)), edits)

    layers = [int(cell.hooks[0].split(".")[1]) for cell in cells]
    label = "causal tracing" if progress else None
    for some, logits in sweep(noised, layers, start, read, max_tokens=max_tokens, progress=label):
        for c, cell_logits in zip(some, logits, strict=True):
            restored[:, c] = metric(cell_logits, answers).reshape(n, samples).mean(1)
    return clean, corrupted.reshape(n, samples).mean(1), restored


def _put_back(cells: Sequence[_Cell], name: str, clean: Float[Tensor, "fact pos d_model"], samples: int) -> hooks.Edit:
    def edit(activation: Tensor) -> Tensor:
        n = len(clean)
        facts = torch.arange(n, device=activation.device)
        rows = activation.clone().reshape(len(cells), n, samples, *activation.shape[1:])
        for row, cell in zip(rows, cells, strict=True):
            if name in cell.hooks:
                at = cell.at.to(activation.device)
                row[facts, :, at] = clean[facts, at][:, None]
        return rows.reshape(activation.shape)

    return edit


def _roles(pairs: Any, i: int) -> tuple[str, ...]:
    subject = pairs.subject[i].nonzero().flatten().tolist()
    last = int(pairs.read[i, 0])
    roles = []
    for t, is_token in enumerate(pairs.attention_mask[i].tolist()):
        if not is_token:
            roles.append("")
        elif t > last:
            roles.append("answer")
        elif t == subject[-1]:
            roles.append("last subject")
        elif t in subject:
            roles.append("first subject" if t == subject[0] else "middle subject")
        elif t == last:
            roles.append("last")
        elif t < subject[-1]:
            roles.append("before")
        else:
            roles.append("first after" if t == subject[-1] + 1 else "further")
    return tuple(roles)
