"""Fact lookup: where attributes are written into the subject, before later layers move them to the answer.

Guo et al. 2024 (mechanistic unlearning, arXiv 2410.12949): by path patching into the layer where the answer's heads
begin (`FactLookup`), and by probes of the attribute (`Probing`). Left out: their choice by hand for sports facts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Component, Components, site
from locus.localize.interventions import activations, last_subject, per_example, replace_parts, targets
from locus.metrics import logit_difference
from locus.reads import gather
from locus.scores import Scores
from locus.sweeps import MAX_TOKENS, sweep, unchanged


@dataclass(frozen=True)
class FactLookup:
    """Fact lookup by path patching, in two steps:

    1. heads: the effect of each on the answer by its paths through later MLPs, but through no later attention:
       m(clean) - m(clean, z_h ← z_h(corrupted), later attention as in the clean run). The extraction heads are the
       `heads` with the largest |mean over facts|; R is the first of their layers.
    2. MLPs below layer R: m(clean) - m(clean, the residual stream entering R as it is when the MLP writes what it
       writes in the corrupted run and the attention between is as in the clean run). From R on, all is recomputed.

    MLPs from R on score 0: they come after the lookup. In units of the metric; `fact_lookup` gives the steps, and the
    layers that the paper would choose. Guo et al. 2024 (arXiv 2410.12949), §3 and appendix on manual localization.

    Attributes:
        heads: extraction heads; None for 10 (as in the paper) or one in 40 of those above layer 0, whichever is fewer.
            Those of layer 0 are not candidates, since no MLP is below.
        max_tokens: tokens in one forward pass at the most.
    """

    heads: int | None = None
    max_tokens: int = MAX_TOKENS
    KINDS: ClassVar[tuple[str, ...]] = ("mlp",)

    def __post_init__(self) -> None:
        if self.heads is not None and self.heads < 1:
            raise ValueError(f"fact lookup needs at least one extraction head, got heads={self.heads}")

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        heads = model.components("head")
        extracting = self.extraction(heads, self.head_effects(model, pairs, heads, metric, progress))
        return self.mlp_effects(model, pairs, components, min(c.layer for c in extracting), metric, progress)

    def head_effects(
        self, model: Any, pairs: Any, heads: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact head"]:
        """Step 1."""
        return self._sent(model, pairs, list(heads), model.cfg.n_layers, metric, progress)

    def extraction(self, heads: Components, effects: Float[Tensor, "fact head"]) -> tuple[Component, ...]:
        """The heads above layer 0 with the largest effects."""
        above = (heads.layers > 0).nonzero().flatten()
        if not len(above):
            raise ValueError("fact lookup needs a model of at least two layers: it ranks the MLPs below some heads")
        count = self.heads or min(10, max(1, len(above) // 40))
        order = effects.mean(0).abs().cpu()[above].argsort(descending=True, stable=True)
        return tuple(heads[i] for i in above[order[:count]].tolist())

    def mlp_effects(
        self, model: Any, pairs: Any, mlps: Components, receiver: int, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact mlp"]:
        """Step 2, for R = `receiver`."""
        below = [i for i, c in enumerate(mlps) if c.layer < receiver]
        found = self._sent(model, pairs, [mlps[i] for i in below], receiver, metric, progress)
        effects = found.new_zeros(len(pairs), len(mlps))
        effects[:, below] = found
        return effects

    def _sent(
        self, model: Any, pairs: Any, senders: list[Component], receiver: int, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact sender"]:
        """m(clean) - m(clean, sender as in the corrupted run, attention after it and below `receiver` as it was)."""
        chosen = Components(tuple(senders), torch.zeros(len(senders), dtype=torch.long), model.fingerprint)
        source = activations(model, pairs.corrupted, pairs.attention_mask, chosen)
        recorded = hooks.trace(model, pairs.clean, pairs.attention_mask)
        n, read, answers = len(pairs), pairs.read.to(model.device), targets(pairs)
        clean = metric(unchanged(recorded, read), answers)
        effects = clean.new_zeros(n, len(senders))

        def start(some: list[int]) -> hooks.Start:
            here = [senders[i] for i in some]
            edits = {site(here[0]): replace_parts(here, [True] * len(here), source[site(here[0])], n)}
            for layer in range(here[0].layer + 1, receiver):
                name = f"blocks.{layer}.hook_attn_out"
                edits[name] = _hold(recorded.site(name).repeat(len(some), 1, 1))
            return hooks.Start(torch.arange(n).repeat(len(some)), edits)

        layers = [c.layer for c in senders]
        label = f"path patching to layer {receiver}" if progress else None
        for some, logits in sweep(recorded, layers, start, read, max_tokens=self.max_tokens, progress=label):
            for i, cell_logits in zip(some, logits, strict=True):
                effects[:, i] = clean - metric(cell_logits, answers)
        return effects


@dataclass(frozen=True, eq=False)
class Lookup:
    """What `fact_lookup` found.

    Attributes:
        heads: direct effects of all heads on the answer.
        extraction: the heads with the largest of these.
        receiver: R, the first layer of these.
        mlps: effects of all MLPs on the residual stream entering R; 0 from R on.
        total: mean over the facts of m(clean) - m(corrupted).
    """

    heads: Scores
    extraction: tuple[Component, ...]
    receiver: int
    mlps: Scores
    total: float

    def layers(self, threshold: float = 0.02) -> tuple[int, ...]:
        """Layers whose |mean effect| is above a share of `total`: the paper's choice, which keeps negative ones too."""
        share = self.mlps.mean().abs() / abs(self.total)
        return tuple(c.layer for c, s in zip(self.mlps.components, share.tolist(), strict=True) if s > threshold)


