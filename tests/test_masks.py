import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch

import locus.masks
from locus.components import Component, Components
from locus.masks import Mask, ParameterMask, controls
from locus.scores import RecordedMethod, Scores


def heads(n_layers: int = 4, n_heads: int = 8, size: int = 100, model: str = "model-a") -> Components:
    items = tuple(Component(layer, "head", h) for layer in range(n_layers) for h in range(n_heads))
    return Components(items, torch.full((len(items),), size), model)


MLPS = Components(tuple(Component(layer, "mlp") for layer in range(4)), torch.full((4,), 5000), "model-a")


def scores(components: Components, seed: int = 0) -> Scores:
    values = torch.randn(5, len(components), generator=torch.Generator().manual_seed(seed))
    return Scores(values, components, RecordedMethod("Patching", (("seed", 7),)), "logit_difference")


@dataclass
class FakeModel:
    """The parts of a HookedModel that masks read."""

    name: str = "fake"
    fingerprint: str = "model-a"
    weights: dict = field(
        default_factory=lambda: {
            "model.embed_tokens.weight": torch.zeros(7, 3),
            "model.layers.0.mlp.down_proj.weight": torch.zeros(3, 5),
            "model.norm.weight": torch.zeros(3),
        }
    )


def per_group(mask: Mask, *fields: str) -> dict:
    counts: dict = {}
    for chosen, component, size in zip(mask.selected, mask.components, mask.components.sizes, strict=True):
        key = tuple(getattr(component, f) for f in fields)
        counts[key] = counts.get(key, 0) + int(chosen) * int(size)
    return counts


@pytest.mark.parametrize("make", [Mask.top, Mask.bottom])
@pytest.mark.parametrize("by", ["signed", "absolute"])
def test_budget_is_never_exceeded_and_nests(make, by):
    mixed = scores(heads() + MLPS)
    total = int(mixed.components.sizes.sum())
    before = None
    for budget in (0.3, 0.45, 0.6, 0.999, 1.0):
        mask = make(mixed, budget, by=by)
        assert 0 < mask.n_parameters <= budget * total
        assert before is None or (before - mask).n_parameters == 0
        before = mask
    assert len(before) == len(mixed.components)


def test_top_and_bottom_take_the_extremes():
    s = scores(heads())
    mean = s.mean()
    top, bottom = Mask.top(s, 0.25), Mask.bottom(s, 0.25)
    assert len(top) == len(bottom) == 8
    assert mean[top.selected].min() >= mean[~top.selected].max()
    assert mean[bottom.selected].max() <= mean[~bottom.selected].min()
    quiet = Mask.bottom(s, 0.25, by="absolute")
    assert mean[quiet.selected].abs().max() <= mean[~quiet.selected].abs().min()
    assert set(top.labels).isdisjoint(bottom.labels) and top.labels[0].startswith("L")
    with pytest.raises(ValueError, match="signed"):
        Mask.top(s, 0.25, by="square")


def test_a_budget_means_the_number_as_written():
    # 0.29 * 100 is 28.999999999999996 in floating point
    assert len(Mask.top(scores(heads(10, 10, 1)), 0.29)) == 29


def test_a_budget_that_selects_nothing_names_one_that_does():
    s = scores(heads())
    with pytest.raises(ValueError, match="smallest budget that selects something here is 0.03125"):
        Mask.top(s, 0.03)
    assert len(Mask.top(s, 0.03125)) == 1
    third = scores(heads(1, 3))
    with pytest.raises(ValueError, match="0.333334"):
        Mask.random(third.components, budget=0.33)
    assert len(Mask.random(third.components, budget=0.333334)) == 1
    for budget in (0.0, -1.0, 1.01, math.nan):
        with pytest.raises(ValueError, match="fraction of the parameters"):
            Mask.top(s, budget)


