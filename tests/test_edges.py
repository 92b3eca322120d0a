import json

import pytest
import torch
from helpers import ARCHITECTURES, contrast_pairs, tokenizer
from test_localize import metric_of, some

from locus import circuit, faithfulness, hooks, save_circuit
from locus.edges import Edge, EdgeScores, edges, entrance, readers
from locus.localize import (
    EAP,
    ActivationPatching,
    AttributionPatching,
    PathPatching,
    localize,
    localize_edges,
    path_patch,
)
from locus.localize.interventions import activations
from locus.models import wrap

HAVE_EDGES = ("gpt2", "llama", "qwen3", "gpt_neox")


@pytest.fixture(scope="module", params=HAVE_EDGES)
def additive(request):
    return wrap(ARCHITECTURES[request.param]().double(), tokenizer(), request.param)


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "gemma3"])
def test_models_without_edges_say_so(name):
    with pytest.raises(ValueError, match="has no edges"):
        edges(wrap(ARCHITECTURES[name]().double(), tokenizer(), name))


def written_by(model, tokens, pairs, sender):
    """What a head or MLP adds to the residual stream, from its own activation and weights."""
    name = f"blocks.{sender.layer}." + ("attn.hook_z" if sender.kind == "head" else "hook_mlp_out")
    with torch.no_grad(), hooks.capture(model, [name]) as found:
        model.logits(tokens, pairs.attention_mask)
    if sender.kind != "head":
        return found[name]
    return found[name][:, :, sender.index] @ model.bridge.blocks[sender.layer].attn.W_O[sender.index]