def fact_lookup(
    model: Any,
    pairs: Any,
    method: FactLookup | None = None,
    *,
    metric: Callable = logit_difference,
    progress: bool = True,
) -> Lookup:
    """Both steps of `FactLookup`, and which layers they choose."""
    method, metric = method or FactLookup(), per_example(metric)
    heads, mlps = model.components("head"), model.components("mlp")
    effects = method.head_effects(model, pairs, heads, metric, progress)
    extraction = method.extraction(heads, effects)
    receiver = min(c.layer for c in extraction)
    lookups = method.mlp_effects(model, pairs, mlps, receiver, metric, progress)
    with torch.no_grad(), hooks.read_only(model, pairs.read.to(model.device)):
        of = [metric(model.logits(t, pairs.attention_mask), targets(pairs)) for t in (pairs.clean, pairs.corrupted)]
    name, facts = getattr(metric, "__name__", str(metric)), tuple(fact.prompt for fact in pairs.facts)
    return Lookup(
        Scores(effects, heads, method, name, facts),
        extraction,
        receiver,
        Scores(lookups, mlps, method, name, facts),
        float((of[0] - of[1]).mean()),
    )


@dataclass(frozen=True)
class Probing:
    """How much more readable a block makes the attribute in the subject's last token:

        log p(attribute | residual stream with what the block writes) - log p(attribute | without),    in nats

    p: logistic regression (L2, inverse strength `strength`, features standardized) over the first answer tokens of one
    relation, predicting subjects that it was not trained on (`folds`-fold). It is trained on clean and corrupted
    prompts, one a subject. A readout, not an intervention: positive says that the block adds what a probe can read,
    which the model may or may not use, and the metric plays no part. `probe_curve` gives accuracies.

    After Guo et al. 2024 (arXiv 2410.12949), who choose the MLPs of the layers in which the accuracy of such probes
    rises.

    Attributes:
        folds: at most; a class of two subjects is in two of them.
        strength: of scikit-learn's `LogisticRegression`, its C.
    """

    folds: int = 5
    strength: float = 1.0
    KINDS: ClassVar[tuple[str, ...]] = ("mlp", "attn")
    UNIT: ClassVar[str] = "nats that a probe gains"

    def __post_init__(self) -> None:
        if self.folds < 2 or not self.strength > 0:
            raise ValueError(
                f"probing needs at least 2 folds and a strength above 0, got folds={self.folds}, "
                f"strength={self.strength}"
            )

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        streams = subject_streams(model, pairs)
        needed = sorted({i for c in components for i in _stream(c)})
        read = {i: self.log_probabilities(pairs, streams[i]) for i in needed}
        columns = []
        for component in components:
            before, after = _stream(component)
            columns.append(read[after] - read[before])
        return torch.stack(columns, dim=1)

    def log_probabilities(self, pairs: Any, stream: Float[Tensor, "prompt d_model"]) -> Float[Tensor, " fact"]:
        """log p(attribute) of each fact by probes that did not see its subject, from `subject_streams`."""
        found = torch.full((len(pairs),), torch.nan, dtype=torch.float64)
        for rows, classes, facts, of in _relations(pairs):
            p = self._predicted(stream[rows].double().cpu().numpy(), classes)
            found[facts] = torch.as_tensor(np.log(p[of, classes[of]]))
        return found

    def _predicted(self, features: Float[np.ndarray, "row d"], classes: Any) -> Float[np.ndarray, "row class"]:
        # Each class's members in different folds, so that every probe has seen every class.
        fold = np.empty(len(classes), dtype=int)
        fold[np.argsort(classes, kind="stable")] = np.arange(len(classes)) % min(self.folds, len(classes))
        # Here, as its 20 MB are for no other method.
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import PredefinedSplit, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        probe = make_pipeline(StandardScaler(), LogisticRegression(C=self.strength, max_iter=2000))
        return cross_val_predict(probe, features, classes, cv=PredefinedSplit(fold), method="predict_proba")