def test_recipe_says_how_it_was_made():
    recipe = Mask.top(scores(heads()), 0.25).recipe
    assert recipe == {
        "method": "Patching(seed=7)",
        "metric": "logit_difference",
        "select": "top",
        "by": "signed",
        "facts": 5,
        "seed": 7,
        "budget": 0.25,
        "model": "model-a",
    }


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("match", ["layer", "uniform"])
def test_controls_match_the_mask(match, disjoint):
    # Neurons of layer 1 are larger, as in models whose width varies, and heads are mixed in.
    neurons = Components(
        tuple(Component(layer, "neuron", i) for layer in range(3) for i in range(10)),
        torch.tensor([10] * 10 + [30] * 10 + [10] * 10),
        "model-a",
    )
    mask = Mask.top(scores(heads(3, 6) + neurons), 0.2)
    drawn = controls(mask, 12, match=match, disjoint=disjoint, seed=4)
    fields = ("layer", "kind") if match == "layer" else ("kind",)
    for control in drawn:
        assert control.n_parameters == mask.n_parameters
        assert per_group(control, *fields) == per_group(mask, *fields)
        assert not disjoint or (control & mask).n_parameters == 0
    keys = {tuple(control.labels) for control in [*drawn, mask]}
    assert len(keys) == 13
    if match == "uniform":
        assert any(per_group(control, "layer") != per_group(mask, "layer") for control in drawn)
    fewer = controls(mask, 3, match=match, disjoint=disjoint, seed=4)
    assert all(torch.equal(a.selected, b.selected) for a, b in zip(fewer, drawn, strict=False))
    assert any(
        not torch.equal(a.selected, b.selected)
        for a, b in zip(fewer, controls(mask, 3, match=match, disjoint=disjoint, seed=5), strict=True)
    )
    assert drawn[1].recipe["draw"] == 1 and drawn[1].recipe["like"] == mask.recipe


def test_each_possible_control_is_drawn_equally_often():
    mask = Mask(heads(1, 4), torch.tensor([True, True, False, False]))
    counts: dict = {}
    for seed in range(600):
        labels = Mask.random(like=mask, seed=seed).labels
        counts[labels] = counts.get(labels, 0) + 1
    assert len(counts) == 5 and mask.labels not in counts  # six pairs, less the mask itself
    assert all(80 <= n <= 160 for n in counts.values())


def test_impossible_controls_are_refused_by_name():
    most = Mask.top(scores(heads()), 0.75)
    with pytest.raises(ValueError, match=r"layer \d head .* components left to draw from"):
        Mask.random(like=most, disjoint_from=most)
    with pytest.raises(ValueError, match='only 0 other masks match this one by layer.*match="uniform"'):
        Mask.random(like=Mask.top(scores(MLPS), 0.5))
    assert len(Mask.random(like=Mask.top(scores(MLPS), 0.5), match="uniform")) == 2
    with pytest.raises(ValueError, match="only 5 other masks"):
        controls(Mask(heads(1, 4), torch.tensor([True, True, False, False])), 6)
    with pytest.raises(ValueError, match="expected one of layer, uniform"):
        controls(most, 2, match="kind")
    with pytest.raises(ValueError, match="nothing to match"):
        controls(most - most, 2)
    with pytest.raises(ValueError, match="only 800 .*are free"):
        Mask.random(most.components, budget=0.5, disjoint_from=most)
    with pytest.raises(ValueError, match="either components and budget="):
        Mask.random(most.components)
    with pytest.raises(ValueError, match="either components and budget="):
        Mask.random(most.components, budget=0.1, like=most)


def test_random_of_a_budget():
    pool = heads()
    masks = [Mask.random(pool, budget=0.25, seed=seed) for seed in range(40)]
    assert all(len(m) == 8 for m in masks) and len({m.labels for m in masks}) == 40
    assert torch.equal(masks[3].selected, Mask.random(pool, budget=0.25, seed=3).selected)
    rate = torch.stack([m.selected for m in masks]).float().mean(0)
    assert 0 < rate.min() and rate.max() < 0.6
    apart = Mask.random(pool, budget=0.5, disjoint_from=masks[0], seed=1)
    assert (apart & masks[0]).n_parameters == 0 and len(apart) == 16


def test_algebra_is_that_of_sets():
    pool = heads(2, 3)
    a, b = (Mask.random(pool, budget=0.5, seed=seed) for seed in (0, 2))
    x, y = set(a.labels), set(b.labels)
    assert set((a & b).labels) == x & y
    assert set((a | b).labels) == x | y
    assert set((a - b).labels) == x - y
    assert set((~a).labels) == set(pool.labels) - x
    assert (a | ~a).n_parameters == Mask.full(pool).n_parameters == 600
    assert (a & b).overlap(a).share == 1
    assert a.overlap(b).jaccard == pytest.approx(len(x & y) / len(x | y))
    assert a.overlap(b).share == pytest.approx(len(x & y) / len(x))
    assert math.isnan((a - a).overlap(a).share)
    for other in (Mask.full(heads(2, 3, model="model-b")), Mask.full(heads(2, 4)), {"not": "a mask"}):
        with pytest.raises(ValueError, match="different models|components differ|expected another Mask"):
            a & other


def test_selection_must_fit_the_components():
    with pytest.raises(ValueError, match="one entry a component"):
        Mask(heads(1, 4), torch.ones(3, dtype=torch.bool))


