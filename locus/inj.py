"""INJ: does a localizer find where a sentence was just written into a model?

For each sentence apart, a random r% of all value vectors is trained on it until it is known by heart, so that the place
is certain; then each localizer is asked for the place (Chang, Thomason & Jia, NAACL 2024, arXiv 2311.09060, §3).

Left out: DEL, their second benchmark (what a model memorized in pretraining).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locus.components import Components
from locus.evaluate import interval, score
from locus.facts import ContrastPairs, Fact, Facts, FactSplit, biographies, encode
from locus.folder import enter
from locus.localize import Method, localize, require_kinds
from locus.masks import Mask
from locus.metrics import log_probability
from locus.models import HookedModel
from locus.plans import named
from locus.progress import Progress
from locus.require import COUNT, NUMBER, POSITIVE, SHARE, require, require_objects, some
from locus.unlearn import AdamW, NextToken, Update, unlearn


def sentences(model: HookedModel, n: int = 20, *, seed: int = 0) -> Facts:
    """n sentences that a model does not know, about as many invented people: the relations of `biographies` in turns.

    Each has a contrast sentence, about another person in the same words and in as many tokens; facts without one are
    passed over.
    """
    require(COUNT, n=n)
    require(NUMBER, seed=seed)
    pool = biographies(max(80, 4 * n), seed, draw=1)
    relations = list(dict.fromkeys(fact.relation for fact in pool))
    people = list(dict.fromkeys(fact.subject for fact in pool))
    wanted = {person: relations[i % len(relations)] for i, person in enumerate(people)}
    candidates = Facts([fact for fact in pool if wanted[fact.subject] == fact.relation], name=pool.name, pool=pool)
    found = candidates.contrast_pairs(model, seed=seed).facts[:n]
    if len(found) < n:
        raise ValueError(
            f"only {len(found)} of {len(candidates)} sentences have a contrast sentence, {n} are asked for"
        )
    return Facts(found, name=pool.name, pool=pool)


def inj(
    model: HookedModel,
    facts: Facts,
    localizers: Sequence[Any],
    *,
    r: float = 0.01,
    ks: Sequence[float] | None = None,
    lr: float | None = None,
    loss: float | None = None,
    steps: int = 200,
    metric: Callable = log_probability,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Recall of each localizer, for each sentence: the share of the trained value vectors that it puts among its top k.

    Each sentence i, prompt and answer of a fact, is learned alone, in a random r of all value vectors (drawn with
    `seed` + i), with the next-token loss on all words but the first, until the loss is below `loss`. Then

        Recall@k = |G ∩ P| / |G|,    G the trained vectors, P the k with the highest scores

    of every layer (scope "layer") or of the model (scope "global"), scored by `metric` on the same tokens. A score is
    signed: positive = removing the vector makes the sentence less likely.

    facts: sentences with a subject and, among the facts or their `pool`, another one of the relation that aligns with
        it token by token: the contrast sentence.
    ks: shares of the vectors that count as found; default r, 2r and 5r, as far as there are so many.
    lr: of Adam; default as in the paper, 0.01, or 0.05 for r below 1%.   steps: at most.
    loss: in nats; default as in the paper, 0.05, or 0.3 for models of a width below 512. Values cannot lower it without
        end: the final norm bounds the logits, and on tiny the best of all residual streams leaves up to 0.27.
    out: a run folder, where finished sentences are kept; the same call goes on there.

    Returns rows: model, sentence, subject, localizer, scope, k, n = |G|, recall, chance (Recall@k of random scores),
        steps, loss (reached), status ("finished", or "not learned" where the loss was not), seed.
    """
    require(SHARE, r=r)
    ks = tuple(k for k in (r, 2 * r, 5 * r) if k <= 1) if ks is None else ks
    lr = (0.01 if r >= 0.01 else 0.05) if lr is None else lr
    loss = (0.05 if model.cfg.d_model >= 512 else 0.3) if loss is None else loss
    _require(localizers, ks, lr, loss, steps, seed)
    ks = tuple(dict.fromkeys(ks))
    pairs = facts.contrast_pairs(model, seed=seed)
    settings: dict[str, Any] = {"r": r, "ks": list(ks), "lr": lr, "loss": loss, "steps": steps, "seed": seed}
    settings |= {"model": model.fingerprint, "metric": getattr(metric, "__name__", str(metric))}
    settings |= {"localizers": [repr(method) for method in localizers]}
    settings |= {"sentences": [list(dataclasses.astuple(fact)) for fact in pairs.facts]}
    settings |= {"contrast": pairs.corrupted.tolist()}
    bar = Progress(len(pairs), enabled=progress)
    folder = enter(Path(out), settings, {"settings": settings}, bar.say) if out else None
    rows: list[dict[str, Any]] = []
    try:
        bar.stage("writing sentences and looking for them")
        for i, fact in enumerate(pairs.facts):
            made = folder.load(f"sentence{i}.json") if folder else None
            if made is None:
                place = Mask.random(model.components("value"), budget=r, seed=seed + i)
                update, reached = write_sentence(model, fact, place, lr=lr, loss=loss, steps=steps, seed=seed + i)
                whole = whole_sentence(model, pairs[i : i + 1])
                with update.applied(model):
                    found = [
                        {"localizer": name, **row}
                        for name, method in named(localizers).items()
                        for row in _recalls(model, whole, method, place, metric, ks)
                    ]
                status = update.status if update.status != "finished" or reached < loss else "not learned"
                made = {"rows": found, "steps": len(update.history) - 1, "loss": reached, "status": status}
                if folder:
                    folder.save(f"sentence{i}.json", made)
                bar.done(fact.subject)
            else:
                bar.extend(-1)
            common = {"model": model.name, "sentence": i, "subject": fact.subject}
            measured = {name: made[name] for name in ("steps", "loss", "status")}
            rows += [common | row | measured | {"seed": seed} for row in made["rows"]]
    finally:
        bar.close()
    return pd.DataFrame(rows)


