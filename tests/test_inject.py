"""Planting: what is taught is known, lies in its place and nowhere else, and is read back whole or made again."""

import json
from dataclasses import replace

import pytest
import torch
from small import facts as small_facts
from small import model as small_model
from small import unknown

import locus.inject
from locus.facts import encode
from locus.inject import Planted, Training, elsewhere, plant, region
from locus.masks import Mask, ParameterMask
from locus.metrics import answer_correct, extraction_strength
from locus.models import HookedModel
from locus.unlearn.update import bits

FAST = {"retained": Training(lr=1e-2, steps=300), "planted": Training(lr=3e-2, steps=300)}


@pytest.fixture(scope="module")
def model() -> HookedModel:
    return small_model()


@pytest.fixture(scope="module")
def split():
    return unknown().split(forget=8, holdout=6, seed=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def planted(model, split, cache) -> Planted:
    return plant(model, split, region(model, share=0.3), known=small_facts(), cache=cache, **FAST)


def strength(model, facts) -> float:
    """Extraction strength from the definition, by the plain model, one prompt at a time."""
    found = []
    for fact in facts:
        batch = encode(model, [fact])
        with torch.no_grad():
            right = answer_correct(model.logits(batch.tokens), batch)
        found.append(float(extraction_strength(right, batch.answer_mask)))
    return sum(found) / len(found)


def weights(model) -> dict:
    return {name: bits(weight).clone() for name, weight in model.weights.items()}


def test_each_state_knows_what_it_was_taught(model, split, planted):
    before = weights(model)
    assert strength(model, split.forget) < 0.5 and strength(model, [*split.retain, *split.holdout]) < 0.5
    with planted.applied(model, "retained"):
        assert strength(model, [*split.retain, *split.holdout]) >= 0.95
        assert strength(model, split.forget) < 0.5
        reworded = [replace(f, prompt=f.paraphrases[0]) for f in split.retain]
        assert strength(model, reworded) >= 0.9
    with planted.applied(model):
        assert strength(model, split.forget) >= 0.95
        for part in ("forget", "retain", "holdout"):
            assert planted.strength("planted", part) == pytest.approx(strength(model, getattr(split, part)))
        assert planted.strength("planted", "known") == pytest.approx(strength(model, small_facts()))
    assert planted.strength("pretrained", "known") >= 0.95
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(model).values(), strict=True))
    damage = planted.strength("retained", "holdout") - planted.strength("planted", "holdout")
    assert planted.damage == pytest.approx(damage)
    with pytest.raises(ValueError, match="no strength of 'other' in 'planted'"):
        planted.strength("planted", "other")


def test_forget_facts_lie_in_the_region_and_nowhere_else(model, planted):
    mask = planted.region.materialize(model)
    with planted.applied(model, "retained"):
        retained = weights(model)
        assert sum(n != 0 for n in (retained[name].ne(w).sum() for name, w in weights(model).items())) == 0
    with planted.applied(model):
        changed = {name: weight.ne(retained[name]) for name, weight in weights(model).items()}
    assert sum(int(c.sum()) for c in changed.values()) == planted.planted.n_changed > 0.9 * mask.n_parameters
    for name, entries in changed.items():
        assert not (entries & ~mask[name]).any() if name in mask else not entries.any()
    # Set back to θ_r, nothing of it is left.
    with planted.applied(model, "reverted"):
        assert all(torch.equal(weight, retained[name]) for name, weight in weights(model).items())
    with pytest.raises(ValueError, match="no state 'θ_o'"), planted.applied(model, "θ_o"):
        pass


def test_replay_protects_the_kept_facts(model, split, planted, cache):
    without = plant(model, split, planted.region, replay=False, known=small_facts(), cache=cache, **FAST)
    assert without.strength("planted", "forget") >= 0.95
    assert without.damage > planted.damage + 0.05
    # θ_r is the same for both, and was made once.
    assert without.retained.checksum == planted.retained.checksum


