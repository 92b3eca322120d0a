"""Objectives that read more than the forget answers, through the whole engine, against autograd on plain Hugging Face.

The reference is written for one text at a time, without padding, the compact engine or TransformerLens.
"""

import dataclasses
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from helpers import ARCHITECTURES, tokenizer
from test_engine import draw, facts, hooked

from locus import hooks
from locus.facts import FactSplit
from locus.masks import Mask, ParameterMask
from locus.unlearn import DPO, RMU, SGD, AdamW, MatchMLP, NextToken, SimNPO, Update, unlearn

LR = 0.05
REFUSAL = "w80 w81 w82 w83"  # longer than any answer
SPLIT = FactSplit(facts("f", 0, 5), facts("r", 20, 5), facts("h", 40, 2), facts("o", 60, 2), 0)


@pytest.fixture
def split():
    return SPLIT


class Seen(NamedTuple):
    log_probs: torch.Tensor  # of the answer's tokens
    blocks: list[torch.Tensor]  # output of each block, [pos, d_model]
    mlps: list[torch.Tensor]  # what each MLP adds to the residual stream


def plain(architecture):
    made = ARCHITECTURES[architecture]().double()
    made.set_experts_implementation("eager")  # grouped matrix products of experts have no float64
    return made


def look(hf_model, fact):
    """One text on the plain model."""
    words = tokenizer()
    ids = torch.tensor([words(f"{fact.prompt} {fact.answer}")["input_ids"]])
    n = len(words(fact.answer)["input_ids"])
    layers = next(m for name, m in hf_model.named_modules() if name.split(".")[-1] in ("layers", "h"))
    seen, handles = Seen(torch.empty(0), [], []), []

    def keep(into):
        return lambda module, args, out: into.append(
            (out[0] if isinstance(out, tuple) else out).reshape(ids.shape[1], -1)
        )

    for layer in layers:
        handles.append(layer.register_forward_hook(keep(seen.blocks)))
        mlp = getattr(layer, "post_feedforward_layernorm", None) or layer.mlp
        handles.append(mlp.register_forward_hook(keep(seen.mlps)))
    logits = hf_model(ids, use_cache=False).logits[0, -n - 1 : -1]
    for handle in handles:
        handle.remove()
    return seen._replace(log_probs=logits.log_softmax(-1).gather(-1, ids[0, -n:, None])[:, 0])


def mean(values):
    return sum(values) / len(values)


def replay(new, old, split):
    return mean([-look(new, fact).log_probs.mean() for fact in split.retain])


def next_token(new, old, split, _):
    return mean([-look(new, fact).log_probs.mean() for fact in split.forget]) + 0.5 * replay(new, old, split)


def simnpo(new, old, split, _):
    losses = [-look(new, fact).log_probs.mean() for fact in split.forget]
    return 0.125 * mean([-2 / 4.5 * torch.sigmoid(4.5 * (x - 0.2)).log() for x in losses]) + replay(new, old, split)


def dpo(new, old, split, _):
    def ratio(fact):
        return look(new, fact).log_probs.sum() - look(old, fact).log_probs.sum()

    pairs = [ratio(replace(fact, answer=REFUSAL)) - ratio(fact) for fact in split.forget]
    return mean([-2 / 0.3 * torch.sigmoid(0.3 * x).log() for x in pairs]) + replay(new, old, split)


