"""A fact, and how it becomes tokens.

Tokens of prompt and answer are told apart by construction, or the fact is refused by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from locus.metrics import Batch

# Chat templates that print today's date would give other prompts, and other scores, every day.
CHAT_DATE = datetime(2024, 7, 26)


@dataclass(frozen=True)
class Fact:
    """One piece of knowledge: `prompt` + " " + `answer`, with other wordings of the prompt.

    wrong: answers of the same form that are not true, for the truth ratio (TOFU, CounterFact).
    chat_template: the prompt is a user's message and the answer begins the reply, rendered by the
    tokenizer's template.
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
                raise ValueError(f"{name} {text!r} of a fact must not be empty, nor begin or end with a space")
        if self.answer in self.wrong:
            raise ValueError(f"the answer {self.answer!r} is also among the wrong answers")


def encode(
    model: Any,
    facts: Sequence[Fact],
    *,
    prompts: Sequence[str] | None = None,
    answers: Sequence[str] | None = None,
    padding: str = "right",
) -> Batch:
    """Tokens of prompt + " " + answer for each fact, with its answer tokens marked.

    prompts, answers: one a fact, in the place of its own. <bos> is in front if the tokenizer puts it there
    by itself; <eos> is never there. A fact whose answer tokens cannot be told from its prompt's is refused
    by name.
    """
    prompts = [fact.prompt for fact in facts] if prompts is None else prompts
    answers = [fact.answer for fact in facts] if answers is None else answers
    if not len(facts) == len(prompts) == len(answers):
        raise ValueError(
            f"got {len(prompts)} prompts and {len(answers)} answers for {len(facts)} facts, not one a fact"
        )
    rows, starts = [], []
    for fact, prompt, answer in zip(facts, prompts, answers, strict=True):
        before, after = tokenize(model.tokenizer, replace(fact, prompt=prompt, answer=answer))
        rows.append(before + after)
        starts.append(len(before))
    if not rows:
        raise ValueError("there are no facts to encode: give at least one")
    cfg = getattr(model, "cfg", None)
    longest = max(range(len(rows)), key=lambda i: len(rows[i]))
    # Learned positions end somewhere; computed ones do not.
    if cfg is not None and cfg.positional_embedding_type == "standard" and len(rows[longest]) > cfg.n_ctx:
        raise ValueError(
            f"{prompts[longest]!r:.80} and its answer have {len(rows[longest])} tokens, and the model has "
            f"{cfg.n_ctx} positions: shorten it"
        )
    tokens, attention_mask, first = pad(rows, pad_id(model.tokenizer), padding)
    answer_mask = (torch.arange(tokens.shape[1]) >= (first + torch.tensor(starts))[:, None]) & attention_mask
    return Batch(*(tensor.to(model.device) for tensor in (tokens, attention_mask, answer_mask)))


def render(tokenizer: Any, fact: Fact) -> tuple[str, str]:
    """The text of the prompt, and what stands between it and the answer."""
    if not fact.chat_template:
        return fact.prompt, " "
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template: take facts with chat_template=False")
    template = re.sub(
        r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
        lambda call: repr(CHAT_DATE.strftime(call[2])),
        tokenizer.get_chat_template(),
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": fact.prompt}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        date_string=CHAT_DATE.strftime("%d %b %Y"),
    )
    return text, ""


def tokenize(tokenizer: Any, fact: Fact) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer."""
    text, space = render(tokenizer, fact)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text + space + fact.answer, add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise ValueError(
            f"the answer {fact.answer!r} cannot be told from the prompt {fact.prompt!r} in tokens: the "
            "tokenizer joins them where they meet; word the prompt another way"
        )
    # A chat template may hold the token that stands for unknown text, as a mark of its own.
    told = whole[len(prompt) :] if fact.chat_template else whole
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in told:
        raise ValueError(
            f"the tokenizer has no token for a part of {fact.prompt + space + fact.answer!r}: "
            "these facts are not for this model"
        )
    bos = tokenizer.bos_token_id
    by_itself = not fact.chat_template and bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    return [bos] * by_itself + prompt, whole[len(prompt) :]


def pad_id(tokenizer: Any) -> int:
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in ids if token is not None)


def pad(
    rows: Sequence[Sequence[int]], fill: int, padding: str
) -> tuple[Shaped[Tensor, "row pos"], Bool[Tensor, "row pos"], Int[Tensor, " row"]]:
    """Rows as one tensor, where it is not padding, and the position where each row begins."""
    if padding not in ("left", "right"):
        raise ValueError(f"padding must be 'left' or 'right', got {padding!r}")
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    first = width - lengths if padding == "left" else torch.zeros_like(lengths)
    place = torch.arange(width) - first[:, None]
    inside = (place >= 0) & (place < lengths[:, None])
    filled = torch.full(inside.shape, fill)
    filled[inside] = torch.tensor([value for row in rows for value in row])
    return filled, inside, first