def probe_curve(model: Any, pairs: Any, method: Probing | None = None) -> pd.DataFrame:
    """How well the attribute can be read from the subject's last token, layer by layer.

    Returns rows: layer, stream ("attn": the residual stream with what this layer's attention wrote, "mlp": with what
    its MLP wrote too; layer -1, "embed": before layer 0), accuracy (of held-out subjects), chance (the share of each
    relation's commonest attribute), log_probability (mean over facts, in nats), n (prompts).
    """
    method = method or Probing()
    rows = []
    for i, stream in enumerate(subject_streams(model, pairs)):
        right, usual, n = 0, 0, 0
        for prompts, classes, _, _ in _relations(pairs):
            p = method._predicted(stream[prompts].double().cpu().numpy(), classes)
            right += int((p.argmax(1) == classes).sum())
            usual += int(np.bincount(classes).max())
            n += len(classes)
        place = (-1, "embed") if i == 0 else ((i - 1) // 2, ("attn", "mlp")[(i - 1) % 2])
        mean = float(method.log_probabilities(pairs, stream).mean())
        rows.append((*place, right / n, usual / n, mean, n))
    return pd.DataFrame(rows, columns=["layer", "stream", "accuracy", "chance", "log_probability", "n"])


def subject_streams(model: Any, pairs: Any) -> list[Float[Tensor, "prompt d_model"]]:
    """The residual stream at the subject's last token of the clean, then of the corrupted prompts.

    Before layer 0, then after each block's attention and after its MLP (in parallel blocks, as if they came in turn).
    """
    names = ["blocks.0.hook_resid_pre"]
    for layer in range(model.cfg.n_layers):
        names += [f"blocks.{layer}.hook_mlp_out", f"blocks.{layer}.hook_resid_post"]
    at = last_subject(pairs)[:, None].to(model.device)
    parts = []
    for tokens in (pairs.clean, pairs.corrupted):
        found = hooks.states(model, tokens, pairs.attention_mask, names)
        parts.append({name: gather(act, at)[:, 0] for name, act in found.items()})
    stream = {name: torch.cat([part[name] for part in parts]) for name in names}
    streams = [stream[names[0]]]
    for written, after in zip(names[1::2], names[2::2], strict=True):
        streams += [stream[after] - stream[written], stream[after]]
    return streams


def _hold(activation: Tensor) -> hooks.Edit:
    return lambda _: activation


def _stream(component: Component) -> tuple[int, int]:
    """The numbers of the streams before and after a block writes."""
    before = 2 * component.layer + (component.kind == "mlp")
    return before, before + 1


def _relations(pairs: Any) -> list[tuple[list[int], Any, list[int], list[int]]]:
    """For each relation: prompts to probe, one a subject; their classes; its facts; and which prompt each fact is.

    Raises:
        ValueError: the attribute of some fact is no other subject's, so that no probe of it can be tested.
    """
    subjects = [
        tuple(row[at].tolist())
        for tokens in (pairs.clean, pairs.corrupted)
        for row, at in zip(tokens, pairs.subject, strict=True)
    ]
    tokens = torch.cat([pairs.answer[:, 0], pairs.distractor[:, 0]]).tolist()
    relations = [fact.relation for fact in pairs.facts] * 2
    groups, alone = [], []
    for relation in dict.fromkeys(relations):
        first: dict[tuple[int, ...], int] = {}
        for i, of in enumerate(relations):
            if of == relation:
                first.setdefault(subjects[i], i)
        labels = [tokens[i] for i in first.values()]
        shared = {subject: i for subject, i in first.items() if labels.count(tokens[i]) > 1}
        facts = [i for i, fact in enumerate(pairs.facts) if fact.relation == relation]
        alone += [pairs.facts[i].prompt for i in facts if subjects[i] not in shared]
        rows = list(shared.values())
        classes = np.unique([tokens[i] for i in rows], return_inverse=True)[1]
        if len(rows) and classes.max() == 0:
            raise ValueError(f"all subjects have the same {relation!r}: a probe needs two attributes to tell apart")
        places = {subject: place for place, subject in enumerate(shared)}
        groups.append((rows, classes, facts, [places.get(subjects[i], -1) for i in facts]))
    if alone:
        raise ValueError(
            f"{len(alone)} of {len(pairs)} facts have an attribute that no other subject has, so that no probe of it "
            f"can be tested (the first: {alone[0]!r}); take facts whose answers repeat, more of them, or FactLookup"
        )
    return groups
