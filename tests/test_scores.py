from dataclasses import dataclass

import numpy as np
import pytest
import torch

from locus.components import Component, Components
from locus.scores import RecordedMethod, Scores, agreement

HEADS = Components(
    tuple(Component(layer, "head", head) for layer in (0, 2) for head in range(4)),
    torch.full((8,), 10, dtype=torch.long),
    "model-a",
)
MLPS = Components((Component(0, "mlp"), Component(2, "mlp")), torch.tensor([100, 100]), "model-a")


@dataclass(frozen=True)
class Patching:
    steps: int = 5
    sites: tuple[str, ...] = ("z", "q")


def scores(seed: int = 0, components: Components = HEADS) -> Scores:
    values = torch.randn(6, len(components), generator=torch.Generator().manual_seed(seed))
    return Scores(values, components, Patching(), "logit_difference", tuple(f"fact {i}" for i in range(6)))


def test_grid_has_each_component_at_its_layer_and_index_and_nan_elsewhere():
    both = scores(components=HEADS + MLPS)
    grid = both.grid("head")
    assert grid.shape == (3, 4)
    assert grid[1].isnan().all()
    for i, component in enumerate(HEADS.items):
        assert grid[component.layer, component.index] == both.values[:, i].mean()
    assert both.grid("mlp").shape == (3, 1)
    with pytest.raises(ValueError, match="no 'neuron' components, only: head, mlp"):
        both.grid("neuron")


def test_top_is_ordered_by_the_mean():
    found = scores().top(3)
    expected = scores().values.mean(0).sort(descending=True).values[:3]
    np.testing.assert_allclose(found["score"], expected)
    assert list(found.columns) == ["component", "score", "standard_error", "parameters"]
    n = scores().values
    best = HEADS.labels.index(found["component"][0])
    assert found["standard_error"][0] == pytest.approx(float(n[:, best].std()) / 6**0.5)


def test_a_saved_file_gives_back_everything(tmp_path):
    before = scores()
    after = Scores.load(before.save(tmp_path / "deep" / "scores.safetensors"))
    assert torch.equal(before.values, after.values)
    assert after.components.items == HEADS.items and after.components.model == "model-a"
    assert torch.equal(after.components.sizes, HEADS.sizes)
    assert (after.metric, after.facts) == (before.metric, before.facts)
    assert repr(after.method) == repr(before.method) == "Patching(steps=5, sites=('z', 'q'))"
    again = Scores.load(after.save(tmp_path / "again.safetensors"))
    assert again.method == after.method and hash(again.method) == hash(after.method)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["scores.safetensors"]


def test_broken_files_are_named(tmp_path):
    path = scores().save(tmp_path / "scores.safetensors")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        Scores.load(path)
    with pytest.raises(ValueError, match="no such file"):
        Scores.load(tmp_path / "absent")


@pytest.mark.parametrize(
    "values, message",
    [
        (torch.zeros(3, 7), r"shape \(3, 7\) for 8 components"),
        (torch.zeros(0, 8), "at least one fact"),
        (torch.tensor([[0.0] * 7 + [float("nan")]]), "not finite, the first for fact 0 and component L2H3"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Scores(values, HEADS, Patching(), "logit_difference")


def test_facts_are_one_label_a_row():
    with pytest.raises(ValueError, match="2 fact labels for 3 rows"):
        Scores(torch.zeros(3, 8), HEADS, Patching(), "probability", ("a", "b"))


def test_other_peoples_scores():
    flat = Scores.from_array(list(range(8)), HEADS, method="WAGLE", metric="loss")
    assert flat.values.shape == (1, 8) and repr(flat.method) == "WAGLE"
    assert flat.top(1)["component"][0] == "L2H3"
    assert flat.top(1)["standard_error"].isna().all()
    half = Scores.from_array(torch.ones(2, 8, dtype=torch.bfloat16), HEADS)
    assert half.values.dtype == torch.float32


def test_agreement():
    a = scores(1)
    same = agreement(a, Scores(a.values * 3 + 1, HEADS, Patching(), "other"), fraction=0.25)
    assert same.spearman == pytest.approx(1) and same.pearson == pytest.approx(1)
    assert (same.overlap, same.chance, same.n) == (1.0, 0.25, 8)
    opposite = agreement(a, Scores(-a.values, HEADS, Patching(), "other"), fraction=0.5)
    assert opposite.spearman == pytest.approx(-1) and opposite.overlap == 0
    assert np.isnan(agreement(a, Scores(torch.ones(1, 8), HEADS, Patching(), "flat")).spearman)
    with pytest.raises(ValueError, match="different models"):
        agreement(a, Scores(a.values, Components(HEADS.items, HEADS.sizes, "model-b"), Patching(), "x"))
    with pytest.raises(ValueError, match="components differ"):
        agreement(a, scores(components=HEADS + MLPS))


def test_bootstrap_spreads_as_the_standard_error_and_repeats():
    a = scores()
    samples = a.bootstrap(4000, seed=3)
    torch.testing.assert_close(samples.mean(0), a.mean(), atol=0.03, rtol=0)
    expected = a.values.std(0, correction=0) / 6**0.5
    torch.testing.assert_close(samples.std(0), expected, atol=0, rtol=0.06)
    assert torch.equal(samples, a.bootstrap(4000, seed=3))


def test_frame_and_repr():
    frame = scores(components=HEADS + MLPS).to_frame()
    assert len(frame) == 60 and frame["index"].isna().sum() == 12
    row = frame[(frame.fact == "fact 2") & (frame.component == "L2H1")].iloc[0]
    assert row.score == pytest.approx(float(scores(components=HEADS + MLPS).values[2, 5]))
    assert "8 head components x 6 facts" in repr(scores())
    assert repr(RecordedMethod("X", (("a", 1),))) == "X(a=1)"
