import math
import sys

import pytest
import torch
from helpers import ARCHITECTURES, contrast_pairs
from test_components import kinds
from test_localize import metric_of, some

from locus import HardConcrete, Knockout, Random, Slimming, hooks, load
from locus.inj import inj, sentences, summary
from locus.localize.learned import masked_metric, places
from locus.metrics import log_probability, logit_difference


def test_a_mask_of_ones_is_the_clean_run_and_a_zero_is_a_knockout(any_model):
    equals_knockout(any_model, contrast_pairs(padding="left"))


@pytest.mark.parametrize("padding", [None, "right"])
def test_a_zero_is_a_knockout_however_padded(llama, padding):
    equals_knockout(llama, contrast_pairs(padding=padding))


def test_kinds_that_act_in_one_place_are_multiplied(llama):
    """A factor on a neuron and one on its value vector: the activation has both."""
    pairs, neurons = contrast_pairs(), llama.components("neuron")
    both = neurons + llama.components("value")
    mask = torch.rand(3, len(both), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        found = masked_metric(llama, pairs, places(both), mask, log_probability)
        product = mask[:, : len(neurons)] * mask[:, len(neurons) :]
        expected = masked_metric(llama, pairs, places(neurons), product, log_probability)
    assert (found - expected).abs().max() < 1e-9


def equals_knockout(any_model, pairs):
    clean = metric_of(any_model, pairs.clean, pairs)
    for kind in kinds(any_model):
        components = some(any_model.components(kind))
        ones = torch.ones(3, len(components), dtype=torch.float64)
        with torch.no_grad():
            assert (
                masked_metric(any_model, pairs, places(components), ones, logit_difference) - clean
            ).abs().max() < 1e-9
            knocked = Knockout().score(any_model, pairs, components, logit_difference, False)
            for c in range(len(components)):
                mask = ones.clone()
                mask[:, c] = 0
                change = clean - masked_metric(any_model, pairs, places(components), mask, logit_difference)
                assert (change - knocked[:, c]).abs().max() < 1e-9, components[c]


def test_gradients_of_a_mask_are_its_slopes(any_model):
    """By central differences, and 0 for the other facts' masks."""
    pairs = contrast_pairs(padding="left")
    for kind in kinds(any_model):
        components = some(any_model.components(kind), 3)
        mask = torch.rand(3, len(components), generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
        mask.requires_grad_()
        value = masked_metric(any_model, pairs, places(components), mask, log_probability)
        (gradient,) = torch.autograd.grad(value.sum(), [mask])
        for c in range(len(components)):
            step = torch.zeros_like(mask)
            step[:, c] = 1e-3
            with torch.no_grad():
                up, down = (
                    masked_metric(any_model, pairs, places(components), mask + sign * step, log_probability)
                    for sign in (1, -1)
                )
            assert torch.allclose(gradient[:, c], (up - down) / 2e-3, rtol=2e-2, atol=1e-3), components[c]
        (alone,) = torch.autograd.grad(
            masked_metric(any_model, pairs, places(components), mask, log_probability)[1], [mask]
        )
        assert (alone[[0, 2]] == 0).all() and (alone[1] - gradient[1]).abs().max() < 1e-9


def plain_training(pairs, row, learned, gate, penalty, lr, steps):
    """One fact's mask of all value vectors, trained on the plain Hugging Face model by its own Adam."""
    model = ARCHITECTURES["llama"]().double().requires_grad_(False)
    mlps = [layer.mlp.down_proj for layer in model.model.layers]
    current = {}
    for i, module in enumerate(mlps):
        module.register_forward_pre_hook(lambda _, x, i=i: (x[0] * current["gate"][i],))
    learned = learned.clone().requires_grad_()
    first, second, losses = torch.zeros_like(learned), torch.zeros_like(learned), []
    keep = pairs.read_mask[row]
    for t in range(1, steps + 1):
        current["gate"] = gate(learned).reshape(3, -1)
        log_p = model(pairs.clean[row][None], use_cache=False).logits[0].log_softmax(-1)
        loss = -log_p[pairs.read[row], pairs.answer[row]][keep].mean()
        losses.append(float(loss.detach()))
        (g,) = torch.autograd.grad(loss + penalty(learned), [learned])
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        with torch.no_grad():
            learned -= lr * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    return learned.detach(), losses


def test_slimming_equals_training_on_the_plain_model(llama):
    pairs, components = contrast_pairs(), llama.components("value")
    found = Slimming(penalty=0.02, lr=0.05, steps=25).fit(llama, pairs, components, log_probability)
    for row in range(3):
        start = torch.ones(len(components), dtype=torch.float64)
        m, losses = plain_training(pairs, row, start, lambda m: m, lambda m: 0.02 * m.abs().sum(), 0.05, 25)
        assert (found.scores[row] - m).abs().max() < 1e-5
        assert (found.losses[:, row] - torch.tensor(losses, dtype=torch.float64)).abs().max() < 1e-6
    assert found.losses.shape == (25, 3)
    assert found.scores.min() < 0.3 and found.scores.max() > 1  # both ways, and not cut


def test_hard_concrete_equals_training_on_the_plain_model(llama):
    pairs, components = contrast_pairs(), llama.components("value")
    method = HardConcrete(penalty=0.02, beta=0.5, keep=0.8, lr=0.05, steps=25, seed=3)
    found = method.fit(llama, pairs, components, log_probability)
    for row in range(3):
        generator = torch.Generator().manual_seed(3)

        def gate(a, generator=generator):
            u = torch.rand(len(a), generator=generator, dtype=torch.float64)
            s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + a) / 0.5)
            return torch.clip(s * 1.2 - 0.1, 0, 1)

        def kept(a):
            return 0.02 * torch.sigmoid(a - 0.5 * math.log(0.1 / 1.1)).sum()

        start = torch.full((len(components),), math.log(0.8 / 0.2), dtype=torch.float64)
        a, losses = plain_training(pairs, row, start, gate, kept, 0.05, 25)
        assert (found.scores[row] - a.sigmoid()).abs().max() < 1e-5
        assert (found.losses[:, row] - torch.tensor(losses, dtype=torch.float64)).abs().max() < 1e-6


