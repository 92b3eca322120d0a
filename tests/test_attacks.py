"""Attacks bring back what was hidden, only on facts that they were not shown, and leave the model as it was."""

import math
from dataclasses import replace

import pandas as pd
import peft
import pytest
import torch
from helpers import ARCHITECTURES, tokenizer
from small import facts, model, unknown
from transformers.pytorch_utils import Conv1D

import locus
from locus import hooks
from locus.attacks import (
    COLUMNS,
    FullRelearn,
    LoRARelearn,
    Paraphrase,
    Unrelated,
    adapters,
    attack,
    halves,
    recovery,
    relearn,
    worst,
)
from locus.evaluate import evaluate, score
from locus.facts import Fact, Facts, FactSplit, encode
from locus.masks import Mask
from locus.models import HookedModel, wrap
from locus.unlearn import AdamW, GradientDifference, NextToken, Update, unlearn
from locus.unlearn.update import bits

EVERY_ATTACK = [
    FullRelearn(lr=1e-2, steps=4),
    LoRARelearn(lr=1e-2, steps=4),
    Unrelated(lr=1e-2, steps=4),
    Paraphrase(),
]


@pytest.fixture(scope="module")
def split() -> FactSplit:
    return facts().split(forget=12, seed=0, other_relations=("pet",))


@pytest.fixture(scope="module")
def update(split) -> Update:
    mask = Mask.full(model().components("neuron"))
    return unlearn(model(), split, mask, GradientDifference(), optimizer=AdamW(lr=3e-2), steps=8, seed=0)


class State:
    """Everything of a model that an attack might disturb."""

    def __init__(self, m: HookedModel) -> None:
        root = m.bridge.original_model
        self.weights = {name: bits(p).clone() for name, p in root.named_parameters()}
        self.asks = [(id(p), p.requires_grad, p.grad is None) for p in m.bridge.parameters()]
        self.modules = [
            (id(x), x.training, list(x._modules), [id(child) for child in x._modules.values()], sorted(vars(x)))
            for x in (*m.bridge.modules(), *root.modules())
        ]
        self.hooks = (hooks.count(m), list(m.bridge.hook_dict))
        self.random = torch.random.get_rng_state()

    def check(self, other: "State") -> None:
        assert self.weights.keys() == other.weights.keys()
        assert all(torch.equal(w, other.weights[name]) for name, w in self.weights.items())
        assert self.asks == other.asks and self.modules == other.modules and self.hooks == other.hooks
        assert torch.equal(self.random, other.random)


# ------------------------------------------------------------------------------------------------ what comes back


def test_hidden_knowledge_comes_back_and_unknown_knowledge_does_not():
    """New facts are planted; unlearned a little they come back, unlearned to rubble or never planted they do not."""
    m, none = model(), Facts()
    split = FactSplit(forget=unknown(), retain=facts(), holdout=none, other=none, seed=0)
    mask = Mask.full(m.components("neuron"))
    planted = unlearn(m, split, mask, NextToken(retain_weight=1.0), optimizer=AdamW(lr=1e-2), steps=60, floor=None)
    attacks = [FullRelearn(lr=1e-3), LoRARelearn(lr=3e-3)]
    never = attack(m, split, attacks=attacks)
    with planted.applied(m):
        hidden, gone = (
            unlearn(m, split, mask, GradientDifference(), optimizer=AdamW(lr=lr), steps=steps)
            for lr, steps in ((1e-3, 20), (1e-2, 8))
        )
        arms = [attack(m, split, update=arm, attacks=attacks) for arm in (hidden, gone)]
    seen = never[(never.part == "trained") & (never.step == 20) & (never.metric == "probability")]
    assert (seen.value > 0.1).all(), "the attack on a model that never knew must have taught it something"
    columns = ["attack", "lr", "metric", "n", "value"]
    before = arms[0][(arms[0].part == "tested") & (arms[0].metric == "probability")]
    (start,), (untouched,) = (set(before.value[before.step == step].round(12)) for step in (0, -1))
    assert start < 0.05 and untouched > 0.95
    values = [
        worst(rows).loc[lambda w: w.metric == "probability", columns].set_index("attack") for rows in (never, *arms)
    ]
    for name in ("full", "lora"):
        r, back, rubble = (v.value[name] for v in values)
        assert r < 0.05 and recovery(back, r, untouched) > 0.15 > 0.05 > recovery(rubble, r, untouched)


