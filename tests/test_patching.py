import os
from functools import partial
from types import SimpleNamespace

import jaxtyping
import numpy as np
import pandas as pd
import pytest
import torch
import transformer_lens.patching as tl
from helpers import ARCHITECTURES, contrast_pairs, tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from locus import hooks, patching
from locus.checked import packs
from locus.models import wrap
from locus.reads import positions_read
from locus.resume import Partial
from locus.sweeps import ablated

SWEEPS = [
    "resid_pre",
    "resid_mid",
    "attn_out",
    "mlp_out",
    "attn_head_out_by_pos",
    "attn_head_q_by_pos",
    "attn_head_k_by_pos",
    "attn_head_v_by_pos",
    "attn_head_pattern_by_pos",
    "attn_head_out_all_pos",
    "attn_head_q_all_pos",
    "attn_head_k_all_pos",
    "attn_head_v_all_pos",
    "attn_head_pattern_all_pos",
]


def pair(n=2, pos=5):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 97, (2, n, pos), generator=generator).unbind()


def last_difference(logits):
    return (logits[:, -1, 5] - logits[:, -1, 6]).mean()


def every_position(logits):
    return logits.log_softmax(-1)[:, :, 7].sum()


# All sweeps with grouped and with fused queries; on the others those that the two `every` are made of.
EVERY = ["block_every", "attn_head_all_pos_every"]
ALL = [*SWEEPS, "attn_head_by_pos_every", "attn_head_pattern_dest_src_pos"]
CASES = [(name, sweep) for name in ARCHITECTURES for sweep in (ALL if name in ("llama", "gpt2") else EVERY)]


@pytest.fixture
def float64_results():
    """TransformerLens keeps its results in the default type of numbers."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("any_model", "sweep"), CASES, indirect=["any_model"])
def test_equals_transformer_lens(any_model, sweep, float64_results):
    clean, corrupted = pair(pos=3 if "dest_src" in sweep else 5)
    with torch.no_grad():
        _, cache = any_model.bridge.run_with_cache(clean)
        name = f"get_act_patch_{sweep}"
        theirs = getattr(tl, name)(any_model.bridge, corrupted, cache, last_difference)
    before = hooks.count(any_model)
    ours = getattr(patching, name)(any_model, corrupted, cache, last_difference, progress=False)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-9
    assert ours.std() > 1e-4
    assert hooks.count(any_model) == before


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_equals_transformer_lens_in_float32(name):
    model = wrap(ARCHITECTURES[name]().float(), tokenizer(), name)
    clean, corrupted = pair()
    with torch.no_grad():
        _, cache = model.bridge.run_with_cache(clean)
        theirs = tl.get_act_patch_block_every(model.bridge, corrupted, cache, last_difference)
    ours = patching.get_act_patch_block_every(model, corrupted, cache, last_difference, progress=False)
    assert ours.dtype == torch.float32 and (ours - theirs).abs().max() < 1e-4


def test_every_name_of_transformer_lens_is_here():
    names = {name for name in vars(tl) if name.startswith("get_act_patch_") or name.endswith("_patch_setter")}
    assert len(names) >= 26 and names <= set(vars(patching))


class Padded:
    """A bridge whose runs have an attention mask, for TransformerLens' functions, which know of none."""

    def __init__(self, model, mask):
        self.model, self.mask, self.cfg = model, mask, model.cfg

    def __getattr__(self, name):
        return getattr(self.model.bridge, name)

    def run_with_hooks(self, tokens, fwd_hooks):
        with hooks.finite_masks(self.model):
            return self.model.bridge.run_with_hooks(tokens, fwd_hooks=fwd_hooks, attention_mask=self.mask.long())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_pairs_equal_transformer_lens(any_model, side, float64_results):
    pairs = contrast_pairs(3, side)
    clean, corrupted, mask = pairs.clean, pairs.corrupted, pairs.attention_mask

    def metric(logits):
        read = logits[torch.arange(3), pairs.read[:, 0]]
        return (read[:, 5] - read[:, 6]).mean()

    with torch.no_grad():
        names = [f"blocks.{k}.{n}" for k in range(3) for n in ("hook_resid_pre", "attn.hook_v", "hook_mlp_out")]
        with hooks.capture(any_model, names) as cache:
            any_model.logits(clean, mask)
        for sweep in ("resid_pre", "attn_head_v_all_pos", "mlp_out"):
            name = f"get_act_patch_{sweep}"
            theirs = getattr(tl, name)(Padded(any_model, mask), corrupted, cache, metric)
            options = {"attention_mask": mask, "progress": False}
            ours = getattr(patching, name)(any_model, corrupted, cache, metric, **options)
            assert (ours - theirs).abs().max() < 1e-9, sweep
            # The clean tokens do as well as their cache.
            assert torch.equal(ours, getattr(patching, name)(any_model, corrupted, clean, metric, **options))