def test_the_penalty_of_hard_concrete_is_the_expected_number_of_open_gates(llama, monkeypatch):
    """P(gate > 0) = sigmoid(a - β log(0.1 / 1.1)): against the share of the gates that are drawn open."""
    seen = []
    monkeypatch.setattr(
        sys.modules["locus.localize.learned"],
        "masked_metric",
        lambda model, pairs, where, mask, metric: seen.append(mask.detach()) or mask.sum(1) * 0,
    )
    for keep in (0.2, 0.5, 0.9):
        seen.clear()
        method = HardConcrete(penalty=0.0, beta=2 / 3, keep=keep, steps=60)
        method.fit(llama, contrast_pairs(), llama.components("value"), log_probability)
        drawn = torch.stack(seen)[:, 0]
        expected = 1 / (1 + math.exp(-(math.log(keep / (1 - keep)) - 2 / 3 * math.log(0.1 / 1.1))))
        error = math.sqrt(expected * (1 - expected) / drawn.numel())
        assert abs(float((drawn > 0).double().mean()) - expected) < 4 * error
        assert 0 <= drawn.min() and drawn.max() <= 1 and (drawn == 1).any()


@pytest.mark.parametrize("method", [Slimming(steps=6), HardConcrete(steps=6)], ids=["slimming", "hard concrete"])
def test_facts_do_not_mix_and_nothing_moves(llama, method):
    pairs, components = contrast_pairs(5, padding="left"), llama.components("neuron")
    before, registered = {name: p.detach().clone() for name, p in llama.weights.items()}, hooks.count(llama)
    together = method.score(llama, pairs, components, log_probability, False)
    alone = torch.cat([method.score(llama, pairs[i : i + 1], components, log_probability, False) for i in range(5)])
    small = type(method)(steps=6, batch_size=2).score(llama, pairs, components, log_probability, False)
    assert (together - alone).abs().max() < 1e-6 and (together - small).abs().max() < 1e-6

    def fails(logits, targets):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        method.score(llama, pairs, components, fails, False)
    assert hooks.count(llama) == registered
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in llama.weights.items())


def test_without_a_penalty_the_loss_falls_and_with_a_large_one_all_go(llama):
    pairs, components = contrast_pairs(), llama.components("head")
    free = Slimming(penalty=0.0, lr=0.05, steps=20).fit(llama, pairs, components, log_probability)
    assert (free.losses[-1] < free.losses[0]).all()
    paid = Slimming(penalty=100.0, lr=0.05, steps=60).fit(llama, pairs, components, log_probability)
    assert paid.scores.abs().max() < 0.1
    shut = HardConcrete(penalty=100.0, lr=0.1, steps=60).fit(llama, pairs, components, log_probability)
    assert shut.scores.max() < 0.05


def test_bad_settings_are_refused():
    for bad in ({"lr": 0.0}, {"steps": 0}, {"batch_size": 0}, {"penalty": -1.0}):
        for method in (Slimming, HardConcrete):
            with pytest.raises(ValueError, match=next(iter(bad))):
                method(**bad)
    for bad in ({"keep": 1.0}, {"keep": 0.0}, {"beta": 0.0}):
        with pytest.raises(ValueError, match="keep must be"):
            HardConcrete(**bad)


def test_planted_sentences_are_found():
    """Few sentences, each written into 1% of the value vectors: learned masks find them, random scores do not."""
    tiny = load("tiny", quiet=True)
    table = inj(tiny, sentences(tiny, 2), (Slimming(), HardConcrete(), Random()), seed=5, progress=False)
    assert set(table.status) == {"finished"}
    means = summary(table).set_index(["localizer", "scope", "k"])
    for name in ("Slimming", "HardConcrete"):
        for scope in ("layer", "global"):
            assert means.loc[name, scope, 0.01].recall > 10 * means.loc[name, scope, 0.01].chance
            assert means.loc[name, scope, 0.05].recall > 0.4
    assert means.loc["Random", "layer", 0.05].recall < 0.2
