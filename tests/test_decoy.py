"""Two halves of the facts in two places: each place stores its own half."""

from dataclasses import replace

import pytest
import torch
from small import model as small_model
from small import unknown

from locus.decoy import halves, plant_two
from locus.evaluate import score
from locus.facts import encode
from locus.inject import Training, elsewhere, region
from locus.unlearn.update import bits

FAST = {"retained": Training(lr=1e-2, steps=300), "planted": Training(lr=2e-2, steps=200)}


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def split():
    return unknown().split(forget=8, holdout=6, seed=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def places(model):
    first = region(model, share=0.2)
    return first, elsewhere(model, first, 1)[0]


def strength(model, facts) -> float:
    return float(score(model, encode(model, facts)).extraction_strength.mean())


def test_halves_share_no_subject(split):
    a, b = halves(split, seed=1)
    assert a.forget == b.other and b.forget == a.other
    assert {*a.forget, *b.forget} == set(split.forget)
    assert not {f.subject for f in a.forget} & {f.subject for f in b.forget}
    assert a.retain == split.retain and a.holdout == split.holdout
    with pytest.raises(ValueError, match="two subjects or more, got 1"):
        halves(replace(split, forget=split.forget[:2]))


@pytest.mark.parametrize("order", ["jointly", "in turn"])
def test_two_places_hold_one_half_each(model, split, cache, places, order):
    before = {name: bits(weight).clone() for name, weight in model.weights.items()}
    pair = plant_two(model, split, places, order=order, cache=cache, **FAST)
    assert all(torch.equal(weight, bits(model.weights[name])) for name, weight in before.items())
    union = places[0].materialize(model) | places[1].materialize(model)
    assert pair[0].planted.mask.overlap(union).jaccard == 1
    assert 0.9 * union.n_parameters < pair[0].planted.n_changed <= union.n_parameters
    for mine, other in (pair, pair[::-1]):
        assert mine.strength("planted", "forget") >= 0.95 and mine.damage <= 0.05
        assert mine.strength("planted", "other") == other.strength("planted", "forget")
        assert mine.strength("retained", "forget") == other.strength("retained", "other") < 0.5
        with mine.applied(model):
            assert strength(model, split.forget) >= 0.95
        # Without its place a half is gone, and the other half is not: a place stores its own half.
        with mine.applied(model, "reverted"):
            gone, left = strength(model, mine.split.forget), strength(model, other.split.forget)
        assert gone < 0.2 and left > gone + 0.3
    again = plant_two(model, split, places, order=order, cache=cache, **FAST)
    assert again[1].strengths.equals(pair[1].strengths)


def test_jointly_a_half_moves_its_own_place_only(model, split, places, tmp_path):
    """Adam's first step is the sign of the gradient: in each place that of its half and of the kept facts."""
    once = Training(lr=1e-3, steps=1, batch_size=1000)
    # Nothing need be reached, so each stage is one step.
    pair = plant_two(model, split, places, strength=0.0, retained=once, planted=once, cache=tmp_path)
    kept = [*split.retain, *split.holdout]

    def gradients(facts) -> dict[str, torch.Tensor]:
        loss = torch.zeros(())
        texts = [(prompt, fact.answer) for fact in facts for prompt in (fact.prompt, *fact.paraphrases)]
        for prompt, answer in texts:
            ids = model.tokenizer(f"{prompt} {answer}", return_tensors="pt")["input_ids"]
            log_p = model.logits(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            loss = loss - log_p[-len(answer.split()) :].mean() / len(texts)
        names, weights = zip(*model.weights.items(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))

    with pair[0].applied(model, "retained"):
        start = {name: weight.detach().clone() for name, weight in model.weights.items()}
        held = gradients(kept)
        own = [gradients(half.split.forget) for half in pair]
    with pair[0].applied(model):
        for place, half in zip(places, own, strict=True):
            for name, selected in place.materialize(model).items():
                expected = (half[name] + held[name])[selected]
                moved = (model.weights[name].detach() - start[name])[selected]
                clear = expected.abs() > 1e-2 * expected.abs().max()
                assert torch.equal(moved[clear].sign(), -expected[clear].sign()) and clear.float().mean() > 0.5


def test_two_places_that_cannot_be_are_refused(model, split, cache, places):
    with pytest.raises(ValueError, match=r"share [\d,]+ entries"):
        plant_two(model, split, (places[0], places[0]), cache=cache, **FAST)
    with pytest.raises(ValueError, match="'at once'"):
        plant_two(model, split, places, order="at once", cache=cache, **FAST)
    with pytest.raises(ValueError, match="8 facts have an extraction strength of .* after 2 steps"):
        few = Training(lr=1e-4, steps=2)
        plant_two(model, split, places, cache=cache, retained=FAST["retained"], planted=few)