@pytest.mark.parametrize(("name", "component"), [("gpt2", "q"), ("gpt2", "k"), ("gpt2", "v"), ("qwen3", "q")])
def test_direct_paths_equal_transformer_lens(name, component, float64_results):
    model = wrap(ARCHITECTURES[name]().double(), tokenizer(), name)
    clean, corrupted = pair()
    with torch.no_grad():
        caches = [model.bridge.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
        arguments = (corrupted, *caches, last_difference)
        theirs = tl.get_act_patch_direct_path(model.bridge, *arguments, 0, 1, component, verbose=False)
        ours = patching.get_act_patch_direct_path(model, *arguments, 0, 1, component, verbose=False)
        assert (ours - theirs).abs().max() < 1e-9 and ours[1:].std() > 1e-5
        if component == "v":
            theirs = tl.get_act_patch_direct_path_all_sources(model.bridge, *arguments, "v", False)
            ours = patching.get_act_patch_direct_path_all_sources(model, *arguments, "v", False)
            assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-9
        if name == "qwen3":
            with pytest.raises(ValueError, match="GQA"):
                patching.get_act_patch_direct_path(model, *arguments, 0, 1, "k", verbose=False)


def one_by_one(model, corrupted, cache, metric, mask=None):
    """The obviously right twin: one whole forward pass a cell."""
    n_layers, pos = model.cfg.n_layers, corrupted.shape[1]
    out = torch.zeros(n_layers, pos, dtype=torch.float64)
    for layer in range(n_layers):
        for p in range(pos):
            name = f"blocks.{layer}.hook_resid_pre"

            def edit(act, p=p, name=name):
                act = act.clone()
                act[:, p] = cache[name][:, p]
                return act

            with torch.no_grad(), hooks.edits(model, [(name, edit)]):
                out[layer, p] = metric(model.logits(corrupted, mask))
    return out


@pytest.mark.parametrize(("metric", "max_tokens"), [(last_difference, 4096), (every_position, 11)])
def test_equals_one_by_one_in_float64(any_model, metric, max_tokens):
    clean, corrupted = pair()
    with torch.no_grad():
        _, cache = any_model.bridge.run_with_cache(clean)
    ours = patching.get_act_patch_resid_pre(any_model, corrupted, cache, metric, max_tokens=max_tokens, progress=False)
    assert ours.dtype == torch.float64
    slow = one_by_one(any_model, corrupted, cache, metric)
    assert (ours - slow).abs().max() < 1e-9


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_its_prompts_alone(any_model, side):
    clean, corrupted = pair(3, 6)
    lengths = [6, 4, 5]
    mask = torch.zeros(3, 6, dtype=torch.bool)
    for i, n in enumerate(lengths):
        mask[i, slice(-n, None) if side == "left" else slice(n)] = True
    last = mask.float().cumsum(1).argmax(1)
    clean, corrupted = clean.masked_fill(~mask, 1), corrupted.masked_fill(~mask, 1)

    def metric(logits):
        at = logits[torch.arange(len(logits)), last]
        return at[:, 5] - at[:, 6]

    from locus.localize.interventions import activations

    attn = any_model.components("attn")
    cache = activations(any_model, clean, mask, attn)
    together = patching.get_act_patch_attn_out(
        any_model, corrupted, cache, metric, attention_mask=mask, reduce="none", progress=False
    ).values
    for i, n in enumerate(lengths):
        span = mask[i]
        with torch.no_grad():
            _, own = any_model.bridge.run_with_cache(clean[i : i + 1, span])
        alone = patching.get_act_patch_attn_out(
            any_model, corrupted[i : i + 1, span], own, last_difference, progress=False
        )
        assert (together[:, span, i] - alone).abs().max() < 1e-6, (i, n)


def test_nothing_and_everything(any_model):
    clean, corrupted = pair()
    assert any_model.fast and any_model.packed  # else the other tests would be about the slow paths
    with torch.no_grad():
        _, same = any_model.bridge.run_with_cache(corrupted)
        _, cache = any_model.bridge.run_with_cache(clean)
        base = last_difference(any_model.logits(corrupted))
        target = last_difference(any_model.logits(clean))
    nothing = patching.get_act_patch_mlp_out(any_model, corrupted, same, last_difference, progress=False)
    assert (nothing - base).abs().max() < 1e-9

    def all_positions(act, index, clean_act):
        return clean_act.clone()

    everything = patching.generic_activation_patch(
        any_model, corrupted, cache, last_difference, all_positions, "resid_pre", ("layer",), progress=False
    )
    assert (everything - target).abs().max() < 1e-9


def test_options_of_transformer_lens(llama):
    clean, corrupted = pair()
    with torch.no_grad():
        _, cache = llama.bridge.run_with_cache(clean)
    frame = pd.DataFrame({"layer": [2, 0], "pos": [1, 4]})
    arguments = dict(patch_setter=tl.layer_pos_patch_setter, activation_name="resid_pre")

    def per_example(logits):
        return logits[:, -1, 5] - logits[:, -1, 6]

    flat = patching.generic_activation_patch(
        llama, corrupted, cache, last_difference, **arguments, index_df=frame, progress=False
    )
    full = patching.get_act_patch_resid_pre(llama, corrupted, cache, last_difference, progress=False)
    assert torch.allclose(flat, full[[2, 0], [1, 4]])
    several = patching.get_act_patch_resid_pre(
        llama,
        corrupted,
        cache,
        {"one": per_example, "two": lambda logits: -per_example(logits)},
        reduce="none",
        baseline=True,
        progress=False,
    )
    assert several.values.shape == (2, 3, 5, 2) and several.baseline.shape == (2, 2)
    assert torch.allclose(several["one"].mean(), full)
    assert torch.allclose(several["one"].effect(), -several["two"].effect())
    arguments = (corrupted, cache, {"one": per_example, "two": per_example})
    options = {"reduce": "none", "baseline": True}
    with torch.no_grad():
        theirs = tl.get_act_patch_attn_head_all_pos_every(llama.bridge, *arguments, **options)
    ours = patching.get_act_patch_attn_head_all_pos_every(llama, *arguments, **options, progress=False)
    for name in ("axis_names", "metric_names", "reduced", "has_metric_axis", "patch_type_names"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.index_df.equals(theirs.index_df) and ours.values.shape == theirs.values.shape
    assert (ours.values - theirs.values).abs().max() < 1e-6 and (ours.baseline - theirs.baseline).abs().max() < 1e-6
    bridge_too = patching.get_act_patch_resid_pre(llama.bridge, corrupted, cache, last_difference, progress=False)
    assert torch.allclose(bridge_too, full)


def test_a_metric_that_is_blind_to_nan_is_read_where_it_reads(llama):
    """Greedy accuracy at the last two positions: the arg-max of a NaN is a token like any other."""
    found = []
    for seed in range(6):
        clean, corrupted = torch.randint(3, 97, (2, 1, 5), generator=torch.Generator().manual_seed(seed)).unbind()
        with torch.no_grad():
            logits, cache = llama.bridge.run_with_cache(clean)
            wanted = logits.argmax(-1)[:, -2:]

            def right(logits, wanted=wanted):
                return (logits[:, -2:].argmax(-1) == wanted).double().prod(-1).mean()

            theirs = tl.get_act_patch_resid_pre(llama.bridge, corrupted, cache, right)
        ours = patching.get_act_patch_resid_pre(llama, corrupted, cache, right, progress=False)
        assert torch.equal(ours, theirs.to(ours))
        found.append(float(theirs.max()))
    assert max(found) == 1


def test_only_the_last_position_is_unembedded_where_only_that_is_read():
    logits = torch.randn(2, 5, 7)
    answer, token = torch.tensor([1, 2]), torch.tensor(3)
    last = [
        lambda x: (x[:, -1, 5] - x[:, -1, 6]).mean(),
        lambda x: (x[0, -1, 5] - x[0, -1, 6]).item(),
        lambda x: x[:, -1].log_softmax(-1).gather(-1, answer[:, None]).sum(),
        lambda x: torch.unbind(x, 1)[-1].argmax(-1).sum(),
        lambda x: x[0, -1, token],
        lambda x: x[0, -1].tolist()[3],
        lambda x: x[:, -1].sub_(1)[0, 3],
    ]
    every = [
        lambda x: x.log_softmax(-1)[:, -1].sum(),
        lambda x: x.roll(1, 0)[:, -2:].argmax(-1).sum(),
        lambda x: x.numpy().mean(),
        lambda x: x[0, -1, 3] + float(x.numpy()[0, 2, 1]),
        lambda x: x[0, -1, 3] + float(np.asarray(x)[0, 2, 1]),
        lambda x: x[0, -1, 3] + float(torch.utils.dlpack.from_dlpack(x)[0, 2, 1]),
        lambda x: x.sub_(x.mean(-1, keepdim=True))[0, -1, 3],
        # Another position on another run: it depends on what is read.
        lambda x: x[0, int(x[0, -1].argmax()) % 5, 2],
        lambda x: x[0, x[0, -1].argmax() % 5, 2],
        lambda x: x[0, -1, 3] if x[0, -1, 3] > x[0, -1, 4] else x[0, 2, 3],
        lambda x: x[0, x[0, -1].tolist().index(max(x[0, -1].tolist())) % 5, 2],
    ]
    some = [
        lambda x: (x[:, -2:].argmax(-1) == 3).sum(),
        lambda x: x[torch.arange(2), torch.tensor([3, 4]), answer].sum(),
        lambda x: torch.as_tensor(x[0, 3:].tolist()).sum(),
    ]

    def read(metric):
        before = logits.clone()
        found = positions_read(lambda x: torch.stack([torch.as_tensor(metric(x))]), logits).tolist()
        assert torch.equal(logits, before)
        return found

    assert [read(metric) for metric in last] == [[4]] * len(last)
    assert [len(read(metric)) for metric in every] == [5] * len(every)
    assert [read(metric) for metric in some] == [[3, 4]] * len(some)


def test_metrics_that_write_leave_torch_or_choose_by_the_data_equal_transformer_lens(llama):
    clean, corrupted = pair()
    metrics = {
        "in place": lambda x: x.sub_(x.mean(-1, keepdim=True))[:, -1, 5].sum(),
        "mixed": lambda x: x[0, -1, 5] + float(x.numpy()[1, 2, 6]),
        "by data": lambda x: x[0, int(x[0, -1].argmax()) % 5, 5],
        "whole numbers": lambda x: (x[:, -2:].argmax(-1) % 7).sum(),
    }
    with torch.no_grad():
        _, cache = llama.bridge.run_with_cache(clean)
        for name, metric in metrics.items():
            theirs = tl.get_act_patch_resid_pre(llama.bridge, corrupted, cache, metric)
            ours = patching.get_act_patch_resid_pre(llama, corrupted, cache, metric, progress=False)
            assert (ours - theirs).abs().max() < 1e-5, name
    right = lambda x: x[:, -1].argmax(-1) == 5  # noqa: E731
    found = patching.get_act_patch_resid_pre(llama, corrupted, cache, right, reduce="mean", progress=False)
    assert found.is_floating_point() and found.shape == (3, 5)


def test_bad_requests_say_what_is_expected(llama, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside the tests
    clean, corrupted = pair()
    setter = tl.layer_pos_patch_setter

    def sweep(
        tokens=corrupted,
        source=clean,
        metric=last_difference,
        frame=None,
        axes=("layer", "pos"),
        setter=setter,
        **options,
    ):
        axes = axes if frame is None else None
        frame = pd.DataFrame(frame) if isinstance(frame, dict) else frame
        return patching.generic_activation_patch(
            llama, tokens, source, metric, setter, "resid_pre", axes, frame, **options, progress=False
        )

    with torch.no_grad():
        _, cache = llama.bridge.run_with_cache(torch.cat([clean, clean[:1]]))
    requests = [
        (
            {"attention_mask": torch.ones(2, 4, dtype=torch.bool)},
            r"attention_mask must be as .* \[2, 5\], got \[2, 4\]",
        ),
        ({"attention_mask": torch.zeros(2, 5, dtype=torch.bool)}, "hides every token"),
        ({"source": clean[:1]}, r"clean tokens must be as .* \[2, 5\], got \[1, 5\]"),
        ({"source": cache}, "clean cache is of 3 prompts and there are 2"),
        ({"tokens": corrupted[0]}, r"are \[batch, pos\].* got \[5\]"),
        ({"tokens": corrupted[:, :0]}, r"at least one token, got \[2, 0\]"),
        *(({"positions": x}, "at least one set of positions") for x in ([], 5, "ab")),
        *(({"positions": [x, x]}, r"each set of positions is several, like \[\[0, 1\]") for x in (0, slice(2), "ab")),
        ({"positions": [[True]]}, "positions are whole numbers from -5 to 4 here, got True"),
        ({"tokens": corrupted.tolist()}, r"must be a tensor \[batch, pos\], got a list"),
        *(({"source": x}, "clean_cache must be a cache.* got a ") for x in (None, clean.tolist())),
        ({"frame": [[0, 0]]}, "index_df must be a DataFrame with a row for each cell, got a list"),
        ({"axes": ("layer", "layer")}, "index_axis_names must be different axes"),
        *(({"axes": x}, "index_axis_names must be different axes") for x in ((), 5, "layer")),
        ({"axes": (0, 1)}, "unknown axes 0, 1"),
        ({"resume": ""}, "resume must be the name of a file"),
        *(
            ({"tokens": x}, "corrupted_tokens must be whole numbers from 0 to 96")
            for x in (corrupted * 1.0, corrupted - 99)
        ),
        ({"source": clean + 97}, "clean tokens must be whole numbers"),
        ({"attention_mask": np.ones((2, 4), dtype=bool)}, "attention_mask must be a tensor"),
        *(({"metric": x}, "metric .* must be a function of the logits") for x in (None, "a", {"a": None})),
        ({"setter": None}, "patch_setter must be a function"),
        ({"metric": lambda x: last_difference(x) * 1j}, "returned complex numbers"),
        *(({"max_tokens": x}, f"max_tokens must be a whole number, 1 or more, got {x}") for x in (1.5, 0)),
        ({"seed": "a"}, "seed must be a whole number, 0 or more, got 'a'"),
        ({"resume": True}, "resume must be the name of a file, got True"),
        ({"positions": [[9]]}, "positions are whole numbers from -5 to 4 here, got 9"),
        ({"positions": [[0.5]]}, "got 0.5"),
        ({"positions": torch.ones(1, 2, 4, dtype=torch.bool)}, r"\[set, 2, 5\], got bool \[1, 2, 4\]"),
        ({"positions": torch.ones(1, 2, 5)}, "got float32"),
        ({"frame": {"layer": [], "pos": []}}, "at least one row"),
        ({"frame": {"pos": [0], "layer": [0]}}, "`layer` as the first column; got 1 rows, pos, layer"),
        ({"frame": {"layer": [99], "pos": [0]}}, "layer of index_df are whole numbers from 0 to 2 here, got 99"),
        ({"frame": {"layer": [-1], "pos": [0]}}, "got -1"),
        ({"frame": {"layer": [0], "pos": [5]}}, "pos of index_df .* got 5"),
        ({"metric": lambda x: None}, "returned NoneType"),
        *(({"window": x}, f"window must be a whole number, 1 or more, got {x}") for x in (0, 1.5, True)),
    ]
    for options, message in requests:
        with pytest.raises(ValueError, match=message):
            sweep(**options)


def test_bad_direct_paths(llama, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    clean, corrupted = pair()
    with torch.no_grad():
        caches = [llama.bridge.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
    for options, message in (
        ({"src_layer": 3}, "src_layer are whole numbers from 0 to 2 here, got 3"),
        ({"src_head": -1}, "src_head are whole numbers from 0 to 3 here, got -1"),
        ({"patching_metric": {"a": last_difference}}, "takes one metric, a function of the logits"),
        ({"component": "z"}, "component must be 'q', 'k' or 'v', got 'z'"),
        ({"window": 3}, "takes .*; it does not take window"),
        ({"baseline": True, "seed": 1}, "it does not take baseline, seed"),
        ({"reduce": "none"}, "it does not take reduce='none'"),
    ):
        given = {"patching_metric": last_difference, "src_layer": 0, "src_head": 0, **options}
        with pytest.raises(ValueError, match=message):
            patching.get_act_patch_direct_path(llama, corrupted, *caches, **given, verbose=False)


def test_sets_of_positions_may_be_lists_tensors_and_arrays(llama, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    clean, corrupted = pair()
    masks = torch.zeros(2, 2, 5, dtype=torch.bool)
    masks[0, :, :2] = masks[1, :, 3] = True
    same = [[[0, 1], [3]], ((0, 1), range(3, 4)), [torch.tensor([0, 1]), np.array([3])], masks, masks.numpy()]
    found = [
        patching.get_act_patch_resid_pre(llama, corrupted, clean, last_difference, positions=positions, progress=False)
        for positions in same
    ]
    assert all(torch.equal(x, found[0]) for x in found)


def test_bad_requests(llama):
    clean, corrupted = pair()
    with torch.no_grad():
        _, cache = llama.bridge.run_with_cache(clean)
    before = hooks.count(llama)
    with pytest.raises(ValueError, match="must return a scalar"):
        patching.get_act_patch_resid_pre(llama, corrupted, cache, lambda x: x[:, -1, 0], progress=False)
    with pytest.raises(ValueError, match="reduce must be"):
        patching.get_act_patch_resid_pre(llama, corrupted, cache, last_difference, reduce="sum", progress=False)
    with pytest.raises(ValueError, match="clean cache is of 5 positions and the corrupted tokens have 4"):
        patching.get_act_patch_resid_pre(llama, corrupted[:, :4], cache, last_difference, progress=False)
    with pytest.raises(ZeroDivisionError):

        def broken(act, index, clean_act):
            raise ZeroDivisionError

        patching.generic_activation_patch(
            llama, corrupted, cache, last_difference, broken, "z", ("layer",), progress=False
        )
    assert hooks.count(llama) == before


def test_slow_path_is_used_and_said(llama, monkeypatch, capsys):
    clean, corrupted = pair()
    with torch.no_grad():
        _, cache = llama.bridge.run_with_cache(clean)
    fast = patching.get_act_patch_resid_pre(llama, corrupted, cache, last_difference, progress=False)
    monkeypatch.setattr(llama, "fast", False)
    monkeypatch.setattr(llama, "name", "a model that cannot be continued")
    slow = patching.get_act_patch_resid_pre(llama, corrupted, cache, last_difference, progress=False)
    assert torch.allclose(fast, slow)
    assert "one whole forward pass a cell" in capsys.readouterr().err


def test_whole_rows_are_computed_and_it_is_said_where_nothing_can_be_left_out(llama, monkeypatch, capsys):
    clean, corrupted = pair()
    fast = patching.get_act_patch_attn_out(llama, corrupted, clean, last_difference, progress=False)
    monkeypatch.setattr(llama, "packed", False)
    monkeypatch.setattr(llama, "name", "a model that looks ahead")
    for _ in range(2):
        slow = patching.get_act_patch_attn_out(llama, corrupted, clean, last_difference, progress=False)
        assert (fast - slow).abs().max() < 1e-12
    assert capsys.readouterr().err.count("whole rows are computed") == 1


def test_a_model_that_looks_ahead_is_found_out(llama, tokens):
    assert llama.fast and llama.packed and packs(llama, tokens)
    point = llama.bridge.hook_dict["blocks.1.hook_out"]
    handle = point.register_forward_hook(lambda module, args, x: x + x.mean(1, keepdim=True))
    try:
        assert not packs(llama, tokens)
    finally:
        handle.remove()


def test_only_what_a_patch_can_change_is_computed(llama, monkeypatch):
    """Prompts that differ from position 3 on: nothing is run for the cells before, and few tokens for the others."""
    clean, _ = pair(1, 6)
    corrupted = clean.clone()
    corrupted[:, 3] += 1
    computed = []
    grown = hooks.Trace.grown

    def counted(self, starts, read):
        computed.extend(6 - first for start in starts.values() for first in start.first.tolist())
        return grown(self, starts, read)

    monkeypatch.setattr(hooks.Trace, "grown", counted)
    found = patching.get_act_patch_resid_pre(llama, corrupted, clean, last_difference, progress=False)
    assert sorted(computed) == [1, 1, 2, 2, 3, 3, 3]  # at layer 0, positions 4 and 5 are the same token in both
    base = last_difference(llama.logits(corrupted))
    assert (found[:, :3] - base).abs().max() < 1e-12 and (found[0, 4:] - base).abs().max() < 1e-12


def windowed(model, base, clean, mask, layers, name, at):
    """Twin of `window` and `positions`: the metric with an activation of several layers replaced at some positions."""
    names = [f"blocks.{layer}.{name}" for layer in layers]
    with torch.no_grad():
        with hooks.capture(model, names) as cache:
            model.logits(clean, mask)

        def put(name):
            return lambda x: torch.where(at.reshape(*at.shape, *[1] * (x.ndim - 2)), cache[name], x)

        with hooks.edits(model, [(name, put(name)) for name in names]):
            return last_difference(model.logits(base, mask))


@pytest.mark.parametrize(
    ("sweep", "packed"), [("resid_pre", True), ("mlp_out", True), ("mlp_out", False), ("attn_head_v_all_pos", True)]
)
def test_windows_of_layers(any_model, sweep, packed, monkeypatch):
    clean, corrupted = pair()
    monkeypatch.setattr(any_model, "packed", packed)
    name = f"get_act_patch_{sweep}"
    options = {"window": 2, "progress": False, "max_tokens": 30}
    ours = getattr(patching, name)(any_model, corrupted, clean, last_difference, **options)
    if sweep == "attn_head_v_all_pos":
        monkeypatch.setattr(any_model, "fast", False)
        slow = getattr(patching, name)(any_model, corrupted, clean, last_difference, **options)
        assert (ours - slow).abs().max() < 1e-9
        return
    for layer, p in ((0, 4), (1, 0), (2, 3)):
        at = torch.zeros(2, 5, dtype=torch.bool)
        at[:, p] = True
        layers = range(max(0, layer - 1), layer + 1)
        expected = windowed(any_model, corrupted, clean, None, layers, f"hook_{sweep}", at)
        assert (ours[layer, p] - expected).abs() < 1e-9


def test_sets_of_positions(llama):
    clean, corrupted = pair()
    sets = [[1, 2], [4], []]
    ours = patching.get_act_patch_mlp_out(
        llama, corrupted, clean, last_difference, positions=sets, window=3, progress=False
    )
    masks = torch.zeros(3, 2, 5, dtype=torch.bool)
    masks[0, :, 1:3] = masks[1, :, 4] = True
    assert ours.shape == (3, 3)
    for layer, layers in enumerate(([0, 1], [0, 1, 2], [1, 2])):
        for mask, value in zip(masks, ours[layer], strict=True):
            assert (value - windowed(llama, corrupted, clean, None, layers, "hook_mlp_out", mask)).abs() < 1e-9
    masks[0, 1] = masks[0, 1].flip(0)  # another span in each prompt
    ours = patching.get_act_patch_mlp_out(llama, corrupted, clean, last_difference, positions=masks, progress=False)
    expected = windowed(llama, corrupted, clean, None, [1], "hook_mlp_out", masks[0])
    assert (ours[1, 0] - expected).abs() < 1e-9
    with pytest.raises(ValueError, match="need an axis 'pos'"):
        patching.get_act_patch_attn_head_out_all_pos(
            llama, corrupted, clean, last_difference, positions=sets, progress=False
        )


def test_neurons_and_ablations(llama):
    clean, corrupted = pair(4)
    name = "blocks.1.mlp.hook_post"
    with torch.no_grad(), hooks.capture(llama, [name]) as found:
        llama.logits(corrupted)
    mask = torch.ones(4, 5, dtype=torch.bool)
    for source in ("zero", "mean", "resample"):
        ours = patching.get_act_patch_mlp_neuron_by_pos(llama, corrupted, source, last_difference, progress=False)
        assert ours.shape == (3, 5, 48)
        new = ablated(found[name], mask, source)
        expected = {
            "zero": torch.zeros(4, 5, 48).double(),
            "mean": found[name].mean((0, 1)).expand(4, 5, 48),
            "resample": new,
        }[source]
        assert (new - expected).abs().max() < 1e-12
        for p, neuron in ((0, 7), (3, 40)):

            def put(x, p=p, neuron=neuron, new=new):
                x = x.clone()
                x[:, p, neuron] = new[:, p, neuron]
                return x

            with torch.no_grad(), hooks.edits(llama, [(name, put)]):
                assert (ours[1, p, neuron] - last_difference(llama.logits(corrupted))).abs() < 1e-9
    with pytest.raises(ValueError, match="can be set to 'zero' only"):
        patching.get_act_patch_attn_head_pattern_all_pos(llama, corrupted, "mean", last_difference, progress=False)


def test_noising_is_the_other_way_round(llama):
    """One head's clean value put into the corrupted run, and its corrupted value into the clean run."""
    clean, corrupted = pair()
    noised = patching.get_act_patch_attn_head_out_all_pos(llama, clean, corrupted, last_difference, progress=False)
    name = "blocks.2.attn.hook_z"
    with torch.no_grad():
        with hooks.capture(llama, [name]) as found:
            llama.logits(corrupted)
        edit = lambda z: torch.cat([found[name][:, :, :1], z[:, :, 1:]], 2)  # noqa: E731
        with hooks.edits(llama, [(name, edit)]):
            assert (noised[2, 0] - last_difference(llama.logits(clean))).abs() < 1e-9


def test_an_interrupted_sweep_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    model = wrap(ARCHITECTURES["llama"]().float(), tokenizer(), "llama")
    clean, corrupted = pair()
    monkeypatch.setattr("locus.resume.SECONDS", 0.0)
    put, state = Partial.put, SimpleNamespace(calls=0, stop=None)

    def counted(*args):
        if state.calls == state.stop:
            raise KeyboardInterrupt
        state.calls += 1
        put(*args)

    monkeypatch.setattr(Partial, "put", counted)

    def sweep(path, tokens=clean):
        state.calls = 0
        return patching.get_act_patch_resid_pre(
            model, corrupted, tokens, last_difference, resume=path, max_tokens=20, progress=False
        )

    path = tmp_path / "sweep.safetensors"
    whole = sweep(None)
    every = state.calls
    state.stop = every - 3
    with pytest.raises(KeyboardInterrupt):
        sweep(path)
    state.stop = None
    assert torch.equal(sweep(path), whole) and state.calls < every - 4
    other = sweep(path, clean + 1)  # beside the first one, in the same file
    assert torch.equal(other, sweep(None, clean + 1)) and not torch.equal(other, whole)
    assert torch.equal(sweep(path), whole) and state.calls == 0
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


def set_to(value):
    def setter(activation, index, clean):
        activation[:, index[1]] = value
        return activation

    return setter


def scaled(by, power=1):
    return lambda logits: by * (logits[:, -1, 5] - logits[:, -1, 6]).mean() ** power


def accuracy(answer):
    return lambda logits: (logits[:, -1].argmax(-1) == answer).double().mean()


def test_a_kept_sweep_is_taken_for_no_other_one(llama, tmp_path):
    """Whatever tells two sweeps apart: sets of positions, the setter, a metric that agrees on the corrupted run."""
    clean, corrupted = pair()
    with torch.no_grad():
        zero = last_difference(llama.logits(corrupted))

    def sweep(path, metric=last_difference, setter=tl.layer_pos_patch_setter, positions=None, **options):
        return patching.generic_activation_patch(
            *(llama, corrupted, clean, metric, setter, "resid_pre", ("layer", "pos")),
            **{"positions": positions, "resume": path, "progress": False, **options},
        )

    sweeps = [
        {},
        {"positions": [[0], [1]]},
        {"positions": [[2], [3]]},
        {"setter": set_to(0.0)},
        {"setter": set_to(1.0)},
        {"metric": lambda logits: last_difference(logits) - zero},
        {"metric": lambda logits: 2 * (last_difference(logits) - zero)},
        {"metric": scaled(1.0)},
        {"metric": partial(scaled(2.0))},
        {"metric": accuracy(5)},
        {"metric": accuracy(int(llama.logits(clean)[0, -1].argmax()))},
        {"metric": {"a": last_difference, "b": scaled(1.0, 2)}},
        {"window": 2},
        {"attention_mask": torch.tensor([[True] * 5, [False] + [True] * 4])},
    ]
    path = tmp_path / "kept"
    for options in sweeps:
        results = [sweep(None, **options), sweep(path, **options), sweep(path, **options)]
        expected, found, again = (x if isinstance(x, torch.Tensor) else x.values for x in results)
        assert torch.equal(found, expected) and torch.equal(again, expected), options
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 2 * len(sweeps)
    for every in (patching.get_act_patch_block_every, patching.get_act_patch_attn_head_all_pos_every):
        expected = every(llama, corrupted, clean, last_difference, progress=False)
        for _ in range(2):
            found = every(llama, corrupted, clean, last_difference, progress=False, resume=path)
            assert torch.equal(found, expected)


def test_kept_numbers_that_do_not_come_out_again_are_dropped(llama, tmp_path, monkeypatch, capsys):
    """No record holds all that a setter or a metric may read, so some of what is kept is computed again."""
    clean, corrupted = pair()

    def setter(activation, index, clean_activation):
        activation[:, index[1]] = float(os.environ["SCALE"]) * clean_activation[:, index[1]]
        return activation

    def sweep(path):
        return patching.generic_activation_patch(
            *(llama, corrupted, clean, last_difference, setter, "resid_pre", ("layer", "pos")),
            **{"resume": path, "progress": False},
        )

    for scale, anew in (("1", False), ("2", True), ("2", False)):
        monkeypatch.setenv("SCALE", scale)
        assert torch.equal(sweep(tmp_path / "kept"), sweep(None))
        assert ("keeps other numbers" in capsys.readouterr().err) == anew


def test_only_files_of_sweeps_are_written_to(llama, tmp_path):
    clean, corrupted = pair()
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_bytes(b"garbage" * 9)
    (tmp_path / "folder").mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="cannot be written"):
        patching.get_act_patch_resid_pre(llama, corrupted, clean, last_difference, resume=tmp_path / "empty" / "x")
    for name in ("empty", "garbage", "folder", "weights"):
        with pytest.raises(ValueError, match=f"{name} is no file of an interrupted sweep"):
            patching.get_act_patch_resid_pre(
                llama, corrupted, clean, last_difference, resume=tmp_path / name, progress=False
            )
    assert load_file(tmp_path / "weights").keys() == {"weight"}


def test_a_long_sweep_says_beforehand_what_it_takes(llama, monkeypatch, capsys):
    clean, corrupted = pair()
    monkeypatch.setattr("locus.sweeps.LONG", 0.0)
    patching.get_act_patch_mlp_out(llama, corrupted, clean, last_difference, max_tokens=20)
    said = capsys.readouterr().err
    assert "patching mlp_out: 15 cells in " in said and " s and " in said and "GB beside the model" in said
    patching.get_act_patch_mlp_out(llama, corrupted, clean, last_difference, max_tokens=20, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("read", [0, 3])
def test_cells_after_all_that_the_metric_reads_change_nothing(llama, read):
    clean, corrupted = torch.randint(90, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = llama.run_with_cache(clean)

    def metric(logits):
        return logits[:, read, 7].mean()

    found = patching.get_act_patch_resid_pre(llama, corrupted, cache, metric, progress=False, max_tokens=60)
    expected = tl.get_act_patch_resid_pre(llama.bridge, corrupted, cache, metric)
    assert torch.allclose(found.float(), expected, atol=1e-6)  # TransformerLens gives float32
    trace = hooks.trace(llama, corrupted)
    late = hooks.Start(torch.arange(3), enter=lambda x: torch.cat([x[:, :5], x[:, 5:] + 1], 1))
    at = torch.full((3, 1), read)
    assert torch.equal(trace.grown({1: late}, at), hooks.gather(trace.inputs[-1], at))
