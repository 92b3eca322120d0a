"""Faithfulness: how much of the model's answer the top components or edges of a ranking carry alone.

The circuit of size k is the top k components or edges of a ranking. All else is patched with its activation on the
corrupted prompt; what the metric keeps of its way from the corrupted to the clean run is the circuit's faithfulness.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locus import hooks
from locus.charts import Figure
from locus.components import Components
from locus.edges import Edges, EdgeScores, all_written, edges, entrance, ranking, read, written
from locus.localize.interventions import activations, per_example, places, targets
from locus.metrics import logit_difference
from locus.progress import tqdm
from locus.scores import Scores

# The sizes at which the MIB benchmark measures, as fractions of all edges.
FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Faithfulness of the circuits of one ranking, f(k) = (m(C_k) - m(∅)) / (m(full) - m(∅)).

    m is the mean of the metric over the pairs; 0 = as if all were corrupted, 1 = the whole model; it may leave 0..1.

    values: metric of each pair with each circuit
    full, empty: metric of each pair with everything clean, and with everything that was ranked corrupted
    fractions, sizes: how large each circuit is, as a share of all that was ranked and as a number
    unit: what is counted, "edge" or the kind of component
    """

    values: Float[Tensor, "pair size"]
    full: Float[Tensor, " pair"]
    empty: Float[Tensor, " pair"]
    fractions: tuple[float, ...]
    sizes: tuple[int, ...]
    unit: str
    method: object
    metric: str

    @property
    def curve(self) -> Float[Tensor, " size"]:
        """f at each size."""
        return self._of(torch.ones(1, len(self.values), dtype=self.values.dtype) / len(self.values))[0]

    @property
    def cpr(self) -> float:
        """Circuit performance ratio: ∫ f dk over the fractions, trapezoid. Higher is better: it finds what helps."""
        return float(self._area(self.curve))

    @property
    def cmd(self) -> float:
        """Circuit-model distance: ∫ |1 - f| dk, trapezoid. Lower is better, 0 = it does what the model does."""
        return float(self._area((1 - self.curve).abs()))

    def bootstrap(self, n: int = 1000, *, seed: int = 0) -> Float[Tensor, "sample size"]:
        """f of n resamples of the pairs, with replacement."""
        pairs = len(self.values)
        counts = np.random.default_rng(seed).multinomial(pairs, np.full(pairs, 1 / pairs), size=n)
        return self._of(torch.as_tensor(counts, dtype=self.values.dtype) / pairs)

    def interval(self, name: str, level: float = 0.95, *, seed: int = 0) -> tuple[float, float]:
        """Bootstrap interval, over pairs, of "cpr" or "cmd"."""
        if name not in ("cpr", "cmd"):
            raise ValueError(f"there are intervals of 'cpr' and 'cmd', not of {name!r}")
        samples = self.bootstrap(seed=seed)
        areas = self._area(samples if name == "cpr" else (1 - samples).abs())
        low, high = areas.quantile((1 - level) / 2), areas.quantile((1 + level) / 2)
        return float(low), float(high)

    def to_frame(self) -> pd.DataFrame:
        """fraction, size, faithfulness, its 95% bootstrap interval (low, high), n pairs."""
        samples = self.bootstrap()
        return pd.DataFrame(
            {
                "fraction": self.fractions,
                "size": self.sizes,
                "faithfulness": self.curve.tolist(),
                "low": samples.quantile(0.025, dim=0).tolist(),
                "high": samples.quantile(0.975, dim=0).tolist(),
                "n": len(self.values),
            }
        )

    def __repr__(self) -> str:
        n = len(self.values)
        return f"Faithfulness(CPR {self.cpr:.3f}, CMD {self.cmd:.3f}, {self.unit}s of {self.method!r}, n = {n} pairs)"

    def _of(self, weights: Float[Tensor, "sample pair"]) -> Float[Tensor, "sample size"]:
        empty = weights @ self.empty
        return (weights @ self.values - empty[:, None]) / (weights @ self.full - empty)[:, None]

    def _area(self, f: Float[Tensor, "*sample size"]) -> Float[Tensor, "*sample"]:
        return torch.trapezoid(f, torch.tensor(self.fractions, dtype=f.dtype), dim=-1)