def test_relearning_trains_on_one_half_and_tests_on_the_other(split, update):
    m = model()
    rows = relearn(m, update, split, steps=6, every=3, lr=1e-2, seed=1)
    assert list(rows.columns) == COLUMNS and set(rows.status) == {"finished"}
    value = rows[rows.metric == "probability"].pivot(index="step", columns="part", values="value")
    assert list(value.index) == [-1, 0, 3, 6] and set(value.columns) == {"trained", "tested"}
    assert (value.loc[-1] > 0.9).all() and (value.loc[0] < 0.5).all()
    assert value.trained[6] > value.trained[0] + 0.3
    pd.testing.assert_frame_equal(rows, relearn(m, update, split, steps=6, every=3, lr=1e-2, seed=1))


def test_halves_are_of_other_subjects(split):
    for seed in range(5):
        half, tested = halves(split.forget, seed)
        assert {*half, *tested} == set(split.forget) and len(half) + len(tested) == len(split.forget)
        assert not {f.subject for f in half} & {f.subject for f in tested}
    assert len({halves(split.forget, seed)[0] for seed in range(5)}) > 1
    one = replace(split, forget=Facts(split.forget[:1]))
    with pytest.raises(ValueError, match="two subjects"):
        relearn(model(), None, one)


def test_values_are_those_of_evaluate(split, update):
    """Before the update, before the attack, and in other words."""
    m = model()
    rows = attack(m, split, update=update, attacks=[FullRelearn(steps=1), Paraphrase()], seed=3)
    _, tested = halves(split.forget, 3)
    found = rows[(rows.part == "tested") & (rows.step <= 0)].set_index(["attack", "step", "metric"])
    for step in (-1, 0):
        with update.applied(m) if step == 0 else torch.no_grad():
            e = evaluate(m, replace(split, forget=tested))
        for name, prefix in (("full", ""), ("paraphrase", "paraphrase_")):
            for metric in ("probability", "extraction_strength"):
                theirs = ("forget", prefix + metric.removesuffix("_strength" if prefix else ""))
                assert found.value[name, step, metric] == pytest.approx(e.mean(*theirs), abs=1e-5)
                assert found.n[name, step, metric] == len(tested) == e.n(*theirs)
                low, high = (min(max(x, 0), 1) for x in e.interval(*theirs))
                assert found.low[name, step, metric] == pytest.approx(low, abs=1e-4)
                assert found.high[name, step, metric] == pytest.approx(high, abs=1e-4)


def test_intervals_of_probabilities_stay_in_range(split, update):
    rows = attack(model(), split, update=update, attacks=EVERY_ATTACK)
    assert (rows.low >= 0).all() and (rows.high <= 1).all()
    assert (rows.low <= rows.value + 1e-12).all() and (rows.value <= rows.high + 1e-12).all()
    assert (rows.low == 0).any() or (rows.high == 1).any(), "no t interval had to be cut, so nothing was tested"


def test_a_fact_without_paraphrases_is_not_scored(split):
    bare = replace(split, forget=Facts([replace(f, paraphrases=()) for f in split.forget]))
    with pytest.raises(ValueError, match="another wording"):
        attack(model(), bare, attacks=[Paraphrase()])
    half, tested = halves(split.forget, 0)
    some = replace(
        split, forget=Facts([replace(f, paraphrases=f.paraphrases if f == tested[0] else ()) for f in split.forget])
    )
    rows = attack(model(), some, attacks=[Paraphrase()])
    assert set(rows.n) == {1} and rows.low.isna().all() and rows.value.notna().all()


def test_unrelated_never_sees_a_forget_fact(split):
    seen = Unrelated().facts(split, halves(split.forget, 0)[0])
    assert len(seen) == len(halves(split.forget, 0)[0]) and set(seen) <= set(split.other)
    assert Unrelated(others=split.retain).facts(split, Facts()) == split.retain
    with pytest.raises(ValueError, match="other subjects"):
        Unrelated(others=Facts([Fact(split.forget[0].subject, "pet", "w1 w91", "w30")])).facts(split, Facts())
    with pytest.raises(ValueError, match=r"others=facts"):
        attack(model(), replace(split, other=Facts()), attacks=[Unrelated()])


@pytest.mark.parametrize("one", [FullRelearn(lr=1e30, steps=9, every=1), LoRARelearn(lr=1e30, steps=9, every=1)])
def test_an_attack_that_diverges_says_so(split, one):
    rows = attack(model(), split, attacks=[one])
    assert set(rows.status) == {"diverged"} and rows.step.max() < 9
    assert worst(rows).value.notna().all() and (worst(rows).step == 0).all()


@pytest.mark.parametrize("kind", [FullRelearn, LoRARelearn, Unrelated])
@pytest.mark.parametrize("wrong", [{"every": 0}, {"steps": 0}, {"batch_size": 0}, {"lr": math.nan}, {"lr": 0.0}])
def test_settings_without_meaning_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)
    with pytest.raises(ValueError, match="rank"):
        LoRARelearn(rank=0)
    with pytest.raises(ValueError, match=f"got the class {kind.__name__}; give an instance"):
        locus.attack(model(), facts().split(forget=6), attacks=[kind])
    with pytest.raises(ValueError, match="every"):
        relearn(model(), None, facts().split(forget=6), every=0)


