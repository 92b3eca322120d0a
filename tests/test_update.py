import dataclasses
import json
import math

import pytest
import torch
from helpers import ARCHITECTURES, tokenizer

from locus.masks import Mask, ParameterMask
from locus.models import wrap
from locus.unlearn import NPO, SGD, AdamW, Update
from locus.unlearn.compact import entries, leaves
from locus.unlearn.update import Entries, bits, checksum


def hooked(architecture="llama", dtype=torch.float32):
    return wrap(ARCHITECTURES[architecture]().to(dtype), tokenizer(), architecture)


def make(model, seed=0, kind="neuron", **settings):
    """An update of random new values, without a run."""
    mask = Mask.random(model.components(kind), budget=0.4, seed=seed)
    selected = mask.materialize(model)
    g = torch.Generator().manual_seed(seed)
    values = {
        name: Entries(index, torch.randn(value.shape, generator=g).to(value.dtype))
        for name, (index, value) in entries(model, leaves(model, selected), selected).items()
    }
    made = Update(
        model=model.fingerprint,
        values=values,
        shapes={name: tuple(model.weights[name].shape) for name in values},
        recipe=mask.recipe,
        objective=NPO(beta=0.3),
        optimizer=AdamW(lr=3e-4, betas=(0.8, 0.99)),
        settings={"steps": 2, "seed": seed},
        history=(
            {"step": 0, "loss": 1.5, "grad_norm": math.nan},
            {"step": 1, "loss": -0.1, "grad_norm": 2.0},
        ),
        status="finished",
        norm=1.25,
        n_changed=mask.n_parameters,
        checksum="0" * 64,
    )
    return dataclasses.replace(made, **settings), selected


def everything(model):
    stored = [p.detach().clone() for p in model.weights.values()]
    return stored + [live.tensor.detach().clone() for live in model.live]


def same(a, b):
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_applied_edits_the_mask_only_and_restores(architecture, dtype):
    model = hooked(architecture, dtype)
    update, mask = make(model, kind="head")
    before, tokens = everything(model), torch.randint(3, 97, (2, 6))
    logits = model.logits(tokens).detach()
    with update.applied(model):
        for name, (index, value) in update.values.items():
            assert torch.equal(model.weights[name].detach().view(-1)[index.long()], value)
        for old, (name, p) in zip(before, model.weights.items(), strict=False):
            outside = ~mask[name] if name in mask else torch.ones(p.shape, dtype=torch.bool)
            assert torch.equal(bits(old)[outside], bits(p)[outside])
        for live in model.live:
            assert torch.equal(live.take(model.weights[live.name].detach()), live.tensor.detach())
        assert not torch.allclose(model.logits(tokens).detach(), logits)
    assert same(before, everything(model)) and torch.equal(model.logits(tokens).detach(), logits)


def test_restores_after_an_error_and_half_a_write():
    model = hooked()
    update, _ = make(model)
    before = everything(model)
    with pytest.raises(KeyboardInterrupt), update.applied(model):
        raise KeyboardInterrupt
    assert same(before, everything(model))
    last = list(update.values)[-1]
    write, calls = model.write, []

    def failing(name, values):
        calls.append(name)
        if len(calls) == len(update.values):
            raise MemoryError(last)
        write(name, values)

    model.write = failing
    with pytest.raises(MemoryError), update.applied(model):
        pass
    assert len(calls) > len(update.values) and same(before, everything(model))


def test_blocks_nest():
    model = hooked()
    first, second = make(model, 0)[0], make(model, 1)[0]
    before = everything(model)
    with first.applied(model):
        edited = everything(model)
        with first.applied(model), second.applied(model):
            assert not same(edited, everything(model))
        assert same(edited, everything(model))
    assert same(before, everything(model))


def test_another_model_is_refused():
    update, _ = make(hooked("llama"))
    with pytest.raises(ValueError, match="belongs to model"), update.applied(hooked("qwen3")):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_bit_for_bit(dtype, tmp_path):
    model = hooked(dtype=dtype)
    update, mask = make(model)
    path = update.save(tmp_path / "runs" / "a")
    again = Update.load(path)
    assert again.values.keys() == update.values.keys()
    for name, (index, value) in update.values.items():
        assert torch.equal(again.values[name].index, index) and again.values[name].index.dtype == torch.int32
        assert torch.equal(bits(again.values[name].value), bits(value)) and again.values[name].value.dtype == dtype
    for field in dataclasses.fields(Update):
        if field.name not in ("values", "history"):
            assert getattr(again, field.name) == getattr(update, field.name), field.name
    assert repr(again.history) == repr(update.history) and repr(again) == repr(update)
    assert isinstance(again.mask, ParameterMask) and again.mask.n_parameters == mask.n_parameters
    assert all(torch.equal(again.mask[name], mask[name]) for name in mask)
    assert [p.name for p in path.parent.iterdir()] == ["a"]
    with pytest.raises(ValueError, match="exists already"):
        update.save(path)


def test_settings_of_others_come_back_as_text(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine:
        power: float = 2.0

    update, _ = make(hooked(), objective=Mine(), optimizer=SGD(lr=0.1))
    again = Update.load(update.save(tmp_path / "a"))
    assert again.objective == repr(Mine()) and again.optimizer == SGD(lr=0.1)


def test_a_damaged_folder_is_refused(tmp_path):
    update, _ = make(hooked())
    path = update.save(tmp_path / "a")
    (path / "values.safetensors").write_bytes((path / "values.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match="no whole update"):
        Update.load(path)
    with pytest.raises(ValueError, match="no whole update"):
        Update.load(tmp_path / "nowhere")
    record = json.loads((path / "update.json").read_text())
    assert record["objective"]["class"] == "NPO"


def test_repr_is_short():
    text = repr(make(hooked())[0])
    assert len(text) < 250 and "finished" in text and "NPO(beta=0.3" in text


def test_bits_and_checksum_see_what_comparison_does_not():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([math.nan])
    assert not torch.equal(bits(zero), bits(torch.tensor([-0.0, 1.0]))) and torch.equal(bits(nan), bits(nan.clone()))
    mask = torch.tensor([False, True])
    one = checksum([("a", zero, mask)])
    assert one == checksum([("a", torch.tensor([0.0, 5.0]), mask)])
    others = [
        ("a", torch.tensor([-0.0, 1.0]), mask),
        ("b", zero, mask),
        ("a", zero, None),
        ("a", zero.double(), mask),
    ]
    assert len({one, *(checksum([other]) for other in others)}) == 5