def test_masks_are_saved_bit_for_bit(tmp_path):
    mask = Mask.random(heads(3, 5), budget=0.4, seed=1)
    again = Mask.load(mask.save(tmp_path / "mask.safetensors"))
    assert again.labels == mask.labels and again.recipe == mask.recipe
    assert again.components.model == "model-a" and again.n_parameters == mask.n_parameters
    assert (again & mask).n_parameters == mask.n_parameters
    tensors = {"a": torch.rand(7, 3) > 0.5, "b": torch.rand(5) > 0.5, "c": torch.rand(2, 2, 2) > 0.2}
    parameters = ParameterMask(tensors, {"method": "mine"})
    back = ParameterMask.load(parameters.save(tmp_path / "p.safetensors"))
    assert list(back) == list(tensors) and all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert back.recipe == {"method": "mine"} and back.n_parameters == parameters.n_parameters
    large = ParameterMask({"w": torch.rand(800, 1000) > 0.5})
    assert large.save(tmp_path / "large.safetensors").stat().st_size < 800 * 1000 / 8 + 1000
    with pytest.raises(ValueError, match="holds mask, expected parameter mask"):
        ParameterMask.load(tmp_path / "mask.safetensors")


def test_materialize_selects_the_entries_of_the_components(monkeypatch):
    def entries(model, components, selected):
        masks = {"w": torch.zeros(4, 8, dtype=torch.bool)}
        for component in itertools.compress(components, selected.tolist()):
            masks["w"][component.layer, component.index] = True
        return masks

    monkeypatch.setattr(locus.masks, "parameter_mask", entries)
    mask = Mask.random(heads(4, 8, size=1), budget=0.25, seed=0)
    parameters = mask.materialize(FakeModel())
    assert torch.equal(parameters["w"], mask.selected.reshape(4, 8))
    assert parameters.n_parameters == mask.n_parameters == len(mask)
    assert parameters.recipe["seed"] == 0 and parameters.recipe["components"] == 8


def test_random_single_weights_are_a_share_of_every_matrix(any_model):
    mask = ParameterMask.random(any_model, budget=0.1, seed=3)
    matrices = {
        name
        for name, weight in any_model.weights.items()
        if weight.ndim > 1 and not any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
    }
    assert set(mask) == matrices
    for tensor in mask.values():
        assert int(tensor.sum()) == math.floor(0.1 * tensor.numel() + 1e-9)
    again, other = (ParameterMask.random(any_model, budget=0.1, seed=seed) for seed in (3, 4))
    assert all(torch.equal(mask[name], again[name]) for name in mask)
    # Two independent draws share 10% of their entries by chance.
    assert mask.overlap(other).share == pytest.approx(0.1, abs=0.03)


def test_random_single_weights_like_a_mask_and_disjoint_from_it(llama):
    mask = ParameterMask.random(llama, budget=0.2, seed=0) | Mask.random(
        llama.components("value"), budget=0.2
    ).materialize(llama)
    twin = ParameterMask.random(llama, like=mask, disjoint_from=mask, seed=1)
    assert {name: int(t.sum()) for name, t in twin.items()} == {name: int(t.sum()) for name, t in mask.items()}
    assert mask.overlap(twin).share == 0
    spread = ParameterMask.random(llama, like=mask, match="uniform", disjoint_from=mask, seed=1)
    assert spread.n_parameters == mask.n_parameters and (spread & mask).n_parameters == 0
    assert {name: int(t.sum()) for name, t in spread.items()} != {name: int(t.sum()) for name, t in mask.items()}
    third = ParameterMask.random(llama, budget=0.1, disjoint_from=mask | twin, seed=2)
    assert (third & (mask | twin)).n_parameters == 0


def test_random_single_weights_that_cannot_be_are_refused(llama):
    mask = ParameterMask.random(llama, budget=0.6)
    with pytest.raises(ValueError, match="free of the mask"):
        ParameterMask.random(llama, like=mask, disjoint_from=mask)
    with pytest.raises(ValueError, match="either budget= or like="):
        ParameterMask.random(llama)
    with pytest.raises(ValueError, match="budget=2.0"):
        ParameterMask.random(llama, budget=2.0)
    with pytest.raises(ValueError, match="selects no entry"):
        ParameterMask.random(llama, budget=1e-9)
    with pytest.raises(ValueError, match="different models"):
        ParameterMask.random(llama, like=ParameterMask(dict(mask), {"model": "another"}))


@pytest.mark.parametrize("kind", ["head", "kv", "neuron", "value", "mlp", "attn"])
def test_a_materialized_mask_has_the_parameters_that_it_counts(llama, kind):
    mask = Mask.random(llama.components(kind), budget=0.7, seed=0)
    parameters = mask.materialize(llama)
    assert parameters.n_parameters == mask.n_parameters > 0
    assert all(parameters[name].shape == llama.weights[name].shape for name in parameters)
    assert (parameters & (~mask).materialize(llama)).n_parameters == 0
    with pytest.raises(ValueError, match="belong to"):
        Mask.full(heads()).materialize(llama)


