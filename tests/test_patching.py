import pytest
import torch
import transformer_lens.patching as tl
from helpers import ARCHITECTURES

from locus import hooks, patching
from locus.reads import positions_read

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


# All sweeps on one architecture with grouped and one with fused queries; on the others one of each kind of hook.
CASES = [
    (name, sweep)
    for name in ARCHITECTURES
    for sweep in (SWEEPS if name in ("llama", "gpt2") else ("resid_pre", "mlp_out", "attn_head_v_all_pos"))
]


@pytest.mark.parametrize(("any_model", "sweep"), CASES, indirect=["any_model"])
def test_equals_transformer_lens(any_model, sweep):
    clean, corrupted = pair()
    with torch.no_grad():
        _, cache = any_model.bridge.run_with_cache(clean)
        name = f"get_act_patch_{sweep}"
        theirs = getattr(tl, name)(any_model.bridge, corrupted, cache, last_difference)
    before = hooks.count(any_model)
    ours = getattr(patching, name)(any_model, corrupted, cache, last_difference, progress=False)
    assert ours.shape == theirs.shape
    # TransformerLens keeps its results in float32.
    assert (ours - theirs).abs().max() < 1e-6
    assert ours.std() > 1e-4
    assert hooks.count(any_model) == before


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


@pytest.mark.parametrize("metric", [last_difference, every_position])
@pytest.mark.parametrize("max_tokens", [11, 4096])
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
    import pandas as pd

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
    answer = torch.tensor([1, 2])
    last = [
        lambda x: (x[:, -1, 5] - x[:, -1, 6]).mean(),
        lambda x: x[:, -1].log_softmax(-1).gather(-1, answer[:, None]).sum(),
        lambda x: torch.unbind(x, 1)[-1].argmax(-1).sum(),
    ]
    every = [
        lambda x: x.log_softmax(-1)[:, -1].sum(),
        lambda x: x.roll(1, 0)[:, -2:].argmax(-1).sum(),
        lambda x: torch.as_tensor(x.numpy().mean()),
    ]
    some = [
        lambda x: (x[:, -2:].argmax(-1) == 3).sum(),
        lambda x: x[torch.arange(2), torch.tensor([3, 4]), answer].sum(),
    ]
    assert all(positions_read(metric, logits).tolist() == [4] for metric in last)
    assert all(len(positions_read(metric, logits)) == 5 for metric in every)
    assert all(positions_read(metric, logits).tolist() == [3, 4] for metric in some)


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
    slow = patching.get_act_patch_resid_pre(llama, corrupted, cache, last_difference, progress=False)
    assert torch.allclose(fast, slow)
    assert "one whole forward pass a cell" in capsys.readouterr().err
