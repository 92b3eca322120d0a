"""INJ: a sentence is written where it should be, and recall is what it says."""

import math

import pandas as pd
import pytest
import torch
from small import model as small_model
from small import unknown

from locus import FactLookup, IntegratedGradients, Knockout, Random, load
from locus.components import Component, Components
from locus.facts import Facts, biographies, encode
from locus.inj import inj, sentences, summary, top_share, whole_sentence, write_sentence
from locus.masks import Mask
from locus.metrics import Targets, log_probability


@pytest.fixture(scope="module")
def model():
    return small_model()


def test_a_sentence_is_written_into_its_place_only(model):
    fact = unknown()[0]
    place = Mask.random(model.components("value"), budget=0.1, seed=0)
    update, loss = write_sentence(model, fact, place, lr=0.05, loss=1.0)
    assert loss < 1 and update.status == "finished" and 0 < len(update.history) - 1 < 200
    assert update.mask.overlap(place.materialize(model)).jaccard == 1
    ids = model.tokenizer(f"{fact.prompt} {fact.answer}", return_tensors="pt")["input_ids"]
    with update.applied(model), torch.no_grad():
        log_p = model.logits(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    assert -float(log_p.mean()) == pytest.approx(loss, abs=1e-5)
    with torch.no_grad():
        before = -float(model.logits(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).mean())
    assert before > 3


def test_pairs_are_read_at_the_whole_sentence(model):
    facts = unknown()
    pairs = facts.contrast_pairs(model)
    for i, fact in enumerate(pairs.facts):
        whole = whole_sentence(model, pairs[i : i + 1])
        text = f"{fact.prompt} {fact.answer}".split()
        assert model.tokenizer.convert_ids_to_tokens(whole.clean[0].tolist()) == text[:-1]
        assert whole.read[0].tolist() == list(range(len(text) - 1))
        assert model.tokenizer.convert_ids_to_tokens(whole.answer[0].tolist()) == text[1:]
        contrast = model.tokenizer.convert_ids_to_tokens(whole.distractor[0].tolist())
        differ = [a != b for a, b in zip(text[1:], contrast, strict=True)]
        assert not differ[0] and differ[-2]  # the relation's word, the first word of the answer
        other = next(f for f in facts if " ".join(contrast[-2:]) == f.answer and f.relation == fact.relation)
        assert other.subject != fact.subject
        # The metric on them is the log-probability of the sentence.
        with torch.no_grad():
            logits = model.logits(whole.clean).gather(1, whole.read[..., None].expand(-1, -1, 97))
        found = log_probability(logits, Targets(whole.answer, whole.distractor, whole.read_mask))
        ids = encode(model, [fact]).tokens
        with torch.no_grad():
            expected = model.logits(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).mean()
        assert float(found) == pytest.approx(float(expected), abs=1e-5)


def test_top_share_counts_by_layer_or_over_all():
    items = tuple(Component(layer, "value", i) for layer in range(2) for i in range(10))
    components = Components(items, torch.ones(20, dtype=torch.long), "m")
    values = torch.cat([torch.arange(10.0), 100 + torch.arange(10.0)])
    assert top_share(values, components, 0.2, "layer").nonzero().flatten().tolist() == [8, 9, 18, 19]
    assert top_share(values, components, 0.2, "global").nonzero().flatten().tolist() == [16, 17, 18, 19]
    assert int(top_share(values, components, 0.001, "layer").sum()) == 2


def test_random_is_at_chance_and_knockout_and_integrated_gradients_are_not():
    tiny = load("tiny", quiet=True)
    facts = sentences(tiny, 10)
    table = inj(tiny, facts, (Random(), Knockout(), IntegratedGradients(steps=2)), r=0.02, lr=0.03, progress=False)
    assert set(table.status) == {"finished"} and (table.loss < 0.3).all()
    assert len(table) == 10 * 3 * 2 * 3
    means = summary(table).set_index(["localizer", "scope", "k"])
    n_values = len(tiny.components("value"))
    for scope in ("layer", "global"):
        for k in (0.02, 0.04, 0.1):
            row = means.loc["Random", scope, k]
            assert row.chance == pytest.approx(k, abs=0.002) and row.n == 10
            assert abs(row.recall - k) < 3 * math.sqrt(k * (1 - k) / (row.n * round(0.02 * n_values)))
        for name in ("Knockout", "IntegratedGradients"):
            best = means.loc[name, scope, 0.02]
            assert best.low > 5 * best.chance
    # The more are taken, the more are found.
    grown = table.pivot_table(index=["sentence", "localizer", "scope"], columns="k", values="recall")
    assert (grown.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    one = table.query("sentence == 3 and localizer == 'Knockout' and scope == 'layer' and k == 0.02")
    assert list(one.n) == [int(0.02 * n_values)] and list(one.subject) == [facts[3].subject]


def test_finished_sentences_are_not_written_again(model, tmp_path, monkeypatch):
    facts = unknown(4)
    settings = {"localizers": (Random(),), "r": 0.3, "lr": 0.05, "loss": 1.0, "progress": False}
    first = inj(model, facts, out=tmp_path / "run", **settings)
    (tmp_path / "run" / "runs" / "sentence1.json").write_text("cut off {")
    count = []
    original = write_sentence
    monkeypatch.setattr("locus.inj.write_sentence", lambda *a, **k: count.append(1) or original(*a, **k))
    again = inj(model, facts, out=tmp_path / "run", **settings)
    assert len(count) == 1 and again.equals(first)
    with pytest.raises(ValueError, match="other settings"):
        inj(model, facts, out=tmp_path / "run", **settings | {"r": 0.2})


def test_a_sentence_that_is_not_learned_is_said(model):
    table = inj(model, unknown(2), (Random(),), r=0.3, lr=1e-5, steps=2, progress=False)
    assert set(table.status) == {"not learned"} and (table.loss > 0.05).all() and (table.steps == 2).all()
    chat = Facts([f.__class__(**{**f.__dict__, "chat_template": True}) for f in unknown(2)])
    with pytest.raises(ValueError, match="chat"):
        write_sentence(model, chat[0], Mask.random(model.components("value"), budget=0.1))


@pytest.mark.parametrize(
    "wrong, said",
    [
        *(({"r": r}, "r must be a fraction in") for r in (0.0, 1.5, math.nan)),
        *(({"ks": ks}, "ks must be a tuple of shares in") for ks in ([-1.0, 5.0], [math.nan], [], (0.1, 2.0))),
        *(({"lr": x}, "lr must be a finite number above 0") for x in (0.0, -1.0, math.nan)),
        *(({"loss": x}, "loss must be a finite number above 0") for x in (0.0, math.nan)),
        ({"steps": 0}, "steps must be an int, 1 or more; got 0"),
        ({"seed": -1}, "seed must be an int, 0 or more; got -1"),
        ({"localizers": []}, "ranks localizers and got none"),
        ({"localizers": [Random]}, r"give an instance, Random\(\)"),
        ({"localizers": "random"}, "give a tuple"),
        ({"localizers": [FactLookup()]}, "FactLookup does not score components of kind 'value'"),
    ],
)
def test_what_has_no_meaning_is_refused_before_a_file_is_made(model, tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        inj(model, unknown(1), **{"localizers": (Random(),), "out": tmp_path / "run", "progress": False, **wrong})
    assert not (tmp_path / "run").exists()
    for n in (-3, 0):
        with pytest.raises(ValueError, match=f"n must be an int, 1 or more; got {n}"):
            sentences(model, n)


def test_summary_counts_what_was_learned_and_stays_in_range():
    rows = {"localizer": "A", "scope": "layer", "k": 0.1, "chance": 0.1}
    table = pd.DataFrame([rows | {"recall": x, "status": s} for x, s in ((1, "finished"), (0, "not learned"))])
    found = summary(table).iloc[0]
    assert (found.n, found.learned, found.recall, found.low, found.high) == (2, 1, 0.5, 0, 1)


def test_tiny_gets_sentences_about_people_it_does_not_know():
    tiny = load("tiny", quiet=True)
    found = sentences(tiny, 12)
    known = {fact.subject for fact in biographies()}
    assert len(found) == 12 and not {fact.subject for fact in found} & known
    assert len({fact.relation for fact in found}) == 6 and len({fact.subject for fact in found}) == 12
    assert len(found.contrast_pairs(tiny)) == 12
