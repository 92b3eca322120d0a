"""Contrast pairs: clean and corrupted prompts that are aligned token by token."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locus.facts.tokens import Fact, pad, pad_id, render, tokenize


@dataclass(frozen=True, eq=False)
class ContrastPairs:
    """Aligned clean and corrupted prompts; the logits at `read` predict the answer tokens.

    answer, distractor: token ids at each read position, 0 where `read_mask` is False. subject: True at the
    tokens of the subject's name.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    attention_mask: Bool[Tensor, "pair pos"]
    read: Int[Tensor, "pair read"]
    answer: Int[Tensor, "pair read"]
    distractor: Int[Tensor, "pair read"]
    read_mask: Bool[Tensor, "pair read"]
    subject: Bool[Tensor, "pair pos"]
    facts: tuple[Fact, ...]

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, rows: int | slice | Int[Tensor, " row"]) -> "ContrastPairs":
        if isinstance(rows, int):
            rows = torch.tensor([range(len(self))[rows]])
        facts = self.facts[rows] if isinstance(rows, slice) else tuple(self.facts[i] for i in rows.tolist())
        tensors = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "facts"}
        return ContrastPairs(**tensors, facts=facts)


def contrast_pairs(
    model: Any, facts: Iterable[Fact], *, pool: Iterable[Fact] = (), seed: int = 0, padding: str = "right"
) -> ContrastPairs:
    """A clean and a corrupted prompt for each fact, aligned token by token.

    clean = prompt + all answer tokens but the last (teacher forced). corrupted = the same with the name of
    another subject of the same relation, drawn by `seed` from the facts and `pool`; that subject's own
    answer is the distractor. The two are equally long everywhere and differ in no token outside the
    subject; their answers have equally many tokens and differ in the first. Facts without such a partner
    are dropped and named; none left is an error.
    """
    facts = tuple(facts)
    pool = tuple(dict.fromkeys((*facts, *pool)))
    tokens = {fact: _tokenize(model.tokenizer, fact) for fact in pool}
    by_relation: dict[str, list[Fact]] = {}
    answers: dict[tuple[str, str], set[str]] = {}
    for fact in pool:
        by_relation.setdefault(fact.relation, []).append(fact)
        answers.setdefault((fact.subject, fact.relation), set()).add(fact.answer)
    generator = random.Random(f"pairs {seed}")
    kept, pairs, dropped = [], [], []
    for fact in facts:
        others = [other for other in by_relation[fact.relation] if other.subject != fact.subject]
        if not any(tokens[fact].subject):
            dropped.append(f"{fact.prompt!r} (does not name {fact.subject!r})")
            continue
        for other in generator.sample(others, len(others)):
            sole = len(answers[other.subject, other.relation]) == 1
            corrupted = _corrupt(model.tokenizer, fact, tokens[fact], other, tokens[other], sole)
            if corrupted:
                kept.append(fact)
                pairs.append((tokens[fact], corrupted, tokens[other].answer))
                break
        else:
            dropped.append(f"{fact.prompt!r} (none of {len(others)} other subjects fits)")
    if dropped:
        print(f"{len(dropped)} of {len(facts)} facts have no contrast pair: {'; '.join(dropped)}.")
    if not pairs:
        raise ValueError(
            f"none of {len(facts)} facts has a contrast pair: each needs another subject of its relation "
            "with as many tokens in subject, prompt and answer, and another first answer token; give more "
            "facts of the same wording"
        )
    return _stack(model, tuple(kept), pairs, padding)


def _tokenize(tokenizer: Any, fact: Fact) -> "_Tokenized":
    """The tokens of a fact, and which of its prompt's are the subject's (none when it is not named)."""
    prompt, answer = tokenize(tokenizer, fact)
    text, _ = render(tokenizer, fact)
    spans = [found.span() for found in named(fact.subject).finditer(text)]
    if not tokenizer.is_fast:
        raise ValueError("contrast pairs need a fast tokenizer, which tells where in the text each token is")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [any(max(a, start) < min(b, end) for start, end in spans) for a, b in offsets]
    return _Tokenized(prompt, answer, [False] * (len(prompt) - len(inside)) + inside)


class _Tokenized(NamedTuple):
    prompt: list[int]
    answer: list[int]
    subject: list[bool]


def named(subject: str) -> re.Pattern[str]:
    """Finds the subject as whole words."""
    return re.compile(rf"(?<!\w){re.escape(subject)}(?!\w)")


def _corrupt(tokenizer: Any, fact: Fact, clean: _Tokenized, partner: Fact, theirs: _Tokenized, sole: bool) -> list[int]:
    """The prompt of `fact` with the subject of `partner`, as tokens; [] when the two do not align.

    sole: the partner has one answer in this relation, so it answers any wording of it.
    """
    if len(theirs.answer) != len(clean.answer) or theirs.answer[0] == clean.answer[0]:
        return []
    prompt = named(fact.subject).sub(lambda _: partner.subject, fact.prompt)
    if not sole and prompt != partner.prompt:
        return []
    other = _tokenize(tokenizer, replace(fact, subject=partner.subject, prompt=prompt))
    # A token that differs outside the subject ("a" and "an") would be patched along with it.
    same = all(inside or a == b for a, b, inside in zip(clean.prompt, other.prompt, clean.subject, strict=False))
    return other.prompt if same and other.subject == clean.subject and other.answer == clean.answer else []


def _stack(
    model: Any,
    facts: tuple[Fact, ...],
    pairs: Sequence[tuple[_Tokenized, list[int], list[int]]],
    padding: str,
) -> ContrastPairs:
    fill = pad_id(model.tokenizer)
    clean, attention_mask, offset = pad([c.prompt + c.answer[:-1] for c, _, _ in pairs], fill, padding)
    corrupted, _, _ = pad([prompt + c.answer[:-1] for c, prompt, _ in pairs], fill, padding)
    answer, read_mask, _ = pad([c.answer for c, _, _ in pairs], 0, "right")
    distractor, _, _ = pad([theirs for _, _, theirs in pairs], 0, "right")
    subject, _, _ = pad([[*c.subject, *[False] * (len(c.answer) - 1)] for c, _, _ in pairs], False, padding)
    first = offset + torch.tensor([len(c.prompt) - 1 for c, _, _ in pairs])
    read = (first[:, None] + torch.arange(answer.shape[1])) * read_mask
    device = model.device
    return ContrastPairs(
        clean=clean.to(device),
        corrupted=corrupted.to(device),
        attention_mask=attention_mask.to(device),
        read=read.to(device),
        answer=answer.to(device),
        distractor=distractor.to(device),
        read_mask=read_mask.to(device),
        subject=subject.to(device),
        facts=facts,
    )