def write_sentence(
    model: HookedModel,
    fact: Fact,
    place: Mask,
    *,
    lr: float = 0.01,
    loss: float = 0.05,
    steps: int = 200,
    seed: int = 0,
) -> tuple[Update, float]:
    """Train a place on one sentence until its next-token loss, in nats, is below `loss`; and the loss it reached."""
    text = _sentence(fact)
    batch = encode(model, [text])
    reached = [float("nan")]

    def enough(step: int) -> bool:
        reached.append(-float(score(model, batch).log_probability))
        return reached[-1] < loss

    update = unlearn(
        model,
        FactSplit(forget=Facts([text]), retain=Facts(), holdout=Facts(), other=Facts(), seed=seed),
        place,
        NextToken(),
        optimizer=AdamW(lr=lr),
        steps=steps,
        seed=seed,
        floor=None,
        checkpoints=range(1, steps + 1),
        callback=enough,
    )
    return update, reached[-1]


def whole_sentence(model: HookedModel, pair: ContrastPairs) -> ContrastPairs:
    """The same clean and corrupted prompts of one fact, read at every token that `write_sentence` trains on.

    The distractor is the contrast sentence's token, where the two differ and where they do not.
    """
    batch = encode(model, [_sentence(fact) for fact in pair.facts])
    read, targets = batch.reads()
    at = read + 1
    # The answer's tokens come from the other subject's own answer, the prompt's from the corrupted prompt.
    contrast = torch.cat([pair.corrupted, pair.corrupted[:, :1]], dim=1)
    contrast[:, pair.read[0] + 1] = pair.distractor
    return replace(
        pair,
        read=read,
        answer=targets.answer,
        distractor=contrast.gather(1, at),
        read_mask=targets.mask,
    )


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Recall averaged over sentences: localizer, scope, k, n (sentences), learned, recall, low, high, chance.

    learned: how many of the n were learned; the recall of the others, averaged too, is of a place where they are not.
    low, high: 95% interval of the mean, cut to [0, 1].
    """
    rows = []
    for (name, scope, k), group in table.groupby(["localizer", "scope", "k"], sort=False):
        low, high = interval(torch.tensor(group.recall.to_numpy(), dtype=torch.float64))
        learned, recall, chance = (group.status == "finished").sum(), group.recall.mean(), group.chance.mean()
        rows.append((name, scope, k, len(group), learned, recall, low, high, chance))
    table = pd.DataFrame(rows, columns="localizer scope k n learned recall low high chance".split())
    return table.assign(low=table.low.clip(0, 1), high=table.high.clip(0, 1))


def top_share(
    values: Float[Tensor, " component"], components: Components, k: float, scope: str
) -> Bool[Tensor, " component"]:
    """The share k of the components with the highest values, of every layer or of all ("global"); at least one."""
    chosen = torch.zeros(len(components), dtype=torch.bool)
    layers = components.layers if scope == "layer" else torch.zeros(len(components))
    for layer in layers.unique():
        members = (layers == layer).nonzero().flatten()
        best = values[members].argsort(descending=True, stable=True)
        chosen[members[best[: max(1, round(k * len(members)))]]] = True
    return chosen


def _require(localizers: Sequence[Any], ks: Sequence[float], lr: float, loss: float, steps: int, seed: int) -> None:
    require_objects(Method, "AttributionPatching()", localizers=localizers)
    if not localizers:
        raise ValueError("INJ ranks localizers and got none; give a tuple, like (AttributionPatching(), Random()).")
    for method in localizers:
        require_kinds(method, ["value"])
    named(localizers)
    require(some(SHARE, "a tuple of shares in (0, 1], like (0.01, 0.05)"), ks=ks)
    require(POSITIVE, lr=lr, loss=loss)
    require(COUNT, steps=steps)
    require(NUMBER, seed=seed)


def _sentence(fact: Fact) -> Fact:
    """The whole sentence as a fact: its first word is the prompt, the rest the answer."""
    if fact.chat_template:
        raise ValueError(f"{fact.prompt!r} is a chat message; INJ writes sentences: give facts without a chat template")
    first, rest = f"{fact.prompt} {fact.answer}".split(" ", 1)
    return Fact(fact.subject, fact.relation, first, rest)


def _recalls(
    model: HookedModel, pair: ContrastPairs, method: Any, place: Mask, metric: Callable, ks: Sequence[float]
) -> list[dict[str, Any]]:
    scores = localize(model, pair, method, components=place.components, metric=metric, progress=False).mean()
    rows = []
    for scope in ("layer", "global"):
        for k in ks:
            found = top_share(scores, place.components, k, scope)
            recall = float((found & place.selected).sum() / place.selected.sum())
            row = {"scope": scope, "k": k, "n": len(place), "recall": recall, "chance": float(found.float().mean())}
            rows.append(row)
    return rows
