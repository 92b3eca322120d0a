import math

import pytest
import torch

from locus.unlearn.objectives import (
    NPO,
    WGA,
    GradientDifference,
    NextToken,
    Objective,
    kl,
    nll,
    npo_loss,
    over_tokens,
)

LENGTHS = (3, 1, 2)


@pytest.fixture
def answers():
    """Three answers of 3, 1 and 2 tokens; where there is no token the log-probability is garbage."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(3, 3, generator=generator, dtype=torch.float64) * 3 - 0.05
    reference = -torch.rand(3, 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    return log_probs.masked_fill(~mask, -math.inf), reference.masked_fill(~mask, -7.0), mask


def by_hand(objective, log_probs, reference):
    """The forget term from plain numbers, one answer at a time."""
    values = []
    for n, row, old in zip(LENGTHS, log_probs.tolist(), reference.tolist(), strict=True):
        row, old = row[:n], old[:n]
        scale = n if objective.reduce == "mean" else 1
        match objective:
            case GradientDifference():
                values.append(sum(row) / scale)
            case NPO(beta=beta):
                ratio = (sum(row) - sum(old)) / scale
                values.append(-2 / beta * math.log(1 / (1 + math.exp(beta * ratio))))
            case WGA(beta=beta):
                values.append(sum(math.exp(x) ** beta * x for x in row) / scale)
            case NextToken():
                values.append(-sum(row) / scale)
    return values


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("make", [GradientDifference, NPO, WGA, NextToken, lambda reduce: WGA(beta=0.5, reduce=reduce)])
def test_forget_term_equals_a_reference_by_hand(answers, make, reduce):
    log_probs, reference, mask = answers
    objective = make(reduce=reduce)
    assert isinstance(objective, Objective)
    got = objective.forget(log_probs, reference, mask)
    assert got.shape == (3,)
    expected = torch.tensor(by_hand(objective, log_probs, reference), dtype=torch.float64)
    assert torch.allclose(got, expected, atol=1e-12)


def gradient(objective, log_probs, reference, mask):
    leaf = log_probs.clone().requires_grad_()
    return torch.autograd.grad(objective.forget(leaf, reference, mask).sum(), leaf)[0]


def test_npo_tends_to_gradient_ascent_as_beta_falls(answers):
    log_probs, reference, mask = answers
    ascent = gradient(GradientDifference(reduce="sum"), log_probs, reference, mask)
    gaps = []
    for beta in (1.0, 0.1, 1e-3):
        gaps.append((gradient(NPO(beta=beta), log_probs, reference, mask) - ascent).abs().max().item())
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 5e-3
    # At the original model the two agree at every beta: the factor 2/beta is there for that.
    at_start = gradient(NPO(beta=3.0), log_probs, log_probs, mask)
    assert torch.allclose(at_start[mask], ascent[mask])


def test_wga_weights_carry_no_gradient_and_beta_0_is_ascent(answers):
    log_probs, reference, mask = answers
    expected = log_probs.exp().masked_fill(~mask, 0) / mask.sum(-1, keepdim=True)
    assert torch.allclose(gradient(WGA(beta=1.0), log_probs, reference, mask), expected)
    assert torch.equal(
        gradient(WGA(beta=0.0), log_probs, reference, mask),
        gradient(GradientDifference(), log_probs, reference, mask),
    )


def test_kl_is_zero_for_the_same_model_and_matches_torch():
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64)
    new = torch.randn(2, 3, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert torch.equal(kl(old, old, mask, "mean"), torch.zeros(2, dtype=torch.float64))
    got = kl(old, new, mask, "sum")
    tokens = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=old), torch.distributions.Categorical(logits=new)
    )
    assert torch.allclose(got, (tokens * mask).sum(-1))
    (at_self,) = torch.autograd.grad(kl(new.detach(), new, mask, "sum").sum(), new)
    assert at_self.abs().max() < 1e-15


def test_padding_is_never_read(answers):
    log_probs, reference, mask = answers
    assert torch.isfinite(nll(log_probs, mask, "sum")).all()
    assert over_tokens(log_probs, torch.zeros_like(mask), "mean").tolist() == [0, 0, 0]


def test_npo_is_finite_for_extreme_answers():
    got = npo_loss(torch.tensor([1e4, 0.0]), torch.tensor([0.0, 1e4]), 0.1)
    assert torch.isfinite(got).all() and got[0] < got[1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NPO(beta=0.0), "beta must be above 0"),
        (lambda: WGA(beta=-1.0), "0 or above"),
        (lambda: GradientDifference(retain_weight=-1.0), "retain_weight"),
        (lambda: NPO(retain_weight=float("nan")), "retain_weight"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
