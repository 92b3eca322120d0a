"""Pictures of results: masks, updates, evaluations, studies, and a prompt before and after an update."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import torch

from locus import hooks
from locus.charts import Figure, areas, tradeoffs
from locus.components import Component
from locus.evaluate import Evaluation
from locus.facts import Fact
from locus.facts.tokens import tokenize
from locus.masks import Mask
from locus.metrics import Targets, probability
from locus.scores import Scores
from locus.unlearn.update import Update
from locus.view.show import NEGATIVE, POSITIVE, Panel, View, chart_of, wide
from locus.view.text import _heads, _patterns, _say, _words, heads_panel

BEFORE, AFTER = "#8E8E8E", POSITIVE


def before_after(
    model: Any,
    update: Update,
    prompt: str | Fact,
    *,
    heads: Sequence[str | Component] | None = None,
    scores: Scores | None = None,
    top: int = 4,
    answers: int = 5,
) -> View:
    """One prompt around an update: what the next token may be, and where heads look, before and after.

    prompt: any text, or a fact, whose own answer is measured too: P(answer)^(1/T), length-normalized
    heads: to show, or the first `top` by `scores`, or else the `top` whose patterns change most: by
        ½ Σ_k |A_after - A_before|, the total variation, mean over the destination tokens; 0 to 1
    answers: the most likely tokens of each state
    """
    if isinstance(prompt, Fact):
        before, after = tokenize(model.tokenizer, prompt)
    else:
        before, after = model.tokenizer(prompt)["input_ids"], []
    tokens = torch.tensor([before], device=model.device)
    everything = list(model.components("head").items)
    states = [_state(model, before, after, everything)]
    with update.applied(model):
        states.append(_state(model, before, after, everything))
    (p0, own0, a0), (p1, own1, a1) = states
    moved = np.abs(a1 - a0).sum(-1).mean(-1) / 2
    if heads is None and scores is None:
        chosen = [everything[i] for i in np.argsort(-moved, kind="stable")[:top]]
    else:
        chosen, _ = _heads(model, heads, None, scores, top)
    index = [everything.index(head) for head in chosen]
    names = [name for head in chosen for name in (f"{head} before", f"{head} after", f"{head} change")]
    patterns = np.concatenate([np.stack([a0[i], a1[i], a1[i] - a0[i]]) for i in index])
    likely = dict.fromkeys(
        [*p0.argsort(descending=True)[:answers].tolist(), *p1.argsort(descending=True)[:answers].tolist()]
    )
    words = _words(model, torch.tensor(list(likely)))
    rows = pd.DataFrame(
        [
            (word.strip() or repr(word), state, float(p[i]))
            for word, i in zip(words, likely, strict=True)
            for state, p in (("before", p0), ("after", p1))
        ],
        columns=["token", "state", "probability"],
    )
    likeliest = _words(model, p1.argmax()[None])[0].strip()
    own = f"P({prompt.answer}) {own0:.3g} → {own1:.3g}, length-normalized. " if isinstance(prompt, Fact) else ""
    moves = ", ".join(f"{head} {moved[i]:.3f}" for head, i in zip(chosen, index, strict=True))
    said = f"before {words[0].strip()!r} ({float(p0.max()):.2f}), after {likeliest!r} ({float(p1.max()):.2f})"
    return View(
        f"“{_say(prompt.prompt if isinstance(prompt, Fact) else prompt)}” before and after the update, {model.name}",
        f"n = 1 prompt, {len(before)} tokens; {update.n_changed:,} entries changed, {update.objective!r}. {own}Above: "
        "the most likely next tokens. Below: attention before, after and the change (positive orange, negative blue); "
        f"mean total variation: {moves}.",
        f"{own}Most likely next token: {said}. Attention moved by: {moves}.",
        (Panel(_answers(rows)), heads_panel(names, patterns, _words(model, tokens[0]), signed=True)),
    )


@torch.no_grad()
def _state(model: Any, before: list[int], after: list[int], heads: list[Component]) -> tuple[Any, float, Any]:
    """Probabilities of the next token, of the whole answer, and all patterns on the prompt."""
    tokens = torch.tensor([before + after[:-1]], device=model.device)
    read = torch.arange(len(before) - 1, tokens.shape[1], device=model.device)[None]
    with hooks.read_only(model, read):
        logits = model.logits(tokens).float().cpu()
    answer = torch.tensor([after or [0]])
    own = probability(logits, Targets(answer, answer, torch.ones_like(answer, dtype=torch.bool)))
    return logits[0, 0].softmax(-1), float(own), _patterns(model, tokens[:, : len(before)], heads)


def _answers(rows: pd.DataFrame) -> Any:
    order = list(dict.fromkeys(rows.token))
    return wide(
        chart_of(rows)
        .mark_bar()
        .encode(
            x=alt.X("probability:Q", scale=alt.Scale(domain=[0, 1]), title="probability of the next token"),
            y=alt.Y("token:N", sort=order, title=None),
            yOffset=alt.YOffset("state:N", sort=["before", "after"]),
            color=alt.Color(
                "state:N",
                scale=alt.Scale(domain=["before", "after"], range=[BEFORE, AFTER]),
                title=None,
                legend=alt.Legend(orient="top"),
            ),
            tooltip=["token:N", "state:N", alt.Tooltip("probability:Q", format=".4~g")],
        ),
        30 * len(order),
    )


def mask(chosen: Mask) -> View:
    """Which share of each layer's parameters a mask lets change."""
    layers, sizes = chosen.components.layers.numpy(), chosen.components.sizes.numpy()
    selected = chosen.selected.numpy()
    found = [
        (layer, int(sizes[here & selected].sum()) / int(sizes[here].sum()), int((here & selected).sum()))
        for layer in np.unique(layers).tolist()
        for here in [layers == layer]
    ]
    rows = pd.DataFrame(found, columns=["layer", "share", "components"])
    whole = chosen.n_parameters / max(int(sizes.sum()), 1)
    chart = (
        chart_of(rows)
        .mark_bar(color=POSITIVE)
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("share:Q", title="may change", axis=alt.Axis(format="%")),
            tooltip=["layer:O", alt.Tooltip("share:Q", format=".2%"), "components:Q"],
        )
    )
    most = rows.sort_values("share", ascending=False).head(3)
    kinds = "/".join(dict.fromkeys(chosen.components.kinds))
    return View(
        f"Mask of {len(chosen):,} of {len(chosen.components):,} {kinds} components",
        f"Share of each layer's parameters that may change; {chosen.n_parameters:,} in all = {whole:.2%} of these "
        f"components' parameters. Made by: {chosen.recipe.get('method', 'unknown')}.",
        "Largest shares: " + ", ".join(f"layer {r.layer:.0f} {r.share:.1%}" for r in most.itertuples()) + ".",
        (Panel(wide(chart, 140)),),
    )