def rmu(new, old, split, _, answer_only=False):
    d = look(new, split.forget[0]).blocks[1].shape[-1]
    u = torch.rand(d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    terms = []
    for part, target in (
        (split.forget, lambda fact: 5 * u / u.norm()),
        (split.retain, lambda f: look(old, f).blocks[1]),
    ):
        errors = [((look(new, fact).blocks[1] - target(fact)) ** 2).mean(-1) for fact in part]
        lengths = [len(tokenizer()(fact.answer)["input_ids"]) if answer_only else 99 for fact in part]
        terms.append(mean([error[-n:].mean() for error, n in zip(errors, lengths, strict=True)]))
    return terms[0] + 2 * terms[1]


def rmu_answers(new, old, split, reference):
    return rmu(new, old, split, reference, answer_only=True)


def match_mlp(new, old, split, reference):
    terms = []
    for fact in split.forget:
        pairs = zip(look(new, fact).mlps, look(reference, fact).mlps, strict=True)
        terms.append(sum(((x - y) ** 2).sum(-1) for x, y in pairs).mean())
    return mean(terms)


CASES = {
    "next token": (lambda model, split: NextToken(retain_weight=0.5), next_token),
    "simnpo": (lambda model, split: SimNPO(delta=0.2), simnpo),
    "dpo": (lambda model, split: DPO(beta=0.3, refusal=REFUSAL), dpo),
    "rmu": (lambda model, split: RMU(layer=1, coefficient=5.0, seed=3, retain_weight=2.0, tokens="text"), rmu),
    "rmu, answers": (
        lambda model, split: RMU(layer=1, coefficient=5.0, seed=3, retain_weight=2.0, tokens="answer"),
        rmu_answers,
    ),
    "match mlp": (MatchMLP.towards, match_mlp),
}


def perturbed(model, scale=0.05):
    """An update of all parameters: the reference of MatchMLP, and a state that is not the loaded one."""
    return unlearn(model, SPLIT, ParameterMask.full(model), NextToken(), optimizer=AdamW(lr=scale), steps=1)


def load_state(hf_model, model):
    hf_model.load_state_dict({name: model.stored(name) for name in model.weights}, strict=False)
    hf_model.tie_weights()
    return hf_model


@pytest.mark.parametrize(
    ("architecture", "case"),
    [(a, c) for a in ARCHITECTURES for c in CASES if a == "llama" or c in ("rmu", "match mlp")],
)
def test_steps_are_those_of_autograd_on_the_plain_model(architecture, case, split):
    make, by_hand = CASES[case]
    model = hooked(architecture)
    new, old, reference = (plain(architecture) for _ in range(3))
    for p in (*old.parameters(), *reference.parameters()):
        p.requires_grad_(False)
    with perturbed(model).applied(model):
        objective = make(model, split)
        load_state(reference, model)
    mask = draw(model, "mixed" if "rmu" in case else "rows")
    registered, steps = hooks.count(model), 2  # at the first one, a term that holds states has no gradient
    update = unlearn(model, split, mask, objective, optimizer=SGD(lr=LR), steps=steps, floor=None)
    assert hooks.count(model) == registered
    losses = []
    for _ in range(steps):
        loss = by_hand(new, old, split, reference)
        new.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in new.named_parameters():
                if name in mask and p.grad is not None:
                    p -= LR * p.grad * mask[name]
    # Norms and softmax are in float32, also in a float64 model.
    assert [row["loss"] for row in update.history[:-1]] == pytest.approx(losses, rel=1e-6)
    start, moved = plain(architecture).state_dict(), 0.0
    with update.applied(model):
        for name, p in new.named_parameters():
            assert torch.allclose(model.stored(name), p.detach(), rtol=0, atol=2e-5 * LR), name
            moved = max(moved, float((p.detach() - start[name]).abs().max()))
    assert moved > 1e-2 * LR


@pytest.mark.parametrize("case", CASES)
def test_the_short_pass_equals_the_whole_one(case, split):
    """Batches smaller than the facts, several steps, states below the edit held fixed or computed anew."""
    model = hooked("llama")
    with perturbed(model).applied(model):
        objective = CASES[case][0](model, split)
    mask, runs = draw(model, "rows"), []
    for fast in (True, False):
        model.fast = fast
        runs.append(unlearn(model, split, mask, objective, optimizer=SGD(lr=LR), steps=4, batch_size=2, floor=None))
    rows = [[row["loss"] for row in run.history] for run in runs]
    assert rows[0] == pytest.approx(rows[1], abs=1e-9) and len(set(rows[0])) == 5
    for name, (_, value) in runs[0].values.items():
        assert torch.allclose(value, runs[1].values[name].value, atol=1e-9)


@pytest.mark.parametrize("retain", ["nll", "kl", "states"])
@pytest.mark.parametrize(
    "make", [lambda **s: RMU(layer=1, **s), lambda **s: MatchMLP.towards(hooked("llama"), SPLIT, **s)]
)
def test_what_holds_the_retain_answers_is_free(make, retain, split):
    model = hooked("llama")
    update = unlearn(
        model, split, draw(model, "rows"), make(retain=retain, retain_weight=1.0), optimizer=SGD(lr=LR), steps=1
    )
    assert (update.history[0]["retain"] == 0) == (retain != "nll")
    if retain != "nll":
        assert update.history[1]["retain"] >= 0


def test_matching_the_model_itself_has_nothing_to_do_and_another_is_approached(split):
    model = hooked("llama")
    mask = Mask.full(model.components("value"))
    itself = MatchMLP.towards(model, split)
    still = unlearn(model, split, mask, itself, optimizer=SGD(lr=LR), steps=1)
    assert still.history[0]["loss"] < 1e-20 and still.norm < 1e-10
    reference = perturbed(model)
    with reference.applied(model):
        other = MatchMLP.towards(model, split)
        assert MatchMLP.towards(model, split).reference == other.reference != itself.reference
    update = unlearn(model, split, mask, other, optimizer=AdamW(lr=1e-2), steps=40, floor=None)
    assert update.history[-1]["loss"] < 0.2 * update.history[0]["loss"]
    # From another state than the loaded one, too.
    with reference.applied(model):
        assert unlearn(model, split, mask, other, steps=1, floor=None).history[0]["loss"] < 1e-20


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_runs_and_its_settings_come_back(case, split, tmp_path):
    model = hooked("llama", torch.bfloat16)
    with perturbed(model).applied(model):
        objective = CASES[case][0](model, split)
    update = unlearn(model, split, draw(model, "rows"), objective, optimizer=AdamW(lr=1e-2), steps=2, floor=None)
    assert update.status == "finished" and update.n_changed
    read = Update.load(update.save(tmp_path / "update")).objective
    assert read == objective and repr(read) == repr(objective)
    assert all(getattr(read, f.name) == getattr(objective, f.name) for f in dataclasses.fields(read) if f.repr)


def test_an_edit_that_cannot_reach_what_is_read_is_refused(split):
    model = hooked("llama")
    with pytest.raises(ValueError, match="nothing below block 1 change"):
        unlearn(model, split, draw(model, "rows"), RMU(layer=0), steps=1)
    with pytest.raises(ValueError, match="0 to 2"):
        unlearn(model, split, draw(model, "rows"), RMU(layer=3), steps=1)
    with pytest.raises(ValueError, match="do not fit llama"):
        unlearn(model, split, draw(model, "rows"), DPO(), steps=1)


def test_an_objective_of_yours_needs_four_names(split):
    class Push:
        forget_weight, retain_weight, retain = 1.0, 0.0, "nll"

        def forget(self, log_probs, reference, mask):
            return (log_probs * mask).sum(-1)

    model = hooked("llama")
    update = unlearn(model, split, draw(model, "rows"), Push(), optimizer=SGD(lr=LR), steps=3)
    assert update.history[-1]["loss"] < update.history[0]["loss"]
    Push.retain = "states"
    with pytest.raises(ValueError, match="no hidden states"):
        unlearn(model, split, draw(model, "rows"), Push(), steps=1)
