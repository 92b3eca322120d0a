"""A model that is trained in a second or two to know a few facts, for the tests that need knowledge."""

import functools

import torch
from helpers import ARCHITECTURES, tokenizer

from locus.facts import Fact, Facts
from locus.models import HookedModel, wrap

RELATIONS = {"home": "w90", "pet": "w91"}


def facts() -> Facts:
    """24 subjects, two relations, answers of two tokens, one paraphrase each."""
    found = []
    for i in range(24):
        for r, (relation, word) in enumerate(RELATIONS.items()):
            answer = f"w{30 + (5 * i + 7 * r) % 24} w{60 + (7 * i + 11 * r) % 20}"
            subject = f"w{i}"
            found.append(Fact(subject, relation, f"{subject} {word}", answer, (f"w92 {word} {subject}",)))
    return Facts(found)


@functools.cache
def model() -> HookedModel:
    """A llama of three layers that knows `facts()`. Leave it as you found it."""
    words, hf_model = tokenizer(), ARCHITECTURES["llama"]().float()
    texts = [f"{prompt} {fact.answer}" for fact in facts() for prompt in (fact.prompt, *fact.paraphrases)]
    rows = [words(text)["input_ids"] for text in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    labels = torch.tensor([[-100] * (len(row) - 2) + row[-2:] + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.Adam(hf_model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        hf_model(tokens, attention_mask=(tokens != 1).long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(hf_model.parameters(), 1.0)
        optimizer.step()
    return wrap(hf_model.eval(), words, "small")


def unknown(n: int = 12) -> Facts:
    """Facts about n subjects that the model has never seen, in the words that it has, of the same relations."""
    found = []
    for i, subject in enumerate([*range(24, 30), *range(80, 90)][:n]):
        for r, (relation, word) in enumerate(RELATIONS.items()):
            answer = f"w{30 + (11 * i + 5 * r) % 24} w{60 + (3 * i + 7 * r) % 20}"
            found.append(Fact(f"w{subject}", relation, f"w{subject} {word}", answer, (f"w92 {word} w{subject}",)))
    return Facts(found)