def update(made: Update) -> View:
    """The course of an update: the loss on what is to be forgotten and kept, and the retain probability, by step."""
    history = pd.DataFrame(list(made.history))
    names = [n for n in ("forget", "retain", "retain_probability", "grad_norm") if n in history]
    rows = (
        history.melt("step", names, "what", "value")
        if len(history)
        else pd.DataFrame(columns=["step", "what", "value"])
    )
    rows = rows.assign(value=rows.value.astype(float), what=rows.what.str.replace("_", " ", regex=False))
    rows = rows[np.isfinite(rows.value)]
    if rows.empty:
        raise ValueError("this update has no history to draw (no step was taken, or no number of it is finite)")
    chart = (
        chart_of(rows)
        .mark_line(point=alt.OverlayMarkDef(size=14), color=NEGATIVE)
        .encode(
            x=alt.X("step:Q", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            facet=alt.Facet("what:N", columns=2, title=None, sort=[n.replace("_", " ") for n in names]),
            tooltip=["what:N", "step:Q", alt.Tooltip("value:Q", format=".4~g")],
        )
        .properties(width=210, height=90)
        .resolve_scale(y="independent")
    )
    ends = ", ".join(f"{what} {of.value.iloc[0]:.3g} → {of.value.iloc[-1]:.3g}" for what, of in rows.groupby("what"))
    return View(
        f"Update: {made.status}, {made.n_changed:,} entries changed",
        f"{made.objective!r}, {made.optimizer!r}; n = {len(history)} steps, each measured before it; L2 norm of the "
        f"change {made.norm:.4g}. One run, so without intervals.",
        f"First and last step: {ends}.",
        (Panel(chart),),
    )


def evaluation(measured: Evaluation) -> View:
    """Every metric on every part of a split, with its 95% interval over the facts."""
    rows = measured.rows().dropna(subset="mean")
    if rows.empty:
        raise ValueError("this evaluation has no scored fact to draw")
    rows = rows.assign(metric=rows.metric.str.replace("_", " ", regex=False), better=rows.better.replace("", "neither"))
    base = chart_of(rows).encode(
        y=alt.Y("part:N", sort=list(dict.fromkeys(rows.part)), title=None),
        tooltip=[
            "part:N",
            "metric:N",
            "n:Q",
            *(alt.Tooltip(f"{c}:Q", format=".4~g") for c in ("mean", "low", "high")),
            "better:N",
        ],
    )
    chart = (
        alt.layer(
            base.mark_rule(color=NEGATIVE, strokeWidth=2).encode(x=alt.X("low:Q", title=None), x2="high:Q"),
            base.mark_point(filled=True, size=50, color=NEGATIVE, opacity=1).encode(x=alt.X("mean:Q", title=None)),
        )
        .properties(width=150, height=18 * rows.part.nunique())
        .facet(facet=alt.Facet("metric:N", title=None), columns=3)
        .resolve_scale(x="independent")
    )
    n = ", ".join(f"{part} {len(facts)}" for part, facts in measured.facts.items())
    main = rows[rows.metric.isin(["probability", "extraction strength"])]
    return View(
        f"Evaluation of {measured.model}",
        f"n = {n} facts; point: mean over the scored facts, line: its 95% interval. Forgetting lowers what is kept "
        f"high; the better direction is in the tooltip.",
        "; ".join(f"{r.part} {r.metric} {r.mean:.3f}" for r in main.itertuples()) + ".",
        (Panel(chart),),
    )


def tradeoff(table: pd.DataFrame) -> View:
    """Forget against retain strength of every arm of a study, one panel an objective and localizer."""
    return _figures("Forgetting against keeping", table, list(tradeoffs(table)))


def study(table: pd.DataFrame) -> View:
    """A study at a glance: the area under the trade-off of every arm, with intervals, by objective."""
    return _figures("Area under the trade-off", table, list(areas(table)))


def _figures(title: str, table: pd.DataFrame, figures: list[Figure]) -> View:
    if not figures:
        raise ValueError("there is nothing to draw: the table has no finished run with forget and retain strength")
    where = " · ".join(str(v) for name in ("model", "facts") if name in table for v in table[name].dropna().unique())
    return View(
        f"{title}, {where}" if where else title,
        " ".join(dict.fromkeys(figure.caption for figure in figures)),
        " ".join(figure.alt for figure in figures),
        tuple(Panel(figure.chart.properties(title=figure.title)) for figure in figures),
    )
