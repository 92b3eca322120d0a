"""Models that cannot be continued from an inner layer: every sweep takes whole passes and says so, or refuses."""

import pytest
import torch
import transformers as hf
from helpers import _GROUPED, _random, contrast_pairs, tokenizer
from test_neurons import SOME, chosen, loop, own

import locus as lo
from locus import hooks, patching
from locus.models import wrap
from locus.reads import unembed


@pytest.fixture(scope="module")
def cohere():
    """Scales its logits, which no final norm and unembedding know of."""
    model = _random(hf.CohereForCausalLM, hf.CohereConfig, **_GROUPED, logit_scale=0.3)
    return wrap(model.double(), tokenizer(), "cohere")


def test_neurons_of_a_model_that_scales_its_logits(cohere, capsys):
    assert not cohere.fast
    pairs, neurons = contrast_pairs(padding="right"), chosen(cohere, *SOME)
    found = lo.Knockout(positions="subject").score(cohere, pairs, neurons, lo.logit_difference, False)
    assert (found - loop(*own(cohere), pairs, neurons, positions="subject")).abs().max() < 1e-9
    assert found[:, :4].abs().min() > 1e-9


@pytest.fixture(scope="module")
def bloom():
    """Its biases of attention are by row and head on one axis, so its blocks cannot be run on other rows."""
    model = _random(hf.BloomForCausalLM, hf.BloomConfig, vocab_size=97, hidden_size=32, n_layer=3, n_head=4)
    return wrap(model.double(), tokenizer(), "bloom")


@pytest.mark.parametrize("name", ["cohere", "bloom"])
def test_patching_of_a_model_that_cannot_be_continued(name, request):
    model = request.getfixturevalue(name)
    assert not model.fast
    tokens = torch.randint(3, 97, (2, 2, 5), generator=torch.Generator().manual_seed(3))
    clean, corrupted = tokens.unbind()

    def metric(logits):
        return (logits[:, -1, 5] - logits[:, -1, 6]).mean()

    ours = patching.get_act_patch_resid_pre(model, corrupted, clean, metric, progress=False)
    with torch.no_grad():
        _, cache = model.bridge.run_with_cache(clean)
        for layer, position in ((0, 1), (2, 4)):
            site = f"blocks.{layer}.hook_resid_pre"

            def put(x, site=site, position=position):
                return torch.where((torch.arange(5) == position)[:, None], cache[site], x)

            with hooks.edits(model, [(site, put)]):
                assert (ours[layer, position] - metric(model.logits(corrupted))).abs() < 1e-9


def test_neurons_of_a_model_whose_blocks_cannot_be_run_on_other_rows(bloom):
    pairs, neurons = contrast_pairs(), chosen(bloom, *SOME)
    found = lo.Knockout(positions="subject").score(bloom, pairs, neurons, lo.logit_difference, False)
    assert (found - loop(*own(bloom), pairs, neurons, positions="subject")).abs().max() < 1e-9


def test_attention_that_was_used_before_it_is_shown_is_not_changed():
    """Hugging Face's own attention: TransformerLens lets an edit of its pattern go with a warning."""
    model = _random(hf.GPTJForCausalLM, hf.GPTJConfig, vocab_size=97, n_embd=32, n_layer=3, n_head=4, rotary_dim=8)
    model, pairs = wrap(model, tokenizer(), "gptj"), contrast_pairs()
    before = hooks.count(model)
    with hooks.capture(model, ["blocks.1.attn.hook_pattern"]) as found, torch.no_grad():
        model.logits(pairs.clean)
    assert torch.allclose(found["blocks.1.attn.hook_pattern"].sum(-1), torch.ones(3, 4, 6))
    with pytest.raises(ValueError, match="hook_pattern after it was used: it can be looked at, and not be changed"):
        patching.get_act_patch_attn_head_pattern_all_pos(
            model, pairs.corrupted, pairs.clean, lambda x: x[0, -1, 3], progress=False
        )
    with pytest.raises(ValueError, match="hook_attn_scores after it was used"):
        lo.localize(model, pairs, lo.AttentionKnockout(), components="head", progress=False)
    assert hooks.count(model) == before


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (lo.Knockout(), "neuron"),
        (lo.ActivationPatching(), "kv"),
        (lo.AttentionKnockout(window=2), "head"),
        (lo.CausalTracing(samples=2, window=2), "mlp"),
    ],
)
def test_the_slow_way_gives_the_same(llama, monkeypatch, capsys, method, kind):
    pairs, before = contrast_pairs(padding="left"), hooks.count(llama)
    fast = method.score(llama, pairs, llama.components(kind), lo.logit_difference, False)
    monkeypatch.setattr(llama, "fast", False)
    monkeypatch.setattr(llama, "packed", False)
    monkeypatch.setattr(llama, "name", f"llama for {method}")
    slow = method.score(llama, pairs, llama.components(kind), lo.logit_difference, False)
    assert (fast - slow).abs().max() < 1e-9 and fast.std() > 0
    assert capsys.readouterr().err.count("one whole forward pass a cell") == 1
    assert hooks.count(llama) == before


def test_what_has_no_slow_way_refuses(cohere):
    with pytest.raises(ValueError, match="in another way than by final norm and unembedding"):
        unembed(cohere, torch.zeros(1, 32, dtype=torch.float64))