def faithfulness(
    model: Any,
    pairs: Any,
    scores: Scores | EdgeScores,
    *,
    fractions: Sequence[float] = FRACTIONS,
    by: str = "magnitude",
    metric: Callable = logit_difference,
    batch_size: int = 8,
    progress: bool = True,
) -> Faithfulness:
    """Faithfulness of the top of a ranking, at each size.

    The model runs on the clean prompts. Edges: the receiver of an edge outside the circuit reads its sender's output
    on the corrupted prompt; ∅ is the corrupted run. Components: one outside the circuit has its activation on the
    corrupted prompt; in ∅ all that were ranked have, and what was not ranked (the embeddings, other kinds) stays.

    Mueller et al. 2025 (MIB, arXiv 2504.13151), section 3; there too by magnitude unless told otherwise.

    Args:
        model: a `HookedModel`.
        pairs: `ContrastPairs`; not those that the scores are from, if the curve is to say something about new ones.
        scores: of all edges (`localize_edges`), or of components (`localize`).
        fractions: sizes of the circuits, increasing, as shares of all edges or components that were scored.
        by: "magnitude" ranks by |mean score| (for CMD), "score" by the mean score (for CPR).
        metric: per-example function of logits, see `locus.metrics`.
        batch_size: pairs in one pass at the most.

    Raises:
        ValueError: some edges were not scored, or the metric does not tell clean from corrupted: then f is undefined.
    """
    fractions = tuple(float(f) for f in fractions)
    if not fractions or list(fractions) != sorted(set(fractions)) or not 0 <= fractions[0] <= fractions[-1] <= 1:
        raise ValueError(f"fractions must increase, within 0..1; got {fractions}")
    items = scores.edges if isinstance(scores, EdgeScores) else scores.components
    if items.model != model.fingerprint:
        raise ValueError(f"the scores belong to model {items.model}, not to {model.name} ({model.fingerprint})")
    if isinstance(scores, EdgeScores) and len(items) != (total := len(edges(model))):
        raise ValueError(f"faithfulness needs scores of all {total} edges, got {len(items)}; localize_edges gives them")
    order = ranking(scores.mean(), by)
    sizes = tuple(round(f * len(items)) for f in fractions)
    run: Callable = _run_edges if isinstance(items, Edges) else _run_components
    keeps = []
    for size in (*sizes, len(items), 0):
        keep = torch.zeros(len(items), dtype=torch.bool)
        keep[order[:size]] = True
        keeps.append(keep)
    starts = range(0, len(pairs), batch_size)
    with tqdm(total=len(starts) * len(keeps), desc="faithfulness", disable=not progress, file=sys.stderr) as bar:
        parts = [run(model, pairs[i : i + batch_size], items, keeps, per_example(metric), bar.update) for i in starts]
    values = torch.cat(parts).cpu()
    full, empty = values[:, -2], values[:, -1]
    if (full.mean() - empty.mean()).abs() <= 1e-6 * max(1.0, float(full.abs().max())):
        raise ValueError(
            f"{getattr(metric, '__name__', metric)} is {full.mean():.4g} with everything clean and with everything "
            "corrupted, so faithfulness is undefined; take pairs or a metric that tell the two apart"
        )
    unit = "edge" if isinstance(items, Edges) else "/".join(dict.fromkeys(items.kinds))
    name = getattr(metric, "__name__", str(metric))
    return Faithfulness(values[:, :-2], full, empty, fractions, sizes, unit, scores.method, name)


@torch.no_grad()
def _run_components(
    model: Any,
    pairs: Any,
    components: Components,
    keeps: Sequence[Bool[Tensor, " component"]],
    metric: Callable,
    done: Callable,
) -> Float[Tensor, "pair circuit"]:
    """The metric of the clean run with the components that are not kept at their corrupted activations."""
    corrupted = activations(model, pairs.corrupted, pairs.attention_mask, components)
    columns = []
    for keep in keeps:
        outside = places(components[i] for i in (~keep).nonzero().flatten().tolist())
        changes = [(name, _corrupt(index, corrupted[name])) for name, _, index in outside]
        with hooks.edits(model, changes), hooks.read_only(model, pairs.read):
            columns.append(metric(model.logits(pairs.clean, pairs.attention_mask), targets(pairs)))
        done()
    return torch.stack(columns, dim=1)


def _corrupt(index: Int[Tensor, " _"] | None, corrupted: Tensor) -> hooks.Edit:
    """An edit that gives some components of one hook their corrupted activations."""

    def edit(activation: Tensor) -> Tensor:
        if index is None:
            return corrupted.reshape(activation.shape)
        some = index.to(activation.device)  # of the axis after the positions
        cells = activation.reshape(corrupted.shape)
        return cells.index_copy(2, some, corrupted.index_select(2, some)).reshape(activation.shape)

    return edit