def test_the_last_step_is_always_measured(split):
    for one in (FullRelearn(lr=1e-3, steps=5, every=3), LoRARelearn(lr=1e-3, steps=5, every=3)):
        assert sorted(set(attack(model(), split, attacks=[one]).step)) == [-1, 0, 3, 5]


@pytest.mark.parametrize("kind", [FullRelearn, LoRARelearn])
def test_batches_of_the_attacker(split, kind):
    def value(size: int | None) -> float:
        return attack(model(), split, attacks=[kind(lr=1e-2, steps=2, batch_size=size)]).value.iloc[-2]

    assert value(None) == value(len(halves(split.forget, 0)[0])) != value(2)


# ------------------------------------------------------------------------------------------------ nothing stays behind


def test_every_attack_leaves_the_model_as_it_was(split, update):
    before = State(model())
    with update.applied(model()):
        edited = State(model())
        attack(model(), split, attacks=EVERY_ATTACK)
        edited.check(State(model()))
    attack(model(), split, update=update, attacks=EVERY_ATTACK)
    before.check(State(model()))


def test_a_run_may_be_attacked_on_its_way(split, update):
    """At a checkpoint of `unlearn`, with the edit written and gradients off: the same attack, and the run goes on."""
    m, before, found = model(), State(model()), []
    again = unlearn(
        m,
        split,
        Mask.full(m.components("neuron")),
        GradientDifference(),
        optimizer=AdamW(lr=3e-2),
        steps=8,
        seed=0,
        callback=lambda _: found.append(attack(m, split, attacks=EVERY_ATTACK)),
        checkpoints=[4, 8],
    )
    before.check(State(m))
    assert all(torch.equal(value, update.values[name].value) for name, (_, value) in again.values.items())
    later = attack(m, split, update=update, attacks=EVERY_ATTACK)
    pd.testing.assert_frame_equal(
        *(rows[rows.step >= 0].reset_index(drop=True) for rows in (found[1], later)), check_exact=True
    )


@pytest.mark.parametrize("when", [1, 5])
@pytest.mark.parametrize("one", EVERY_ATTACK[:3], ids=lambda one: one.name)
def test_also_when_a_checkpoint_raises(split, one, when, monkeypatch):
    calls = iter(range(100))

    def failing(*args, **kwargs):
        if next(calls) == when:
            raise KeyboardInterrupt
        return score(*args, **kwargs)

    monkeypatch.setattr("locus.attacks.score", failing)
    before = State(model())
    with pytest.raises(KeyboardInterrupt):
        attack(model(), split, attacks=[replace(one, every=1)])
    before.check(State(model()))


def test_also_when_peft_raises_half_way(split, monkeypatch):
    create, calls = peft.tuners.lora.LoraModel._create_and_replace, iter(range(100))

    def failing(*args, **kwargs):
        create(*args, **kwargs)
        if next(calls) == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(peft.tuners.lora.LoraModel, "_create_and_replace", failing)
    before = State(model())
    with pytest.raises(ZeroDivisionError):
        attack(model(), split, attacks=[LoRARelearn()])
    before.check(State(model()))


def test_a_changed_weight_does_not_go_unseen():
    m = wrap(ARCHITECTURES["llama"](), tokenizer(), "llama")
    with pytest.raises(RuntimeError, match="changed"), adapters(m, rank=2, alpha=4, seed=0):
        with torch.no_grad():
            next(iter(m.weights.values())).view(-1)[0] += 1


def test_what_asked_for_gradients_asks_again():
    m = wrap(ARCHITECTURES["llama"](), tokenizer(), "llama")
    for i, p in enumerate(m.weights.values()):
        p.requires_grad_(i % 2 == 0)
    before = State(m)
    with adapters(m, rank=2, alpha=4, seed=0) as trained:
        assert {id(p) for p in m.bridge.parameters() if p.requires_grad} == {id(p) for p in trained}
    before.check(State(m))


# ------------------------------------------------------------------------------------------------ LoRA