def test_parameter_mask_algebra():
    model = FakeModel()
    norm, down = torch.tensor([True, False, True]), torch.rand(3, 5) > 0.5
    a = ParameterMask({"model.norm.weight": norm})
    b = ParameterMask({"model.norm.weight": ~norm, "model.layers.0.mlp.down_proj.weight": down})
    assert (a & b).n_parameters == 0 and list(a & b) == []
    assert (a | b).n_parameters == 3 + int(down.sum())
    assert torch.equal((b - a)["model.norm.weight"], ~norm)
    assert (a - b).n_parameters == 2 and a.overlap(a | b).share == 1
    rest = a.complement(model)
    assert rest.n_parameters == 21 + 15 + 1 and (rest & a).n_parameters == 0
    assert torch.equal((rest | a)["model.norm.weight"], torch.ones(3, dtype=torch.bool))
    assert a == a and a != b and "nothing" not in a
    with pytest.raises(ValueError, match=r"shape \(3,\) in one mask and \(4,\)"):
        a | ParameterMask({"model.norm.weight": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(ValueError, match="different models"):
        ParameterMask.full(model) & ParameterMask.full(FakeModel(fingerprint="model-b"))
    with pytest.raises(ValueError, match="mask.materialize"):
        a & Mask.full(heads())


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("model.norm.weight", torch.tensor([0.2, 1.0, 0.0]), "other values than 0 and 1"),
        ("model.norm.weight", torch.ones(4), r"shape \(4,\), the parameter has \(3,\)"),
        ("norm.weight", torch.ones(3), "did you mean model.norm.weight"),
        ("model.norm.weight", torch.zeros(3), "select nothing"),
    ],
)
def test_tensors_from_elsewhere_are_checked(name, tensor, message):
    with pytest.raises(ValueError, match=message):
        Mask.from_tensors({name: tensor}, FakeModel())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int8])
def test_tensors_of_zeros_and_ones_of_any_type(dtype):
    mask = Mask.from_tensors({"model.norm.weight": torch.tensor([1, 0, 1]).to(dtype)}, FakeModel())
    assert mask["model.norm.weight"].tolist() == [True, False, True]
    assert mask.recipe == {"method": "from_tensors", "model": "model-a"}


@pytest.mark.parametrize("prefix", ["", "module.", "module.model.", "_orig_mod.module.", "model."])
@pytest.mark.parametrize("form", ["dict", "pairs"])
def test_wagle_files(tmp_path, prefix, form):
    model = FakeModel()
    expected = {name: torch.rand(w.shape) > 0.4 for name, w in model.weights.items()}
    content = {prefix + name: tensor.float() for name, tensor in expected.items()}
    torch.save(content if form == "dict" else list(content.items()), tmp_path / "forget_0.8.pt")
    for given in (model, None):
        mask = Mask.from_wagle(tmp_path / "forget_0.8.pt", given)
        assert all(torch.equal(mask[name], expected[name]) for name in expected)
    assert mask.recipe["file"] == "forget_0.8.pt"


def test_wagle_list_without_names_needs_the_model(tmp_path):
    model = FakeModel()
    tensors = [torch.rand(w.shape) > 0.4 for w in model.weights.values()]
    torch.save(tensors, tmp_path / "mask.pt")
    mask = Mask.from_wagle(tmp_path / "mask.pt", model)
    assert all(torch.equal(mask[name], t) for name, t in zip(model.weights, tensors, strict=True))
    with pytest.raises(ValueError, match="without names; pass the model"):
        Mask.from_wagle(tmp_path / "mask.pt")
    torch.save({"bare": {"deeper": 1}}, tmp_path / "mask.pt")
    with pytest.raises(ValueError, match="expected a dictionary name -> tensor"):
        Mask.from_wagle(tmp_path / "mask.pt")
    # Names without the leading "model." find their parameter.
    torch.save({"norm.weight": torch.ones(3)}, tmp_path / "mask.pt")
    assert list(Mask.from_wagle(tmp_path / "mask.pt", model)) == ["model.norm.weight"]


class Trap:
    def __reduce__(self):
        return (open, (Trap.path, "w"))


def test_code_in_a_wagle_file_is_never_run(tmp_path):
    Trap.path = str(tmp_path / "ran")
    torch.save({"w": Trap()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="Nothing in it was run"):
        Mask.from_wagle(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="no file"):
        Mask.from_wagle(tmp_path / "absent.pt")
