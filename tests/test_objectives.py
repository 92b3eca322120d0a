import math

import pytest
import torch

from locus.facts import Fact, Facts
from locus.unlearn.objectives import (
    DPO,
    NPO,
    RMU,
    WGA,
    Answers,
    GradientDifference,
    Internal,
    MatchMLP,
    NextToken,
    Objective,
    Preference,
    SimNPO,
    Texts,
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
            case SimNPO(beta=beta, delta=delta):
                values.append(-2 / beta * math.log(1 / (1 + math.exp(-beta * (-sum(row) / scale - delta)))))
            case WGA(beta=beta):
                values.append(sum(math.exp(x) ** beta * x for x in row) / scale)
            case NextToken():
                values.append(-sum(row) / scale)
    return values


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(
    "make",
    [
        GradientDifference,
        NPO,
        WGA,
        NextToken,
        SimNPO,
        lambda reduce: WGA(beta=0.5, reduce=reduce),
        lambda reduce: SimNPO(beta=0.7, delta=0.4, reduce=reduce),
    ],
)
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


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_dpo_equals_a_reference_by_hand(answers, reduce):
    log_probs, reference, mask = answers
    objective = DPO(beta=0.7, reduce=reduce)
    assert isinstance(objective, Preference) and not isinstance(objective, Objective | Internal)
    other = Answers(log_probs.flip(0), (reference - 0.3).flip(0), mask.flip(0))
    got = objective.prefer(Answers(log_probs, reference, mask), other)

    def ratio(row, old, n):
        return sum(a - b for a, b in zip(row[:n], old[:n], strict=True)) / (n if reduce == "mean" else 1)

    rows, old = log_probs.tolist(), reference.tolist()
    for i, n in enumerate(LENGTHS):
        j = 2 - i
        rise = ratio(rows[j], [x - 0.3 for x in old[j]], LENGTHS[j])
        expected = -2 / 0.7 * math.log(1 / (1 + math.exp(-0.7 * (rise - ratio(rows[i], old[i], n)))))
        assert got[i].item() == pytest.approx(expected, abs=1e-12)


def test_dpo_finds_another_answer_to_every_prompt():
    people = Facts([Fact(f"p{i}", "home", f"p{i} lives in", f"town{i}") for i in range(6)])
    pet = Fact("p0", "pet", "p0 has", "dog", wrong=("cat",))
    facts = Facts([*people[:2], pet], pool=people)
    assert DPO(refusal="no").others(facts) == ["no"] * 3
    drawn = {tuple(DPO(refusal=None, seed=seed).others(facts)) for seed in range(20)}
    assert len(drawn) > 5 and {others[2] for others in drawn} == {"cat"}
    for i in (0, 1):
        assert {others[i] for others in drawn} == {f"town{j}" for j in range(6)} - {f"town{i}"}
    assert DPO(refusal=None).others(facts) == DPO(refusal=None).others(facts)
    with pytest.raises(ValueError, match="p0 has"):
        DPO(refusal=None).others(Facts([Fact("p0", "pet", "p0 has", "dog")]))


def texts(facts, states):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return Texts(facts, states, {name: torch.zeros_like(x) for name, x in states.items()}, mask)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_objectives_on_states_equal_references_by_hand(reduce):
    g = torch.Generator().manual_seed(0)
    facts = tuple(Fact(f"s{i}", "r", f"s{i} r", "a") for i in range(2))
    states = {f"blocks.{i}": torch.randn(2, 3, 4, generator=g, dtype=torch.float64) for i in range(2)}
    lengths, scale = (2, 3), (lambda n: n if reduce == "mean" else 1)

    one = {"blocks.1": states["blocks.1"]}
    rmu = RMU(layer=1, coefficient=3.0, seed=5, reduce=reduce)
    got = rmu.forget_states(texts(facts, one))
    u = torch.rand(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64).tolist()
    point = [3 * x / math.sqrt(sum(y * y for y in u)) for x in u]
    assert min(point) >= 0 and math.hypot(*point) == pytest.approx(3)
    for f, n in enumerate(lengths):
        tokens = [sum((h - p) ** 2 for h, p in zip(h, point, strict=True)) / 4 for h in states["blocks.1"][f].tolist()]
        assert got[f].item() == pytest.approx(sum(tokens[:n]) / scale(n), abs=1e-12)

    targets = {f: torch.randn(2, n, 4, generator=g, dtype=torch.float64) for f, n in zip(facts, lengths, strict=True)}
    got = MatchMLP(targets=targets, reduce=reduce).forget_states(texts(facts, states))
    for f, n in enumerate(lengths):
        total = 0.0
        for layer in range(2):
            for t in range(n):
                gap = states[f"blocks.{layer}"][f, t] - targets[facts[f]][layer, t]
                total += sum(x * x for x in gap.tolist())
        assert got[f].item() == pytest.approx(total / scale(n), abs=1e-12)


def test_match_mlp_without_targets_says_how_to_get_them():
    with pytest.raises(ValueError, match="MatchMLP.towards"):
        MatchMLP().forget_states(texts((Fact("s", "r", "s r", "a"),) * 2, {"blocks.0": torch.zeros(2, 3, 4)}))


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
        (lambda: SimNPO(beta=0.0), "beta must be above 0"),
        (lambda: DPO(beta=-1.0), "beta must be above 0"),
        (lambda: RMU(layer=9).sites(3), "0 to 2"),
        (lambda: NextToken(retain_weight=-1.0), "retain_weight"),
        (lambda: GradientDifference(retain_weight=-1.0), "retain_weight"),
        (lambda: NPO(retain_weight=float("nan")), "retain_weight"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