def test_adapters_are_a_low_rank_change_of_every_linear_weight(any_model, tokens):
    """The logits are those of W + (alpha / rank) B A, written into the model instead; each adapter has a gradient."""
    m, before = any_model, State(any_model)
    changes = []
    with adapters(m, rank=2, alpha=6, seed=0) as trained:
        with torch.no_grad():
            for p in trained:
                p.normal_(std=0.2, generator=torch.Generator().manual_seed(p.numel()))
        logits = m.logits(tokens)
        gradients = torch.autograd.grad(logits.square().sum(), trained)
        assert all(g.abs().max() > 1e-9 for g in gradients)
        for module in m.bridge.original_model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                a, b = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
                change = 3.0 * b @ a
                base = module.get_base_layer()
                changes.append((base.weight, change.T if isinstance(base, Conv1D) else change))
    before.check(State(m))
    linear = [x for x in m.live if x.tensor.ndim == 2 and isinstance(x.module, torch.nn.Linear | Conv1D)]
    assert len(changes) == sum(".0." in x.name or ".1." in x.name or ".2." in x.name for x in linear)
    kept = [weight.detach().clone() for weight, _ in changes]
    with torch.no_grad():
        plain = m.logits(tokens)
        try:
            for weight, change in changes:
                weight += change
            dense = m.logits(tokens)
        finally:
            for (weight, _), old in zip(changes, kept, strict=True):
                weight.copy_(old)
    assert (dense - plain).abs().max() > 0.1
    torch.testing.assert_close(logits, dense, atol=1e-9, rtol=1e-9)


def test_lora_is_that_of_peft_on_the_plain_model(split):
    """The same values from a textbook loop on the plain Hugging Face model in float64."""
    m = wrap(ARCHITECTURES["llama"]().double(), tokenizer(), "llama")
    plain = ARCHITECTURES["llama"]().double()
    half, tested = halves(split.forget, 7)
    one = LoRARelearn(lr=3e-3, steps=4, every=1, rank=3, alpha=5)
    rows = attack(m, split, attacks=[one], seed=7)

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.get_peft_model(plain, peft.LoraConfig(r=3, lora_alpha=5, target_modules=names))
    with adapters(m, rank=3, alpha=5, seed=7):
        first = {
            name.replace("._original_component", ""): p.detach().clone()
            for name, p in m.bridge.original_model.named_parameters()
            if ".lora_A." in name
        }
    for name, p in plain.named_parameters():
        if ".lora_A." in name:
            p.data.copy_(first[name])
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    train, test = encode(m, half), encode(m, tested)
    for step in range(5):
        with torch.no_grad():
            logits = lora(test.tokens, attention_mask=test.attention_mask.long()).logits[:, :-1].log_softmax(-1)
            log_p = logits.gather(-1, test.tokens[:, 1:, None])[..., 0] * test.answer_mask[:, 1:]
            value = (log_p.sum(-1) / test.answer_mask.sum(-1)).exp().mean()
        ours = rows[(rows.step == step) & (rows.part == "tested") & (rows.metric == "probability")]
        assert ours.value.item() == pytest.approx(value.item(), rel=1e-5)  # norms are in float32
        labels = train.tokens.masked_fill(~train.answer_mask, -100)
        optimizer.zero_grad()
        # Answers are of two tokens each, so the mean over all tokens is the mean over facts.
        lora(train.tokens, attention_mask=train.attention_mask.long(), labels=labels).loss.backward()
        optimizer.step()
    values = rows[(rows.part == "tested") & (rows.metric == "probability")].value
    assert values.nunique() > 4


# ------------------------------------------------------------------------------------------------ what counts


def test_the_strongest_point_counts():
    points = [
        ("full", 1e-3, -1, "tested", 0.99),
        ("full", 1e-3, 0, "tested", 0.1),
        ("full", 1e-3, 5, "tested", 0.3),
        ("full", 1e-2, 5, "tested", 0.4),
        ("full", 1e-2, 9, "tested", 0.2),
        ("full", 1e-2, 9, "trained", 1.0),
        ("lora", 1e-2, 0, "tested", 0.5),
        ("lora", 1e-2, 5, "tested", 0.5),
        ("lora", 1e-2, 9, "tested", math.nan),
        ("void", 1e-2, 0, "tested", math.nan),
    ]
    rows = pd.DataFrame(points, columns=["attack", "lr", "step", "part", "value"]).assign(metric="probability")
    found = worst(rows).set_index("attack")
    assert list(found.index) == ["full", "lora", "void"]
    assert found.loc["full", ["lr", "step", "value"]].tolist() == [1e-2, 5, 0.4]
    assert found.loc["lora", ["step", "value"]].tolist() == [0, 0.5]  # the cheapest of equals
    assert math.isnan(found.value["void"])
    assert worst(rows, by=["metric"])[["attack", "value"]].values.tolist() == [["lora", 0.5]]


def test_recovery_is_between_a_model_that_never_knew_and_one_that_knows():
    assert recovery(0.2, 0.2, 0.9) == 0 and recovery(0.9, 0.2, 0.9) == 1
    assert recovery(0.55, 0.2, 0.9) == pytest.approx(0.5) and recovery(0.1, 0.2, 0.9) < 0
    for never in (0.9, 0.95, math.nan):
        assert math.isnan(recovery(0.5, never, 0.9))


def test_public_names():
    assert locus.relearn is relearn and locus.attack is attack
