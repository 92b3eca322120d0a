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


def test_patching_of_a_model_that_scales_its_logits(cohere):
    tokens = torch.randint(3, 97, (2, 2, 5), generator=torch.Generator().manual_seed(3))
    clean, corrupted = tokens.unbind()

    def metric(logits):
        return (logits[:, -1, 5] - logits[:, -1, 6]).mean()

    ours = patching.get_act_patch_resid_pre(cohere, corrupted, clean, metric, progress=False)
    with torch.no_grad():
        _, cache = cohere.bridge.run_with_cache(clean)
        for layer, position in ((0, 1), (2, 4)):
            name = f"blocks.{layer}.hook_resid_pre"

            def put(x, name=name, position=position):
                return torch.where((torch.arange(5) == position)[:, None], cache[name], x)

            with hooks.edits(cohere, [(name, put)]):
                assert (ours[layer, position] - metric(cohere.logits(corrupted))).abs() < 1e-9


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
