"""Facts in order: which of them a model knows, and how they are split."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from locus import metrics
from locus.facts.pairs import ContrastPairs, contrast_pairs
from locus.facts.tokens import Fact, encode

_ROWS = 64


class Facts(tuple[Fact, ...]):
    """Facts in order, with a name for tables. `pool`: where contrast pairs find their other subjects."""

    name: str
    pool: tuple[Fact, ...]

    def __new__(cls, facts: Iterable[Fact] = (), *, name: str = "facts", pool: Iterable[Fact] = ()) -> "Facts":
        self = super().__new__(cls, facts)
        self.name, self.pool = name, tuple(pool)
        return self

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return self._of(found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        return f"Facts({self.name}: {len(self)} facts of {len({f.subject for f in self})} subjects)"

    def _of(self, facts: Iterable[Fact]) -> "Facts":
        return Facts(facts, name=self.name, pool=self.pool)

    def known_by(self, model: Any, *, quiet: bool = False) -> "Facts":
        """The facts that the model knows; prints how many were dropped.

        Known = the whole answer is greedily right; above 8 tokens, extraction strength ≥ 0.9.
        """
        known: list[Fact] = []
        for start in range(0, len(self), _ROWS):
            facts = self[start : start + _ROWS]
            batch = encode(model, facts)
            with torch.no_grad():
                correct = metrics.answer_correct(model.logits(batch.tokens, batch.attention_mask), batch)
            strength = metrics.extraction_strength(correct, batch.answer_mask)
            enough = torch.where(batch.answer_mask.sum(-1) > 8, 0.9, 1.0)
            known += [fact for fact, ok in zip(facts, (strength >= enough).tolist(), strict=True) if ok]
        if not quiet:
            name = getattr(model, "name", "the model")
            print(f"{self.name}: {name} knows {len(known)} of {len(self)}; {len(self) - len(known)} dropped.")
        return self._of(known)

    def split(
        self,
        forget: int = 16,
        seed: int = 0,
        *,
        holdout: int | None = None,
        other: "Facts | None" = None,
        other_relations: Sequence[str] = (),
    ) -> "FactSplit":
        """Split by subject, drawn by `seed`, so that no subject is in two of forget, retain and holdout.

        forget: number of facts, all those of one subject after another (what is left of the last one is in
        no part). holdout: number of facts never in any loss, by default half of all others. other: facts of
        other relations that are only measured; those of `other_relations` in here are added. No subject of
        forget or retain is in other.
        """
        main = [fact for fact in self if fact.relation not in other_relations]
        subjects = sorted({fact.subject for fact in main})
        random.Random(f"split {seed}").shuffle(subjects)
        by_subject: dict[str, list[Fact]] = {}
        for fact in main:
            by_subject.setdefault(fact.subject, []).append(fact)
        parts: list[list[Fact]] = []
        counts = [forget, (len(main) - forget) // 2 if holdout is None else holdout]
        left = iter(subjects)
        for count in counts:
            part: list[Fact] = []
            while len(part) < count and (subject := next(left, None)) is not None:
                part += by_subject[subject]
            parts.append(part[:count])
        retain = [fact for subject in left for fact in by_subject[subject]]
        if min(counts) < 1 or not retain or [len(part) for part in parts] != counts:
            raise ValueError(
                f"cannot split {len(main)} facts of {len(subjects)} subjects ({self.name}) into {counts[0]} "
                f"to forget, {counts[1]} held out and at least 1 to retain, each with subjects of its own: "
                "forget fewer, or give more facts"
            )
        taken = {fact.subject for part in (parts[0], retain) for fact in part}
        relations = {fact.relation for fact in main}
        if other is not None and (shared := relations & {fact.relation for fact in other}):
            raise ValueError(f"`other` must have other relations than the facts themselves, both have {sorted(shared)}")
        apart = [fact for fact in (*self, *(other or ())) if fact.relation not in relations]
        pool = self.pool or self
        named = other.name if other else self.name
        return FactSplit(
            forget=Facts(parts[0], name=self.name, pool=pool),
            retain=Facts(retain, name=self.name, pool=pool),
            holdout=Facts(parts[1], name=self.name, pool=pool),
            other=Facts([fact for fact in apart if fact.subject not in taken], name=named),
            seed=seed,
        )

    def contrast_pairs(self, model: Any, *, seed: int = 0, padding: str = "right") -> ContrastPairs:
        """A clean and an aligned corrupted prompt for each fact (see `pairs.contrast_pairs`).

        Other subjects come from these facts, or, in a part of a split, from all facts that were split.
        """
        pairs = contrast_pairs(model, self, pool=self.pool, seed=seed, padding=padding)
        return replace(pairs, facts=self._of(pairs.facts))


@dataclass(frozen=True)
class FactSplit:
    """Facts disjoint by subject, but that holdout and other may share subjects: see `Facts.split`.

    forget: to be unlearned. retain: in the retain loss. holdout: the same relations, never in any loss.
    other: other relations, never in any loss.
    """

    forget: Facts
    retain: Facts
    holdout: Facts
    other: Facts
    seed: int
