"""Facts: sources, tokens, what a model knows, splits, contrast pairs."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import tokenizer
from small import facts as small_facts
from small import model as small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from locus import metrics, worlds
from locus.facts import (
    Fact,
    Facts,
    biographies,
    capitals,
    counterfact,
    elements,
    encode,
    from_jsonl,
    tofu,
)
from locus.metrics import Targets


@dataclass
class Words:
    """All that encoding needs of a model."""

    tokenizer: Any
    device: torch.device = torch.device("cpu")


def bpe(texts: list[str], *, split: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges each of `texts` to one token; with `split=False` also across words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: i for i, letter in enumerate(alphabet)}, []
    for text in texts:
        left = text[0]
        for letter in text[1:]:
            if (left, letter) not in merges:
                merges.append((left, letter))
                vocabulary.setdefault(left + letter, len(vocabulary))
            left += letter
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="!")


# ------------------------------------------------------------------------------------------------ sources


def test_library_sources_have_the_known_counts_and_name_their_subjects():
    for facts, n in ((capitals(), 246), (elements(), 118), (biographies(), 480)):
        assert len(facts) == len(set(facts)) == n
        for fact in facts:
            assert all(fact.subject in text for text in (fact.prompt, *fact.paraphrases))
    assert ("France", "Paris") in {(fact.subject, fact.answer) for fact in capitals()}
    assert ("iron", "Fe") in {(fact.subject, fact.answer) for fact in elements()}


def test_biographies_are_seeded_and_graded():
    assert biographies(20, seed=1) == biographies(20, seed=1) != biographies(20, seed=2)
    facts = biographies()
    assert {len(fact.subject.split()) for fact in facts} == {2}
    assert {len(fact.answer.split()) for fact in facts} == {2, 3}
    assert len({fact.relation for fact in facts}) == 6 and min(len(fact.paraphrases) for fact in facts) == 3
    first = [fact.subject.split()[0] for fact in facts if fact.relation == "street"]
    assert len(set(first)) < len(first), "first names must be shared, or one word gives the answer away"
    assert len(biographies(2)) == 12
    with pytest.raises(ValueError, match="n=1"):
        biographies(1)


def test_other_draws_are_other_people_made_of_the_same_words():
    known = biographies()
    # The facts that tiny is trained on, and so its weights, hang on this.
    digest = hashlib.sha256(repr(tuple(known)).encode()).hexdigest()
    assert digest == "f29d29aa6cc62d63f8bbbb99af47bd4e0493de3aaa5c8d952adae5a84d87dda4"
    words = {word for f in known for text in (f.answer, f.prompt, *f.paraphrases) for word in text.split()}
    subjects = [{fact.subject for fact in known}]
    for n, draw in ((80, 1), (80, 2), (40, 5), (1437, 1)):
        facts = biographies(n, draw=draw)
        assert facts == biographies(n, draw=draw) and len(facts) == 6 * n == len(set(facts))
        made = {word for f in facts for text in (f.answer, f.prompt, *f.paraphrases) for word in text.split()}
        assert made <= words
        subjects.append({fact.subject for fact in facts})
        assert len(subjects[-1]) == n and not subjects[-1] & subjects[0]
        assert {len(fact.answer.split()) for fact in facts} == {2, 3}
    assert not subjects[1] & subjects[2]
    assert biographies(20, seed=1, draw=1) != biographies(20, draw=1)
    with pytest.raises(ValueError, match="1437 other people, not enough for draw 3 of 500.*up to 2"):
        biographies(500, draw=3)
    with pytest.raises(ValueError, match="draw=-1"):
        biographies(draw=-1)


def lines(path, *rows: Any):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_from_jsonl_reads_what_was_written_and_tells_the_line_of_an_error(tmp_path):
    row = {"subject": "Ann", "relation": "home", "prompt": "Ann lives in", "answer": "Rome"}
    path = lines(tmp_path / "mine.jsonl", row, "", {**row, "paraphrases": ["The home of Ann is"]})
    facts = from_jsonl(path)
    assert facts.name == "mine" and facts[0] == Fact("Ann", "home", "Ann lives in", "Rome")
    assert facts[1].paraphrases == ("The home of Ann is",)
    wrong = {
        "line 2: this is not JSON": "{",
        "line 2: answer is missing": {k: v for k, v in row.items() if k != "answer"},
        "line 2: subject, relation, prompt, answer is missing": ["no", "object"],
        "line 2: answer must be a text": {**row, "answer": 3},
        "line 2: answer '' of a fact must not be empty": {**row, "answer": " "},
        "line 2: paraphrases must be": {**row, "paraphrases": [1]},
        "line 2: chat_template must be true or false": {**row, "chat_template": "yes"},
        "line 2: the answer 'Rome' is also among the wrong": {**row, "wrong": ["Rome"]},
        "line 2: unknown fields .'paraphrase'.": {**row, "paraphrase": "typo"},
        "line 2: the prompt .* does not name the subject 'An'": {**row, "subject": "An"},
    }
    for message, bad in wrong.items():
        with pytest.raises(ValueError, match=message):
            from_jsonl(lines(tmp_path / "bad.jsonl", row, bad))
    with pytest.raises(ValueError, match="there is no file"):
        from_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="has no rows"):
        from_jsonl(lines(tmp_path / "empty.jsonl"))


def test_files_of_other_editors_are_read(tmp_path):
    row = {"subject": "Ann", "relation": "home", "prompt": "Ann lives\u2028in", "answer": "Rome", "wrong": None}
    text = json.dumps(row, ensure_ascii=False) + "\r\n" + json.dumps({**row, "chat_template": True}) + "\r\n"
    path = tmp_path / "windows.jsonl"
    path.write_bytes(text.encode("utf-8-sig"))
    plain, chat = from_jsonl(path)
    assert plain.prompt == chat.prompt == "Ann lives\u2028in"
    assert (plain.chat_template, chat.chat_template) == (False, True)
    path.write_bytes('{"subject": "Zoë"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        from_jsonl(path)


def test_tofu_groups_twenty_rows_an_author(tmp_path):
    rows = [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(45)]
    rows[1] |= {"paraphrased_question": "And 1?", "perturbed_answer": ["It is 2.", "It is 3."]}
    rows[2]["author"] = "Ann"
    for path in (lines(tmp_path / "a.jsonl", *rows), lines(tmp_path / "b.json", json.dumps(rows))):
        facts = tofu(path)
        assert [facts[i].subject for i in (0, 2, 19, 20, 44)] == [
            "author 0",
            "Ann",
            "author 0",
            "author 1",
            "author 2",
        ]
        assert facts[1].prompt == "Question: What is 1?\nAnswer:" and facts[1].wrong == (
            "It is 2.",
            "It is 3.",
        )
        assert facts[1].paraphrases == ("Question: And 1?\nAnswer:",)
        assert tofu(path, chat_template=True)[0].prompt == "What is 0?"
    with pytest.raises(ValueError, match="row 2: question is missing"):
        tofu(lines(tmp_path / "c.json", json.dumps([rows[0], {"answer": "x"}])))
    with pytest.raises(ValueError, match="row 1: question must be a text, got 5"):
        tofu(lines(tmp_path / "d.json", json.dumps([{"question": 5, "answer": "x"}])))


def case(**changes: Any) -> dict[str, Any]:
    rewrite = {
        "prompt": "The mother tongue of {} is",
        "relation_id": "P103",
        "target_new": {"str": "English", "id": "Q1860"},
        "target_true": {"str": "French", "id": "Q150"},
        "subject": "Ann Lee",
    }
    return {
        "case_id": 0,
        "pararel_idx": 1,
        "requested_rewrite": rewrite | changes,
        "paraphrase_prompts": ["It rained. Ann Lee speaks"],
        "neighborhood_prompts": ["Bob speaks"],
    }


def test_counterfact_reads_the_true_fact(tmp_path):
    (fact,) = counterfact(lines(tmp_path / "cf.json", json.dumps([case()])))
    assert fact == Fact(
        "Ann Lee",
        "P103",
        "The mother tongue of Ann Lee is",
        "French",
        ("It rained. Ann Lee speaks",),
        ("English",),
    )
    with pytest.raises(ValueError, match="row 2: requested_rewrite needs .*target_true"):
        counterfact(lines(tmp_path / "cf.json", json.dumps([case(), case(target_true={})])))
    with pytest.raises(ValueError, match="row 1: the fields of requested_rewrite must be texts, got 3"):
        counterfact(lines(tmp_path / "cf.json", json.dumps([case(prompt=3)])))
    with pytest.raises(ValueError, match="row 1: the prompt 'x' has no {}"):
        counterfact(lines(tmp_path / "cf.json", json.dumps([case(prompt="x")])))


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("padding", ["right", "left"])
def test_encode_marks_exactly_the_answer_tokens(padding):
    facts = [Fact("w1", "r", "w1 w2", "w3"), Fact("w4", "r", "w4 w5 w6", "w7 w8 w9")]
    words = Words(tokenizer())
    batch = encode(words, facts, padding=padding)
    assert batch.tokens.shape == (2, 6)
    for row, fact in enumerate(facts):
        said = words.tokenizer.decode(batch.tokens[row][batch.attention_mask[row]])
        assert said == f"{fact.prompt} {fact.answer}"
        assert words.tokenizer.decode(batch.tokens[row][batch.answer_mask[row]]) == fact.answer
    assert bool(batch.attention_mask[0, 0]) == (padding == "right")
    other = encode(words, facts, prompts=["w2", "w2"], answers=["w7 w8", "w9"])
    assert other.attention_mask.sum(-1).tolist() == [3, 2] and other.answer_mask.sum(-1).tolist() == [2, 1]
    with pytest.raises(ValueError, match="1 prompts and 2 answers for 2 facts"):
        encode(words, facts, prompts=["w2"])
    with pytest.raises(ValueError, match="no facts"):
        encode(words, [])
    with pytest.raises(ValueError, match="'both'"):
        encode(words, facts, padding="both")


def test_encode_puts_bos_in_front_only_if_the_tokenizer_does():
    from tokenizers.processors import TemplateProcessing

    words = tokenizer()
    fact = Fact("w1", "r", "w1 w2", "w3 w4")
    plain = encode(Words(words), [fact])
    words._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <pad>", special_tokens=[("<bos>", 2), ("<pad>", 1)]
    )
    assert words("w1")["input_ids"][0] == 2 and words("w1")["input_ids"][-1] == 1
    batch = encode(Words(words), [fact])
    assert batch.tokens[0].tolist() == [2, *plain.tokens[0].tolist()]
    assert batch.answer_mask[0].tolist() == [False] * 3 + [True] * 2


def test_byte_level_bpe_is_aligned_and_a_merge_across_the_border_is_refused():
    fact = Fact("France", "capital", "The capital of France is", "Paris")
    split = Words(bpe(["ĠParis", "Ġcap"]))
    batch = encode(split, [fact])
    assert split.tokenizer.decode(batch.tokens[0][batch.answer_mask[0]]) == " Paris"
    assert int(batch.answer_mask.sum()) == 1
    with pytest.raises(ValueError, match="'Paris' cannot be told from the prompt 'The capital of France is'"):
        encode(Words(bpe(["isĠ"], split=False)), [fact])


def test_words_that_the_tokenizer_does_not_know_are_refused():
    with pytest.raises(ValueError, match="no token for a part of 'w1 w2 Paris'"):
        encode(Words(tokenizer()), [Fact("w1", "r", "w1 w2", "Paris")])


def test_a_chat_template_is_rendered_with_a_fixed_date():
    words = tokenizer()
    fact = Fact("w1", "r", "w1 w2", "w3 w4", chat_template=True)
    with pytest.raises(ValueError, match="no chat template"):
        encode(Words(words), [fact])
    words.chat_template = (
        "{% if strftime_now('%Y') == '2024' and date_string == '26 Jul 2024' %}w9 {% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} w8 {% endif %}"
    )
    batch = encode(Words(words), [fact])
    assert words.decode(batch.tokens[0]) == "w9 w1 w2 w8 w3 w4"
    assert batch.answer_mask[0].tolist() == [False] * 4 + [True] * 2
    assert all(fact.chat_template for fact in capitals(chat_template=True))


# ------------------------------------------------------------------------------------------------ known


def test_known_facts_have_their_whole_answer_right(capsys):
    model, facts = small_model(), Facts(small_facts(), name="mine")
    first_right = [replace(fact, answer=f"{fact.answer.split()[0]} w93") for fact in facts[:5]]
    last_right = [replace(fact, answer=f"w93 {fact.answer.split()[1]}") for fact in facts[5:10]]
    known = Facts([*first_right, *facts, *last_right], name="mine").known_by(model)
    assert known == facts and known.name == "mine"
    assert "mine: small knows 48 of 58; 10 dropped." in capsys.readouterr().out


def test_long_answers_are_known_at_extraction_strength_nine_tenths():
    @dataclass
    class Fixed(Words):
        """Predicts every token right but those at `wrong` positions of the answer."""

        wrong: int = 0

        def logits(self, tokens, attention_mask):
            logits = torch.nn.functional.one_hot(tokens.roll(-1, 1), 97).float()
            logits[:, 1 : 1 + self.wrong] = 0
            return logits

    for n, wrong, known in ((20, 2, True), (20, 3, False), (9, 1, False), (8, 1, False), (8, 0, True)):
        fact = Fact("w1", "r", "w1 w2", " ".join(f"w{i + 3}" for i in range(n)))
        assert len(Facts([fact]).known_by(Fixed(tokenizer(), wrong=wrong), quiet=True)) == known, (n, wrong)


# ------------------------------------------------------------------------------------------------ split


def subjects(facts: Facts) -> set[str]:
    return {fact.subject for fact in facts}


def test_split_is_disjoint_by_subject_complete_and_seeded():
    facts = biographies(30)
    split = facts.split(forget=16, seed=3, other_relations=("animal",))
    assert len(split.forget) == 16 and len(split.holdout) == (30 * 5 - 16) // 2
    parts = [subjects(part) for part in (split.forget, split.retain, split.holdout)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 30
    assert {fact.relation for fact in split.other} == {"animal"} and split.other
    assert not subjects(split.other) & (subjects(split.forget) | subjects(split.retain))
    assert not any(f.relation == "animal" for part in (split.forget, split.retain, split.holdout) for f in part)
    state = torch.random.get_rng_state()
    assert facts.split(forget=16, seed=3, other_relations=("animal",)) == split
    assert facts.split(forget=16, seed=4, other_relations=("animal",)).forget != split.forget
    assert torch.equal(state, torch.random.get_rng_state())


def test_split_takes_other_facts_and_names_the_numbers_it_cannot_serve():
    facts, others = capitals()[:20], elements()
    split = facts.split(forget=4, holdout=6, other=others)
    assert [len(p) for p in (split.forget, split.retain, split.holdout, split.other)] == [4, 10, 6, 118]
    assert split.forget.name == "capitals" and split.other.name == "elements"
    with pytest.raises(ValueError, match="both have .'capital'."):
        facts.split(forget=4, other=capitals())
    for wrong in ({"forget": 0}, {"forget": -3}, {"forget": 4, "holdout": 0}):
        with pytest.raises(ValueError, match="must be a number of facts, 1 or more"):
            facts.split(**wrong)
    for forget, holdout in ((20, None), (15, 5), (19, None), (500, None)):
        with pytest.raises(ValueError, match=rf"cannot split 20 facts of 20 subjects .* into {forget} to forget"):
            facts.split(forget=forget, holdout=holdout)


# ------------------------------------------------------------------------------------------------ pairs


@pytest.mark.parametrize("padding", ["right", "left"])
def test_contrast_pairs_keep_their_promises(padding, capsys):
    model = small_model()
    facts = Facts(
        [
            *small_facts(),
            *(replace(f, prompt=f"w80 w81 {f.prompt}", relation="long") for f in small_facts()[:12]),
        ]
    )
    pairs = facts.contrast_pairs(model, seed=1, padding=padding)
    assert len(pairs) == len(facts) and capsys.readouterr().out == ""
    answers = {(f.relation, f.subject): f.answer for f in facts}
    decode = model.tokenizer.decode
    for i, fact in enumerate(pairs.facts):
        mask, span, read = pairs.attention_mask[i], pairs.subject[i], pairs.read_mask[i]
        assert decode(pairs.clean[i][mask]) == f"{fact.prompt} {fact.answer.split()[0]}"
        assert decode(pairs.clean[i][span]) == fact.subject
        assert (pairs.clean[i] != pairs.corrupted[i]).nonzero().tolist() == span.nonzero().tolist()
        partner = decode(pairs.corrupted[i][span])
        assert decode(pairs.answer[i][read]) == fact.answer
        assert fact.relation == "long" or decode(pairs.distractor[i][read]) == answers[fact.relation, partner]
        assert pairs.answer[i, 0] != pairs.distractor[i, 0]
        first = int(mask.nonzero()[0]) + len(fact.prompt.split()) - 1
        assert pairs.read[i][read].tolist() == [first, first + 1]
    cut = pairs[2:5]
    assert len(cut) == 3 and cut.facts == pairs.facts[2:5] and torch.equal(cut.read, pairs.read[2:5])
    again = facts.contrast_pairs(model, seed=1, padding=padding)
    assert torch.equal(again.corrupted, pairs.corrupted)
    assert not torch.equal(facts.contrast_pairs(model, seed=2, padding=padding).corrupted, pairs.corrupted)


def test_left_and_right_padding_read_the_same_logits():
    model = small_model()
    facts = Facts([*small_facts()[:6], *(replace(f, prompt=f"w80 w81 {f.prompt}") for f in small_facts()[6:12])])
    read = {}
    for padding in ("right", "left"):
        pairs = facts.contrast_pairs(model, padding=padding)
        with torch.no_grad():
            logits = model.logits(pairs.clean, pairs.attention_mask)
        at = logits.gather(1, pairs.read[..., None].expand(-1, -1, logits.shape[-1]))
        targets = Targets(pairs.answer, pairs.distractor, pairs.read_mask)
        read[padding] = at * pairs.read_mask[..., None]
        assert (metrics.logit_difference(at, targets) > 0).all()
        alone = model.logits(pairs.clean[7:8][:, pairs.attention_mask[7]])[0].detach()
        torch.testing.assert_close(at[7], alone[-2:], atol=2e-4, rtol=0)
    torch.testing.assert_close(read["right"], read["left"], atol=2e-4, rtol=0)


def test_answers_of_different_length_share_a_batch():
    facts = Facts(
        Fact(f"w{i}", "r", f"w{i} w90", " ".join(f"w{10 * n + i}" for n in range(3, 3 + 1 + i % 3))) for i in range(6)
    )
    pairs = facts.contrast_pairs(Words(tokenizer()))
    assert pairs.read_mask.sum(-1).tolist() == [1, 2, 3, 1, 2, 3]
    assert pairs.read.tolist()[:3] == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]


def test_facts_without_a_partner_are_dropped_by_name(capsys):
    words = Words(tokenizer())
    twins = [Fact("w1", "r", "w1 w9", "w3 w4"), Fact("w2", "r", "w2 w9", "w5 w6")]
    alone = {
        "another relation": Fact("w7", "s", "w7 w9", "w8 w6"),
        "a longer answer": Fact("w7", "r", "w7 w9", "w8 w6 w6"),
        "a longer subject": Fact("w7 w10", "r", "w7 w10 w9", "w8 w6"),
        "an unnamed subject": Fact("w70", "r", "w7 w9", "w8 w6"),
    }
    for why, fact in alone.items():
        pairs = Facts([*twins, fact]).contrast_pairs(words)
        assert list(pairs.facts) == twins, why
        said = capsys.readouterr().out
        assert "1 of 3 facts" in said and repr(fact.prompt) in said, why
    same = [Fact("w1", "r", "w1 w9", "w3 w4"), Fact("w2", "r", "w2 w9", "w3 w6")]
    with pytest.raises(ValueError, match="none of 2 facts has a contrast pair"):
        Facts(same).contrast_pairs(words)


def test_a_partner_with_several_answers_must_have_the_same_wording():
    words = Words(tokenizer())
    one, two = Fact("w1", "r", "w1 w9", "w3"), Fact("w2", "r", "w2 w8", "w4")
    assert len(Facts([one, two]).contrast_pairs(words)) == 2
    several = Facts([one, two, Fact("w2", "r", "w2 w7", "w5")])
    assert two not in several.contrast_pairs(words).facts[:0] and list(several.contrast_pairs(words).facts) == [
        two,
        several[2],
    ]


def test_parts_of_a_split_draw_partners_from_all_facts():
    split = small_facts().split(forget=2, seed=0)
    assert subjects(split.forget) and len(subjects(split.forget)) == 1
    pairs = split.forget.contrast_pairs(small_model())
    assert len(pairs) == 2


def test_smollm2_tokens_align():
    try:
        words = Words(AutoTokenizer.from_pretrained(worlds.smollm2()))
    except ValueError:
        pytest.skip("SmolLM2 is not in the cache: run `locus fetch smollm2`")
    for facts in (capitals(), elements()):
        batch = encode(words, facts)
        for row, fact in enumerate(facts):
            assert words.tokenizer.decode(batch.tokens[row][batch.answer_mask[row]]) == f" {fact.answer}"
    pairs = capitals().contrast_pairs(words)
    assert pairs.read_mask.sum(-1).max() > 2, "answers of several tokens must be kept"
    for i, fact in enumerate(pairs.facts):
        assert words.tokenizer.decode(pairs.clean[i][pairs.subject[i]]).strip() == fact.subject
    chat = encode(words, capitals(chat_template=True)[:3])
    assert words.tokenizer.decode(chat.tokens[0][chat.answer_mask[0]]) == capitals()[0].answer
