"""Views of a model on a text: attention, neurons token by token, and what an answer owes to each part."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from locus import hooks
from locus.components import Component, counts, site
from locus.facts import ContrastPairs, Fact
from locus.facts.tokens import encode, tokenize
from locus.localize.attribution import gradients_at
from locus.localize.interventions import activations, targets
from locus.metrics import log_probability, logit_difference
from locus.scores import Scores
from locus.view.show import NEGATIVE, POSITIVE, Element, Panel, View, chart_of, diverging, wide

MOST_HEADS = 64
MOST_TOKENS = 128


def attention(
    model: Any,
    text: str | Fact,
    *,
    heads: Sequence[str | Component] | None = None,
    layers: Sequence[int] | None = None,
    scores: Scores | None = None,
    top: int = 12,
) -> View:
    """Attention patterns of heads on a text: hover a head to see it large, click to keep it.

    A_hqk = softmax_k(q·k / sqrt(d_head)), from destination token q (row) to source token k (column); 0 to 1.

    text: any text, or a fact (its prompt and answer)
    heads: labels such as "L9H6"
    layers: all heads of these layers
    scores: of heads: they are sorted by it, largest first; with neither heads nor layers, the `top` ones

    Raises:
        ValueError: no head is named and there are no scores; too many heads or tokens; a head does not exist.
    """
    chosen, said = _heads(model, heads, layers, scores, top)
    tokens, words = _read(model, text)
    patterns = _patterns(model, tokens, chosen)
    names = [str(head) for head in chosen]
    # The answer is predicted one token before it.
    row = len(words) - 1 if isinstance(text, str) else int(encode(model, [text]).answer_mask[0].int().argmax()) - 1
    looked = [
        f"{name} looks most at {words[int(pattern[row].argmax())]!r} ({float(pattern[row].max()):.2f})"
        for name, pattern in zip(names[:6], patterns, strict=False)
    ]
    return View(
        f"Attention on “{_say(text)}”, {model.name}",
        f"n = {len(chosen)} heads, {len(words)} tokens, one forward pass. Row: the token that looks; column: the token "
        f"that is looked at; 0 (white) to 1. {said}",
        f"Attention patterns of {', '.join(names)}. From {words[row]!r}, before the answer: {'; '.join(looked)}.",
        (heads_panel(names, patterns, words),),
    )


def neurons(
    model: Any,
    text: str | Fact,
    neurons: Scores | Sequence[str | Component],
    *,
    top: int = 10,
) -> View:
    """How strongly neurons fire on each token of a text: h_i,t at `mlp.hook_post`, token by token.

    neurons: labels such as "L3N12", or scores of neurons, of which the `top` ones are shown, largest first

    Raises:
        ValueError: these are no neurons of the model.
    """
    chosen, said = _neurons(model, neurons, top)
    tokens, words = _read(model, text)
    found = hooks.states(model, tokens, torch.ones_like(tokens, dtype=torch.bool), sorted({site(c) for c in chosen}))
    values = torch.stack([found[site(c)][0, :, c.index] for c in chosen]).float().cpu()
    _finite(values)
    # What one neuron fires at says nothing of another one's scale.
    largest = values.abs().amax(1).clamp(min=torch.finfo(values.dtype).tiny)
    labels = [f"{c} ±{top:.3g}" for c, top in zip(chosen, largest.tolist(), strict=True)]
    return View(
        f"Neuron activations on “{_say(text)}”, {model.name}",
        f"n = {len(chosen)} neurons, {len(words)} tokens; activation after the nonlinearity, each row on its own "
        f"scale, whose end is beside its name: positive orange, 0 neutral, negative blue. {said}",
        _most(labels, words, values),
        (tokens_panel(labels, words, values, largest),),
    )


def neuron_attributions(
    model: Any,
    pairs: ContrastPairs,
    neurons: Scores | Sequence[str | Component],
    *,
    fact: int = 0,
    metric: Callable = logit_difference,
    top: int = 10,
) -> View:
    """Through which tokens neurons support the answer of one fact.

    c_i,t = (h_i,t(clean) - h_i,t(corrupted)) · ∂m/∂h_i,t at the corrupted run: attribution patching before its sum
    over positions (Nanda 2023). Positive = the neuron supports the answer there. In units of the metric.

    fact: which of the pairs
    neurons, top: as of `neurons`

    Raises:
        ValueError: there is no such pair, or these are no neurons of the model.
    """
    chosen, said = _neurons(model, neurons, top)
    if not 0 <= fact < len(pairs):
        raise ValueError(f"fact={fact} is none of {len(pairs)} pairs; take 0 to {len(pairs) - 1}")
    pair = pairs[fact : fact + 1]
    components = _only(model, chosen)
    clean = activations(model, pair.clean, pair.attention_mask, components)
    gradients, corrupted = gradients_at(model, pair.corrupted, pair, list(clean), metric)
    inside = pair.attention_mask[0].cpu()
    values = torch.stack(
        [
            ((clean[site(c)] - corrupted[site(c)]) * gradients[site(c)])[0, :, c.index].float().cpu()[inside]
            for c in chosen
        ]
    )
    words = _words(model, pair.clean[0].cpu()[inside])
    labels = [f"{c} {total:+.3g}" for c, total in zip(chosen, values.sum(1).tolist(), strict=True)]
    return View(
        f"Neuron attributions for “{pair.facts[0].prompt} {pair.facts[0].answer}”, {model.name}",
        f"n = {len(chosen)} neurons, {len(words)} tokens of 1 fact; attribution patching (denoising) of "
        f"{_name(metric)}, its sum beside each name; all rows on one scale: positive orange, 0 neutral, "
        f"negative blue, at most {float(values.abs().max()):.3g} in size. {said}",
        _most(labels, words, values),
        (tokens_panel(labels, words, values),),
    )


def attribution(
    model: Any, prompt: str | Fact, answer: str | None = None, *, metric: Callable = log_probability, top: int = 10
) -> View:
    """What an answer owes to the tokens of its prompt, to heads and to neurons.

    c(a) = Σ a · ∂m/∂a at the embedding of each token, the output of each head (z) and each neuron (h, after the
    nonlinearity), summed over positions for heads and neurons: activation times gradient, the first-order estimate of
    what the metric loses when the activation is set to zero (Shrikumar et al. 2017, arXiv 1704.02685). In units of
    the metric; positive = supports the answer. No contrast: for that, `locus.localize`.

    prompt, answer: a fact, or a prompt and its answer
    metric: of the answer's logits, without a distractor; by default the mean log probability of its tokens, in nats
    top: how many heads and neurons, by absolute value
    """
    fact = prompt if isinstance(prompt, Fact) else Fact("subject", "text", prompt, answer or "")
    pair = _uncorrupted(model, fact)
    kinds = [kind for kind in ("head", "neuron") if _has(model, kind)]
    entry = "blocks.0.hook_resid_pre"
    sites = [site(Component(i, kind, 0)) for kind in kinds for i in range(model.cfg.n_layers)]
    gradients, here = gradients_at(model, pair.clean, pair, [entry, *sites], metric)
    products = {name: (here[name] * gradients[name])[0].float().cpu() for name in here}
    words = _words(model, pair.clean[0])
    by_token = products[entry].sum(-1)
    charts, tops = [], []
    for kind in kinds:
        values = torch.stack([_of_kind(products[site(Component(i, kind, 0))]) for i in range(model.cfg.n_layers)])
        charts.append(_bars(f"{kind}s", _largest(values, kind, top)))
        tops += [f"{c} {v:+.3g}" for c, v in _largest(values, kind, 3)]
    strongest = by_token.abs().argmax()
    with torch.no_grad(), hooks.read_only(model, pair.read):
        probability = float(log_probability(model.logits(pair.clean), targets(pair))[0].exp())
    return View(
        f"What “{fact.answer}” owes to each part of “{fact.prompt}”, {model.name}",
        f"n = 1 prompt; activation × gradient of {_name(metric)}; positive (orange) supports the answer. "
        f"p(answer) = {probability:.3g}, length-normalized. Of the heads and neurons, the {top} largest in size.",
        f"Attribution of the answer {fact.answer!r}: most to the token {words[int(strongest)]!r} "
        f"({float(by_token[strongest]):+.3g}); {', '.join(tops)}.",
        (tokens_panel(["tokens"], words, by_token[None]), *(Panel(chart) for chart in charts)),
    )


# ------------------------------------------------------------------------------------------------ panels


def heads_panel(
    names: Sequence[str], patterns: Float[np.ndarray, "head query key"], words: Sequence[str], *, signed: bool = False
) -> Panel:
    """Attention patterns: CircuitsVis where scripts run, else one heat map a head."""
    _finite(patterns)
    props = {
        "attention": np.round(patterns, 4).tolist(),
        "attentionHeadNames": list(names),
        "tokens": [_literal(word) for word in words],
        "positiveColor": POSITIVE,
        "negativeColor": NEGATIVE,
        "minValue": -1,
        "maxValue": 1,
        "maskUpperTri": True,
    }
    query, key = np.tril_indices(len(words))
    labels = [f"{word.strip() or '␣'} {i}" for i, word in enumerate(words)]
    rows = pd.concat(
        [
            pd.DataFrame({"head": name, "from": [labels[i] for i in query], "to": [labels[i] for i in key]}).assign(
                attention=pattern[query, key]
            )
            for name, pattern in zip(names, patterns, strict=True)
        ]
    )
    size = max(70, min(150, 12 * len(words)))
    columns = 3 if signed else max(1, 560 // (size + 50))
    shown = alt.Axis(labels=len(words) <= 12, ticks=False, labelLimit=60, labelFontSize=8, title=None)
    scale = diverging(1.0) if signed else alt.Scale(range=["#ffffff", POSITIVE], domain=[0, 1], interpolate="rgb")
    chart = (
        chart_of(rows)
        .mark_rect()
        .encode(
            x=alt.X("to:N", sort=labels, axis=shown),
            y=alt.Y("from:N", sort=labels, axis=shown),
            color=alt.Color("attention:Q", scale=scale),
            facet=alt.Facet("head:N", columns=columns, sort=list(names), title=None),
        )
        .properties(width=size, height=size)
    )
    return Panel(chart, (Element("AttentionHeads", props),))


def tokens_panel(
    labels: Sequence[str],
    words: Sequence[str],
    values: Float[Tensor, "row pos"],
    ends: Float[Tensor, " row"] | None = None,
) -> Panel:
    """Tokens colored by numbers, one row a label, on a scale around 0 that goes to `ends`, by default the same."""
    _finite(values)
    ends = torch.full((len(values),), float(values.abs().max()) or 1.0) if ends is None else ends
    elements = tuple(
        Element(
            "ColoredTokens",
            {
                "tokens": [_literal(word) for word in words],
                "values": [float(f"{v:.4g}") for v in row],
                "minValue": -end,
                "maxValue": end,
                "positiveColor": POSITIVE,
                "negativeColor": NEGATIVE,
                "paddingBottom": 0,
            },
            label,
        )
        for label, row, end in zip(labels, values.tolist(), ends.tolist(), strict=True)
    )
    columns = [f"{word.strip() or '␣'} {i}" for i, word in enumerate(words)]
    one = len(set(ends.tolist())) == 1
    shown = values if one else values / ends[:, None]
    found = [
        (a, b, v) for a, row in zip(labels, shown.tolist(), strict=True) for b, v in zip(columns, row, strict=True)
    ]
    scale = diverging(float(ends[0]) if one else 1.0)
    chart = (
        chart_of(pd.DataFrame(found, columns=["row", "token", "value"]))
        .mark_rect()
        .encode(
            x=alt.X("token:N", sort=columns, title=None, axis=alt.Axis(labelAngle=-45, labelLimit=90)),
            y=alt.Y("row:N", sort=list(labels), title=None),
            color=alt.Color("value:Q", scale=scale, title=None if one else "of ±"),
        )
        .properties(width=min(40 * len(words), 560), height=max(26, 22 * len(labels)))
    )
    return Panel(chart, elements)


def _most(labels: list[str], words: list[str], values: Float[Tensor, "row pos"]) -> str:
    """For each of the first rows, the token with its largest value."""
    at = values.abs().argmax(1).tolist()
    found = zip(labels[:8], values.tolist(), at, strict=False)
    return "; ".join(f"{label}: most at {words[i]!r} ({row[i]:+.3g})" for label, row, i in found) + "."


def _bars(title: str, found: list[tuple[str, float]]) -> Any:
    rows = pd.DataFrame(found, columns=["component", "attribution"])
    largest = float(rows.attribution.abs().max()) or 1.0
    bars = (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=alt.X("attribution:Q", title=f"attribution to {title}", axis=alt.Axis(format="~g", tickCount=6)),
            y=alt.Y("component:N", sort=None, title=None),
            color=alt.Color("attribution:Q", scale=diverging(largest), legend=None),
            tooltip=["component:N", alt.Tooltip("attribution:Q", format="+.4~g")],
        )
    )
    return wide(bars, 18 * len(rows))


# ------------------------------------------------------------------------------------------------ what is chosen


def _heads(
    model: Any,
    heads: Sequence[str | Component] | None,
    layers: Sequence[int] | None,
    scores: Scores | None,
    top: int,
) -> tuple[list[Component], str]:
    known = set(model.components("head").items)
    chosen = [Component.parse(head) if isinstance(head, str) else head for head in heads or ()]
    chosen += [Component(i, "head", j) for i in layers or () for j in range(model.cfg.n_heads)]
    said = ""
    if scores is not None:
        _require_model(model, scores)
        mean = dict(zip(scores.components.items, scores.mean().tolist(), strict=True))
        mean = {head: value for head, value in mean.items() if head.kind == "head"}
        missing = [str(head) for head in chosen if head not in mean]
        if missing or not mean:
            raise ValueError(f"these scores say nothing of {(missing or ['heads'])[0]}; score components='head'")
        chosen = sorted(chosen or mean, key=lambda head: -mean[head])[: None if chosen else top]
        said = f"Sorted by {scores.metric.replace('_', ' ')} of {scores.method!r}, n = {len(scores.values)} facts: "
        said += ", ".join(f"{head} {mean[head]:+.3g}" for head in chosen[:3]) + (", …" if len(chosen) > 3 else ".")
    if not chosen:
        raise ValueError('name heads (heads=["L9H6"]), layers (layers=[9]), or give scores of heads to take the top of')
    if len(chosen) > MOST_HEADS:
        raise ValueError(f"{len(chosen)} heads are more than can be told apart; choose {MOST_HEADS} at the most")
    if wrong := [head for head in chosen if head not in known]:
        raise ValueError(
            f"{model.name} has no head {wrong[0]}: it has {model.cfg.n_layers} layers of {model.cfg.n_heads}"
        )
    return list(dict.fromkeys(chosen)), said


def _neurons(model: Any, given: Scores | Sequence[str | Component], top: int) -> tuple[list[Component], str]:
    said = ""
    if isinstance(given, Scores):
        _require_model(model, given)
        order = torch.argsort(given.mean(), descending=True, stable=True).tolist()
        chosen = [given.components[i] for i in order[:top]]
        said = f"The top {len(chosen)} of {len(order)} by {given.metric.replace('_', ' ')} of {given.method!r}."
    else:
        chosen = [Component.parse(c) if isinstance(c, str) else c for c in given]
    wide = counts(model)["neuron"]
    for c in chosen:
        if c.kind not in ("neuron", "value") or c.layer >= model.cfg.n_layers or (c.index or 0) >= wide:
            raise ValueError(f"{c} is no neuron of {model.name}, which has {model.cfg.n_layers} layers of {wide}")
    if not chosen:
        raise ValueError('name at least one neuron, such as "L3N12"')
    return list(dict.fromkeys(chosen)), said


def _require_model(model: Any, scores: Scores) -> None:
    if scores.components.model != model.fingerprint:
        raise ValueError(f"these scores belong to model {scores.components.model}, not to {model.name}")


def _finite(values: Any) -> None:
    if not bool(torch.as_tensor(values).isfinite().all()):
        raise ValueError("the model's activations or gradients on this text are not finite; nothing can be drawn")


def _has(model: Any, kind: str) -> bool:
    try:
        return len(model.components(kind)) > 0
    except ValueError:
        return False


def _only(model: Any, chosen: list[Component]) -> Any:
    whole = model.components(chosen[0].kind)
    sizes = whole.sizes[: len(chosen)]
    return replace(whole, items=tuple(chosen), sizes=sizes)


# ------------------------------------------------------------------------------------------------ tokens and tensors


def _read(model: Any, text: str | Fact) -> tuple[Int[Tensor, "1 pos"], list[str]]:
    if isinstance(text, Fact):
        tokens = encode(model, [text]).tokens
    else:
        tokens = torch.tensor([model.tokenizer(text)["input_ids"]], dtype=torch.long, device=model.device)
    if not 1 <= tokens.shape[1] <= MOST_TOKENS:
        raise ValueError(f"the text has {tokens.shape[1]} tokens; give 1 to {MOST_TOKENS}")
    return tokens, _words(model, tokens[0])


def _words(model: Any, tokens: Int[Tensor, " pos"]) -> list[str]:
    """Each token as text; a fragment of a character as the tokenizer writes it."""
    words = [model.tokenizer.decode([i]) for i in tokens.tolist()]
    raw = model.tokenizer.convert_ids_to_tokens(tokens.tolist())
    return [r if "�" in word or not word else word for word, r in zip(words, raw, strict=True)]


def _literal(word: str) -> str:
    """CircuitsVis writes tokens as HTML, in which `<bos>` is a tag and vanishes; no tag begins with a word joiner."""
    return word.replace("<", "<\u2060").replace("&", "&\u2060")


def _patterns(
    model: Any, tokens: Int[Tensor, "1 pos"], heads: Sequence[Component]
) -> Float[np.ndarray, "head pos pos"]:
    names = [f"blocks.{i}.attn.hook_pattern" for i in sorted({head.layer for head in heads})]
    found = hooks.states(model, tokens, torch.ones_like(tokens, dtype=torch.bool), names)
    return np.stack([found[f"blocks.{h.layer}.attn.hook_pattern"][0, h.index].float().cpu().numpy() for h in heads])


def _uncorrupted(model: Any, fact: Fact) -> ContrastPairs:
    """One fact as a pair of itself, for what reads an answer off contrast pairs."""
    before, after = tokenize(model.tokenizer, fact)
    tokens = torch.tensor([before + after[:-1]], device=model.device)
    at = torch.arange(len(before) - 1, tokens.shape[1], device=model.device)[None]
    answer = torch.tensor([after], device=model.device)
    whole = torch.ones_like(tokens, dtype=torch.bool)
    return ContrastPairs(
        tokens, tokens, whole, at, answer, answer, torch.ones_like(answer, dtype=torch.bool), ~whole, (fact,)
    )


def _of_kind(product: Float[Tensor, "pos *part"]) -> Float[Tensor, " component"]:
    return product.sum(0).sum(-1) if product.ndim == 3 else product.sum(0)


def _largest(values: Float[Tensor, "layer index"], kind: str, top: int) -> list[tuple[str, float]]:
    order = values.flatten().abs().argsort(descending=True)[:top]
    order = order[values.flatten()[order].argsort(descending=True)]
    width = values.shape[1]
    return [(str(Component(i // width, kind, i % width)), float(values.flatten()[i])) for i in order.tolist()]


def _say(text: str | Fact) -> str:
    whole = f"{text.prompt} {text.answer}" if isinstance(text, Fact) else text
    return whole if len(whole) <= 60 else whole[:57] + "…"


def _name(metric: Callable) -> str:
    return getattr(metric, "__name__", str(metric)).replace("_", " ")