def one_path(model, pairs, edge):
    """The obviously right twin: the receiver's input from a moved residual stream, then put into the corrupted run."""
    name, receiver = entrance(edge.receiver, model.cfg.n_layers), edge.receiver
    move = written_by(model, pairs.clean, pairs, edge.sender) - written_by(model, pairs.corrupted, pairs, edge.sender)
    move = move.masked_fill(~pairs.attention_mask[:, :, None], 0)
    if not receiver.input:
        with hooks.edits(model, [(name, lambda residual: residual + move)]):
            return metric_of(model, pairs.corrupted, pairs)
    enters = f"blocks.{receiver.component.layer}.ln1.hook_in"
    with (
        torch.no_grad(),
        hooks.edits(model, [(enters, lambda residual: residual + move)]),
        hooks.capture(model, [name]) as moved,
    ):
        model.logits(pairs.corrupted, pairs.attention_mask)

    def put(activation):
        activation = activation.clone()
        activation[:, :, receiver.component.index] = moved[name][:, :, receiver.component.index]
        return activation

    with hooks.edits(model, [(name, put)]):
        return metric_of(model, pairs.corrupted, pairs)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_path_patching_equals_two_hooked_passes(additive, padding):
    pairs, every = contrast_pairs(padding=padding), edges(additive)
    inner = [i for i, edge in enumerate(every) if edge.sender is not None]
    chosen = every.take(torch.tensor(inner[:: len(inner) // 12]))
    kinds = {edge.receiver.input or str(edge.receiver) for edge in chosen}
    assert len(kinds) > 3, kinds
    before = hooks.count(additive)
    scores = localize_edges(additive, pairs, PathPatching(), chosen=chosen, progress=False)
    assert hooks.count(additive) == before
    base = metric_of(additive, pairs.corrupted, pairs)
    for column, edge in enumerate(chosen):
        expected = one_path(additive, pairs, edge) - base
        assert (scores.values[:, column] - expected).abs().max() < 1e-9, edge
        assert torch.allclose(path_patch(additive, pairs, edge.sender, str(edge.receiver)), expected, atol=1e-9)


def test_the_last_mlp_has_one_path(additive):
    pairs, last = contrast_pairs(), additive.cfg.n_layers - 1
    mlp = [c for c in additive.components("mlp") if c.layer == last]
    whole = localize(additive, pairs, ActivationPatching(), components="mlp", progress=False).values[:, -1]
    assert whole.abs().min() > 1e-6
    assert torch.allclose(path_patch(additive, pairs, mlp[0], "logits").float(), whole, atol=1e-6)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_edges_of_a_sender_add_up_to_attribution_patching(additive, direction):
    pairs = contrast_pairs(padding="left")
    chosen = some(additive.components("head")) + some(additive.components("mlp"))
    options = {"components": chosen, "progress": False}
    ours = localize(additive, pairs, EAP(direction=direction), **options).values
    theirs = localize(additive, pairs, AttributionPatching(direction=direction), **options).values
    assert theirs.abs().max() > 1e-3
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_many_steps_of_eap_account_for_the_whole_change(additive):
    pairs = contrast_pairs()
    change = metric_of(additive, pairs.clean, pairs) - metric_of(additive, pairs.corrupted, pairs)
    embedding = [i for i, edge in enumerate(edges(additive)) if edge.sender is None]
    gaps = []
    for steps in (10, 40):
        scores = localize_edges(additive, pairs, EAP(steps=steps), progress=False)
        gaps.append(float((scores.values[:, embedding].sum(1) - change).abs().max()))
    # The sum is a left one, so what it misses falls as 1 / steps.
    assert gaps[1] < gaps[0] / 3 and gaps[1] < 0.1 * float(change.abs().max())


def test_edges_have_labels_and_are_kept(llama, tmp_path):
    every = edges(llama)
    assert len(set(every.labels)) == len(every) and [str(Edge.parse(label)) for label in every.labels[:9]] == [
        str(edge) for edge in every[:9]
    ]
    scores = localize_edges(llama, contrast_pairs(), EAP(), chosen=every.labels[:5], progress=False)
    scores.save(tmp_path / "edges")
    again = EdgeScores.load(tmp_path / "edges")
    assert torch.equal(again.values, scores.values) and again.edges.labels == every.labels[:5]
    for wrong in ("L2H0->L0H1.q", "L0H99->logits"):
        with pytest.raises(ValueError, match="there is no edge"):
            every.select([wrong])
    with pytest.raises(ValueError, match=r"EdgeScores got values of shape \(2, 4\) for 5 edges"):
        EdgeScores(torch.zeros(2, 4), scores.edges, EAP(), "probability")


@pytest.mark.parametrize("what", ["edges", "head", "neuron"])
def test_faithfulness_is_1_of_all_0_of_none_and_what_the_cut_run_says(additive, what):
    pairs = contrast_pairs(padding="right")
    if what == "edges":
        scores = localize_edges(additive, pairs, EAP(), progress=False)
    else:
        scores = localize(additive, pairs, AttributionPatching(), components=what, progress=False)
    found = faithfulness(additive, pairs, scores, fractions=(0.0, 0.5, 1.0), progress=False)
    assert torch.allclose(found.full, metric_of(additive, pairs.clean, pairs))
    assert found.curve[[0, 2]].tolist() == pytest.approx([0, 1])
    assert (found.values[:, 1] - found.full).abs().max() > 1e-4
    if what == "edges":
        assert torch.allclose(found.empty, metric_of(additive, pairs.corrupted, pairs), atol=1e-9)
        return
    corrupted = activations(additive, pairs.corrupted, pairs.attention_mask, scores.components)
    with hooks.edits(additive, [(name, lambda act, new=new: new) for name, new in corrupted.items()]):
        assert torch.allclose(found.empty, metric_of(additive, pairs.clean, pairs), atol=1e-9)


def test_a_circuit_is_drawn_and_written(llama, tmp_path):
    scores = localize_edges(llama, contrast_pairs(), EAP(), progress=False)
    top = circuit(scores, 60)
    assert len(top.edges) <= 60 and set(top.edges.labels) <= set(scores.top(60).edge)
    fed = {head for edge in top.edges for head in readers(top.edges, edge.receiver)}
    assert all(edge.sender is None or edge.sender in fed for edge in top.edges)
    record = json.loads(save_circuit(top, tmp_path / "c.json").read_text())
    assert [edge["key"] for edge in record["edges"]] == list(top.edges.labels)
    assert [edge["score"] for edge in record["edges"]] == pytest.approx(top.mean().tolist())
    drawing = save_circuit(top, tmp_path / "c.svg").read_text()
    assert ">logits<" in drawing and ">embed<" in drawing
    with pytest.raises(ValueError, match=r"end the name in \.html"):
        save_circuit(top, tmp_path / "c.txt")
    with pytest.raises(ValueError, match="no path"):
        circuit(localize_edges(llama, contrast_pairs(), EAP(), chosen=["embed->L0MLP"], progress=False))