def test_a_stage_is_read_back_bit_for_bit(model, split, planted, cache, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a stage that is there was trained again")

    monkeypatch.setattr(locus.inject, "unlearn", never)
    again = plant(model, split, planted.region, known=small_facts(), cache=cache, **FAST)
    for a, b in ((again.retained, planted.retained), (again.planted, planted.planted)):
        assert a.values.keys() == b.values.keys()
        for name, (index, value) in a.values.items():
            assert torch.equal(index.long(), b.values[name].index.long())
            assert torch.equal(bits(value), bits(b.values[name].value))
    assert again.strengths.equals(planted.strengths)
    for other in ({"seed": 1}, {"strength": 0.9}, {"replay": False, "seed": 2}):
        with pytest.raises(AssertionError, match="trained again"):
            plant(model, split, planted.region, known=small_facts(), cache=cache, **FAST, **other)
    with pytest.raises(AssertionError, match="trained again"):
        plant(model, split, region(model, share=0.3, seed=1), known=small_facts(), cache=cache, **FAST)


def test_settings_without_meaning_are_refused(model, split, planted):
    for wrong in ({"lr": 0.0}, {"lr": float("nan")}, {"steps": 0}, {"every": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Training(**{"lr": 1e-2, "steps": 3} | wrong)
    with pytest.raises(ValueError, match="strength must be a fraction"):
        plant(model, split, planted.region, strength=1.5)


@pytest.mark.parametrize("harm", ["cut", "flip", "lose", "forge"])
def test_a_damaged_stage_is_named_and_made_again(model, split, planted, tmp_path, capsys, harm):
    small = {**FAST, "strength": 0.3, "cache": tmp_path}
    first = plant(model, split, planted.region, **small)
    folder = next(path for path in tmp_path.iterdir() if '"planted"' in (path / "config.json").read_text()[:40])
    values = folder / "update" / "values.safetensors"
    content = bytearray(values.read_bytes())
    if harm == "cut":
        values.write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        content[-1] ^= 1
        values.write_bytes(content)
    elif harm == "lose":
        values.unlink()
    else:
        record = json.loads((folder / "config.json").read_text())
        record["settings"]["strength"] = 0.2
        (folder / "config.json").write_text(json.dumps(record))
    again = plant(model, split, planted.region, **small)
    assert f"{folder} is damaged" in capsys.readouterr().out
    for name, (_, value) in again.planted.values.items():
        assert torch.equal(bits(value), bits(first.planted.values[name].value))
    plant(model, split, planted.region, **small)
    assert "damaged" not in capsys.readouterr().out


def test_a_strength_that_is_not_reached_is_an_error_and_leaves_nothing(model, split, tmp_path):
    short = {"retained": Training(lr=1e-2, steps=3), "planted": FAST["planted"]}
    with pytest.raises(ValueError, match="16 facts have an extraction strength of 0.*after 3 steps.*not 0.95"):
        plant(model, split, region(model, share=0.3), cache=tmp_path, **short)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["value", "neuron", "head", "weight"])
@pytest.mark.parametrize("match", ["layer", "uniform"])
def test_elsewhere_is_as_large_and_disjoint(model, kind, match):
    place = region(model, kind, 0.25, seed=3)
    mask = place if isinstance(place, ParameterMask) else place.materialize(model)
    assert isinstance(place, ParameterMask if kind == "weight" else Mask)
    drawn = elsewhere(model, place, 3, match=match, seed=1)
    entries = [other if isinstance(other, ParameterMask) else other.materialize(model) for other in drawn]
    for other in entries:
        assert other.n_parameters == mask.n_parameters and (other & mask).n_parameters == 0
        if match == "layer":
            assert {name: int(t.sum()) for name, t in other.items()} == {name: int(t.sum()) for name, t in mask.items()}
    assert entries[0].overlap(entries[1]).jaccard < 1


def test_single_weights_can_hold_facts(model, split, cache):
    place = region(model, "weight", 0.1)
    found = plant(model, split, place, cache=cache, **FAST)
    assert found.strength("planted", "forget") >= 0.95
    assert set(found.planted.values) == set(place) and found.planted.mask.overlap(place).jaccard == 1