@torch.no_grad()
def _run_edges(
    model: Any, pairs: Any, graph: Edges, keeps: Sequence[Bool[Tensor, " edge"]], metric: Callable, done: Callable
) -> Float[Tensor, "pair circuit"]:
    """The metric of the clean run in which edges that are not kept carry the corrupted run's outputs."""
    corrupted = all_written(model, pairs.corrupted, pairs.attention_mask)
    columns = []
    for keep in keeps:
        outside = corrupted.new_zeros(len(graph.receivers), len(graph.senders))
        outside[graph.receiver[~keep], graph.sender[~keep]] = 1
        changes = _edge_edits(model, pairs.attention_mask, graph, outside, corrupted)
        with hooks.edits(model, changes), hooks.read_only(model, pairs.read):
            columns.append(metric(model.logits(pairs.clean, pairs.attention_mask), targets(pairs)))
        done()
    return torch.stack(columns, dim=1)


def _edge_edits(
    model: Any,
    attention_mask: Bool[Tensor, "pair pos"],
    graph: Edges,
    outside: Float[Tensor, "receiver sender"],
    corrupted: Float[Tensor, "pair sender pos d_model"],
) -> list[tuple[str, hooks.Edit]]:
    """Edits under which each receiver reads, from the senders marked 1 in its row of `outside`, corrupted outputs.

    As the run goes on, `moves` is filled with corrupted minus actual output of each sender; it is 0 for the later ones.
    """
    moves = torch.zeros_like(corrupted)
    padding = ~attention_mask.to(corrupted.device)[:, None, :, None]
    residuals: dict[int, Tensor] = {}

    def record(name: str, first: int, last: int) -> hooks.Edit:
        def edit(activation: Tensor) -> Tensor:
            actual = written(model, name, activation).masked_fill(padding, 0)
            moves[:, first:last] = corrupted[:, first:last] - actual
            return activation

        return edit

    def remember(layer: int) -> hooks.Edit:
        def edit(activation: Tensor) -> Tensor:
            residuals[layer] = activation
            return activation

        return edit

    def redirect(name: str, places: list[int]) -> hooks.Edit:
        def edit(activation: Tensor) -> Tensor:
            rows = outside[places]
            if not rows.any():
                return activation
            move = torch.einsum("rs,bspd->bprd", rows, moves)
            if "attn" not in name:
                return activation + move[:, :, 0]
            return read(model, [graph.receivers[i] for i in places], residuals[_layer_of(name)][:, :, None] + move)

        return edit

    heads, n_layers = model.cfg.n_heads, model.cfg.n_layers
    found: list[tuple[str, hooks.Edit]] = [("blocks.0.hook_resid_pre", record("blocks.0.hook_resid_pre", 0, 1))]
    for layer in range(n_layers):
        z, mlp, at = f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_mlp_out", 1 + layer * (heads + 1)
        found += [(z, record(z, at, at + heads)), (mlp, record(mlp, at + heads, at + heads + 1))]
        found.append((f"blocks.{layer}.ln1.hook_in", remember(layer)))
    by_entrance: dict[str, list[int]] = {}
    for i, receiver in enumerate(graph.receivers):
        by_entrance.setdefault(entrance(receiver, n_layers), []).append(i)
    return [*found, *((name, redirect(name, places)) for name, places in by_entrance.items())]


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def curves(found: Mapping[str, Faithfulness]) -> Figure:
    """Faithfulness against the size of the circuit, one line a ranking, by the names given."""
    if not found:
        raise ValueError("there is no curve to draw; give {name: faithfulness(…)}")
    rows = pd.concat([f.to_frame().assign(name=name) for name, f in found.items()])
    rows = rows[rows.fraction > 0]
    x = alt.X(
        "fraction:Q", scale=alt.Scale(type="log"), title="size of the circuit (fraction)", axis=alt.Axis(format="~p")
    )
    title = "faithfulness"
    base = alt.Chart(alt.Data(values=rows.to_dict("records"))).encode(x=x, color=alt.Color("name:N", title=None))
    tip = ["name:N", "size:Q", *(alt.Tooltip(f"{c}:Q", format=".3f") for c in ("faithfulness", "low", "high"))]
    rules = alt.Chart(alt.Data(values=[{"y": 0}, {"y": 1}])).mark_rule(strokeDash=[3, 3], color="#8E8E8E")
    chart: Any = alt.layer(
        rules.encode(y="y:Q"),
        base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title=title), y2="high:Q"),
        base.mark_line(point=True).encode(y=alt.Y("faithfulness:Q", title=title), tooltip=tip),
    ).properties(width=420, height=280)
    n = sorted({len(f.values) for f in found.values()})
    areas = "; ".join(f"{name}: CPR {f.cpr:.3f}, CMD {f.cmd:.3f}" for name, f in found.items())
    return Figure(
        "Faithfulness of circuits",
        chart,
        f"n = {', '.join(map(str, n))} pairs; bands are 95% bootstrap intervals over pairs. 1 = the whole model, 0 = "
        f"all corrupted. CPR is the area under the curve, CMD that between it and 1, both on a linear axis. {areas}.",
        f"Faithfulness by size of the circuit. {areas}.",
    )
