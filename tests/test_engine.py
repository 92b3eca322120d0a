"""The compact engine against a dense reference, on every architecture and every way that a mask can lie."""

import math

import jaxtyping
import pytest
import torch
from helpers import ARCHITECTURES, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from locus import hooks
from locus.facts import Fact, Facts, FactSplit, encode
from locus.masks import Mask, ParameterMask
from locus.models import wrap
from locus.unlearn import DPO, NPO, RMU, SGD, WGA, AdamW, GradientDifference, NextToken, Update, compact, guard, unlearn
from locus.unlearn.compact import leaves, lowest_layer
from locus.unlearn.engine import schedule
from locus.unlearn.objectives import kl
from locus.unlearn.update import bits


def hooked(architecture, dtype=torch.float64):
    return wrap(ARCHITECTURES[architecture]().to(dtype), tokenizer(), architecture)


def facts(name, start, n):
    """Facts of prompts of 3 or 4 words and answers of 1 to 3."""
    made = []
    for i in range(start, start + n):
        subject = f"w{i % 90} w{(7 * i + 3) % 90}"
        answer = " ".join(f"w{(5 * i + 11 * j + 1) % 90}" for j in range(1 + i % 3))
        made.append(Fact(subject, "likes", f"{subject} w1" + " w2" * (i % 2), answer))
    return Facts(made)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(compact, "TILE", 10)  # several tiles a weight, the last one smaller


@pytest.fixture
def split():
    return FactSplit(facts("f", 0, 5), facts("r", 20, 5), facts("h", 40, 2), facts("o", 60, 2), 0)


def draw(model, structure, seed=0):
    """A mask whose selected entries lie in one way, over tensors of all layers but the first."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=g)

    def selected(shape, structure):
        match structure:
            case "whole":
                return (random(1) < 0.5).expand(shape)
            case "entries":
                return random(*shape) < 0.2
            case "rows":
                return (random(shape[0], *[1] * (len(shape) - 1)) < 0.4).expand(shape)
            case "columns":
                return (random(*[1] * (len(shape) - 1), shape[-1]) < 0.4).expand(shape)
            case "full":
                return torch.ones(shape, dtype=torch.bool)

    masks = {}
    for name, p in model.weights.items():
        how = structure
        if structure == "mixed":
            how = ("whole", "entries", "rows", "columns")[int(random(1) * 4)]
        elif structure != "full" and (".0." in name or not any(part.isdigit() for part in name.split("."))):
            continue
        mask = selected(tuple(p.shape), how).contiguous()
        if mask.any():
            masks[name] = mask
    return ParameterMask(masks)


def by_hand(model, split, mask, objective, optimizer, steps, clip=None):
    """Dense masking: full gradients, masked; a step on everything; what is outside is set back."""
    batch = encode(model, [*split.forget, *split.retain])
    n = len(split.forget)
    read, targets = batch.reads()
    answer, present = targets.answer, targets.mask
    old = {i: live.tensor.detach().clone() for i, live in enumerate(model.live)}
    masks = {
        i: live.take(mask.get(live.name, torch.zeros(model.weights[live.name].shape, dtype=torch.bool)))
        for i, live in enumerate(model.live)
    }
    tensors = [live.tensor for live in model.live]
    for p in tensors:
        p.requires_grad_()
    stepper, losses, original = optimizer.build(tensors), [], None
    for _ in range(steps):
        for p in tensors:
            p.grad = None
        logits = model.logits(batch.tokens, batch.attention_mask)
        logits = torch.stack([row[at] for row, at in zip(logits, read, strict=True)])
        log_probs = logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0].masked_fill(~present, 0)
        original = (log_probs.detach(), logits.detach()) if original is None else original
        forget = objective.forget(log_probs[:n], original[0][:n], present[:n]).mean()
        if objective.retain == "kl":
            retain = kl(original[1][n:], logits[n:], present[n:], "mean").mean()
        else:
            retain = -(log_probs[n:].sum(-1) / present[n:].sum(-1)).mean()
        loss = objective.forget_weight * forget + objective.retain_weight * retain
        losses.append(float(loss.detach()))
        loss.backward()
        for i, p in enumerate(tensors):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad * masks[i]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(tensors, clip)
        stepper.step()
        with torch.no_grad():
            for i, p in enumerate(tensors):
                p.copy_(torch.where(masks[i], p, old[i]))
    made = [p.detach().clone() for p in tensors]
    with torch.no_grad():
        for i, p in enumerate(tensors):
            p.copy_(old[i])
            p.grad = None
    return made, losses


ADAMW = AdamW(lr=1e-3, weight_decay=0.1)


def compare(model, split, mask, objective=None, optimizer=ADAMW, steps=3, clip=0.5, tolerance=1e-9):
    objective = GradientDifference() if objective is None else objective
    expected, losses = by_hand(model, split, mask, objective, optimizer, steps, clip)
    before = [live.tensor.detach().clone() for live in model.live]
    update = unlearn(model, split, mask, objective, optimizer=optimizer, steps=steps, clip=clip)
    assert all(torch.equal(old, live.tensor) for old, live in zip(before, model.live, strict=True))
    with update.applied(model):
        gaps = [float((e - live.tensor.detach()).abs().max()) for e, live in zip(expected, model.live, strict=True)]
    assert max(gaps) < tolerance
    assert max(float((e - b).abs().max()) for e, b in zip(expected, before, strict=True)) > 1e-4
    assert [row["loss"] for row in update.history[:-1]] == pytest.approx(losses, abs=tolerance)
    return update


@pytest.mark.parametrize("structure", ["rows", "columns", "entries", "whole", "mixed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compact_equals_dense(architecture, structure, split):
    model = hooked(architecture)
    mask = draw(model, structure)
    registered = hooks.count(model)
    # Gemma multiplies by the weights of its norms in float32, and sums their gradient over tokens in it.
    update = compare(model, split, mask, tolerance=1e-7 if architecture.startswith("gemma") else 1e-9)
    assert hooks.count(model) == registered
    assert update.n_changed == mask.n_parameters and update.status == "finished"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_components_equal_dense(architecture, split):
    model = hooked(architecture)
    kinds = ["head", "expert"] if architecture in ("mixtral", "olmoe") else ["head", "neuron", "value", "kv"]
    for kind in kinds:
        mask = Mask.random(model.components(kind), budget=0.4, seed=1)
        update = compare(model, split, mask.materialize(model), steps=2)
        assert update.n_changed > 0.9 * mask.n_parameters


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD(lr=0.05, momentum=0.9, weight_decay=0.1)])
def test_a_full_mask_is_a_plain_training_step(architecture, optimizer, split):
    model = hooked(architecture)
    compare(model, split, draw(model, "full"), optimizer=optimizer, steps=2, tolerance=1e-10)


@pytest.mark.parametrize(
    "objective",
    [
        NPO(beta=0.5),
        NPO(retain="kl", retain_weight=2.0),
        WGA(forget_weight=0.5),
        GradientDifference(retain="kl"),
        NextToken(),
        NextToken(retain_weight=0.5),
    ],
)
def test_every_objective_equals_dense(objective, split):
    model = hooked("llama")
    mask = Mask.random(model.components("neuron"), budget=0.3)
    compare(
        model,
        split,
        mask.materialize(model),
        objective=objective,
        optimizer=SGD(lr=0.1, momentum=0.9),
        clip=None,
    )


def test_accumulation_is_the_mean_of_its_batches(split):
    model = hooked("llama")
    mask = draw(model, "rows")
    whole = unlearn(model, split, mask, GradientDifference(), optimizer=SGD(lr=0.1), steps=1, batch_size=4, seed=3)
    halves = unlearn(
        model,
        split,
        mask,
        GradientDifference(),
        optimizer=SGD(lr=0.1),
        steps=1,
        batch_size=2,
        accumulate=2,
        seed=3,
    )
    for name, (_, value) in whole.values.items():
        assert torch.allclose(value, halves.values[name].value, atol=1e-12)
    assert whole.n_changed > 0


def test_batches_cover_the_facts_before_any_comes_again():
    batches = schedule(10, 4, 5, torch.Generator().manual_seed(0))
    assert [len(b) for b in batches] == [4] * 5
    assert sorted(torch.cat(batches)[:10].tolist()) == list(range(10)) == sorted(torch.cat(batches)[10:].tolist())
    assert [b.tolist() for b in schedule(3, 4, 2, torch.Generator())] == [[0, 1, 2]] * 2


def test_equal_seeds_give_equal_bits_and_others_do_not(split):
    model = hooked("llama", torch.float32)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    runs = [unlearn(model, split, mask, NPO(), steps=4, batch_size=2, seed=seed) for seed in (0, 0, 1)]
    same, other = [
        all(torch.equal(runs[0].values[n].value, run.values[n].value) for n in runs[0].values) for run in runs[1:]
    ]
    assert same and not other
    assert repr(runs[0].history) == repr(runs[1].history) != repr(runs[2].history)


def test_a_fact_beside_longer_ones_has_the_loss_it_has_alone(split):
    model = hooked("gpt2")
    mask, ascent = draw(model, "rows"), GradientDifference(retain_weight=0.0)

    def first_loss(forget):
        alone = FactSplit(Facts(forget), Facts([]), Facts([]), Facts([]), 0)
        return unlearn(model, alone, mask, ascent, steps=1).history[0]["forget"]

    assert first_loss(split.forget) == pytest.approx(sum(first_loss([f]) for f in split.forget) / 5, abs=1e-12)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_every_answer_token_is_read_where_it_is_predicted(padding, split):
    model = hooked("llama")
    batch = encode(model, list(split.forget), padding=padding)
    read, targets = batch.reads()
    answer, present = targets.answer, targets.mask
    for i, fact in enumerate(split.forget):
        expected = tokenizer()(fact.answer, add_special_tokens=False)["input_ids"]
        assert answer[i][present[i]].tolist() == expected
        assert batch.tokens[i][read[i][present[i]] + 1].tolist() == expected


def test_checkpoints_see_the_edit_as_it_would_be_stored(split):
    model = hooked("llama", torch.bfloat16)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    name = "model.layers.1.mlp.up_proj.weight"
    seen = {}

    def callback(step):
        seen[step] = model.weights[name].detach().clone()

    original = model.weights[name].detach().clone()
    update = unlearn(
        model, split, mask, NPO(), optimizer=AdamW(lr=1e-2), steps=4, checkpoints=(0, 2, 4), callback=callback
    )
    assert list(seen) == [0, 2, 4] and torch.equal(seen[0], original) and not torch.equal(seen[2], seen[4])
    assert seen[4].dtype == torch.bfloat16
    with update.applied(model):
        assert torch.equal(model.weights[name], seen[4])
    assert torch.equal(model.weights[name], original)
    assert [row["step"] for row in update.history] == [0, 1, 2, 3, 4]


def test_a_callback_can_end_the_run(split):
    model = hooked("llama", torch.float32)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    seen, settings = [], dict(optimizer=AdamW(lr=1e-2), seed=3, batch_size=2)

    def enough(step):
        seen.append(step)
        return step >= 4

    stopped = unlearn(model, split, mask, NextToken(), steps=9, checkpoints=(2, 4, 6), callback=enough, **settings)
    assert seen == [2, 4] and stopped.status == "finished" and stopped.history[-1]["step"] == 4
    # Another number of steps would draw other batches; the same number, and a stop by hand, gives the same bits.
    whole, at_4 = [], {}

    def keep(step):
        whole.append(step)
        at_4.update({n: w.detach().clone() for n, w in model.weights.items()} if step == 4 else {})

    unlearn(model, split, mask, NextToken(), steps=9, checkpoints=(2, 4, 6), callback=keep, **settings)
    assert whole == [2, 4, 6]
    with stopped.applied(model):
        assert all(torch.equal(w, at_4[n]) for n, w in model.weights.items())


def test_bfloat16_keeps_float32_masters(split):
    """Steps far below half a unit in the last place add up."""
    model = hooked("llama", torch.bfloat16)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    found = leaves(model, mask.materialize(model))
    assert {leaf.values.dtype for leaf in found} == {torch.float32}
    one = unlearn(model, split, mask, NPO(), optimizer=AdamW(lr=5e-5), steps=1)
    many = unlearn(model, split, mask, NPO(), optimizer=AdamW(lr=5e-5), steps=8)
    assert one.n_changed < 0.2 * many.n_changed


def test_checksum_is_guards(split):
    model = hooked("llama", torch.float32)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    update = unlearn(model, split, mask, NPO(), steps=1)
    plain = ARCHITECTURES["llama"]()
    with (
        pytest.warns(UserWarning, match="nothing moved"),
        guard(plain, None, mask.materialize(model)) as report,
    ):
        pass
    assert report.checksum == update.checksum and len(update.checksum) == 64


def test_divergence_ends_the_run(split):
    model = hooked("llama", torch.float32)
    before = {n: p.detach().clone() for n, p in model.weights.items()}
    mask = Mask.random(model.components("neuron"), budget=0.3)
    called = []
    update = unlearn(
        model, split, mask, GradientDifference(), optimizer=SGD(lr=1e38), steps=9,
        checkpoints=range(10), callback=called.append,
    )  # fmt: skip
    assert update.status == "diverged" and len(update.history) < 9
    assert called == list(range(len(update.history) - 1))
    assert all(torch.equal(before[n], p) for n, p in model.weights.items())


def test_collapse_of_utility_ends_the_run(split):
    model = hooked("llama", torch.float32)
    mask = Mask.random(model.components("neuron"), budget=0.5)
    # Other subjects with the same answers lose what is ascended on.
    retain = Facts(
        [Fact(r.subject, r.relation, r.prompt, f.answer) for f, r in zip(split.forget, split.retain, strict=True)]
    )
    split = FactSplit(split.forget, retain, split.holdout, split.other, 0)
    ascent = GradientDifference(retain_weight=0.0)
    update = unlearn(model, split, mask, ascent, optimizer=AdamW(lr=0.1), steps=20, floor=0.5)
    assert update.status == "collapsed" and len(update.history) < 20
    shares = [row["retain_probability"] / update.history[0]["retain_probability"] for row in update.history]
    assert shares[-1] < 0.5 <= min(shares[:-1])
    on = unlearn(model, split, mask, ascent, optimizer=AdamW(lr=0.1), steps=len(shares) + 2, floor=0.0)
    assert on.status == "finished"
    never = unlearn(model, split, mask, ascent, optimizer=AdamW(lr=0.1), steps=len(shares) + 2, floor=None)
    assert never.status == "finished" and never.settings["floor"] is None
    # What neither the loss nor the floor reads is not run, and changes nothing.
    assert math.isnan(never.history[0]["retain_probability"])
    assert [row["loss"] for row in never.history] == pytest.approx([row["loss"] for row in on.history], rel=1e-3)


def test_nothing_moved_is_a_status(split):
    model = hooked("llama", torch.bfloat16)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    update = unlearn(model, split, mask, NPO(), optimizer=AdamW(lr=1e-12), steps=2)
    assert update.status == "nothing moved" and update.n_changed == 0 and update.norm == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_restored_after_an_error(error, split):
    model = hooked("llama", torch.float32)
    model.weights["model.norm.weight"].requires_grad_(False)
    wanted = [p.requires_grad for p in model.bridge.parameters()]
    before = {n: p.detach().clone() for n, p in model.weights.items()}
    mask, registered = draw(model, "mixed"), hooks.count(model)

    def callback(step):
        if step == 2:
            assert not all(torch.equal(before[n], p) for n, p in model.weights.items())
            raise error("stop")

    with pytest.raises(error, match="stop"):
        unlearn(model, split, mask, NPO(), steps=4, checkpoints=range(5), callback=callback)
    assert all(torch.equal(before[n], p) for n, p in model.weights.items())
    assert hooks.count(model) == registered and [p.requires_grad for p in model.bridge.parameters()] == wanted
    held = [p for m in model.bridge.modules() for p in m._parameters.values() if p is not None]
    assert all(isinstance(p, torch.nn.Parameter) for p in held)


def test_the_lowest_edited_layer_is_found():
    model = hooked("llama")
    layers = {
        "model.layers.2.mlp.up_proj.weight": 2, "model.norm.weight": 3, "model.embed_tokens.weight": None,
        "model.layers.0.input_layernorm.weight": 0,
    }  # fmt: skip
    for name, layer in layers.items():
        mask = ParameterMask({name: torch.ones(model.weights[name].shape, dtype=torch.bool)})
        assert lowest_layer(model, leaves(model, mask)) == layer


def test_no_full_gradient_exists(split):
    """The optimizer's state has the size of the mask, and no parameter of the model gets a gradient."""
    model = hooked("llama", torch.float32)
    mask = Mask.random(model.components("neuron"), budget=0.3)
    built = []

    class Watched(AdamW):
        def build(self, values):
            built.append(super().build(values))
            return built[0]

    unlearn(model, split, mask, NPO(), optimizer=Watched(), steps=1)
    state = built[0].state.values()
    assert sum(s["exp_avg"].numel() for s in state) == mask.n_parameters
    assert all(p.grad is None for p in model.bridge.parameters())


class Created(TorchDispatchMode):
    """Notes the shape of every new tensor."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        copies = func.name() in ("aten::index_copy", "aten::clone")  # of a weight, with new values in it: no gradient
        if isinstance(made, torch.Tensor) and not func.is_view and not copies:
            self.shapes.append(tuple(made.shape))
        return made


def created(model, split, mask):
    """Shapes of all tensors that a backward pass makes."""
    backward, seen = torch.Tensor.backward, Created()

    def watched(loss):
        with seen:
            backward(loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", watched)
        unlearn(model, split, mask, NPO(), steps=2, clip=1.0)
    assert seen.shapes
    return set(seen.shapes)


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
@pytest.mark.parametrize("structure", ["rows", "columns", "entries"])
def test_no_full_weight_gradient_exists(architecture, dtype, structure, split):
    model = hooked(architecture, dtype)
    mask = {n: m for n, m in draw(model, structure).items() if m.ndim == 2}
    full = {s for n in mask for s in (tuple(model.weights[n].shape), tuple(model.weights[n].T.shape))}
    # Some compact gradients happen to have the shape of another weight.
    full -= {s for leaf in leaves(model, mask) for s in (tuple(leaf.values.shape), tuple(leaf.values.shape)[::-1])}
    assert len(full) >= 3 and not full & created(model, split, ParameterMask(mask))


@pytest.mark.parametrize("architecture", ["mixtral", "olmoe"])
def test_no_gradient_of_other_experts_exists(architecture, split):
    model = hooked(architecture, torch.float32)
    mask = Mask.random(model.components("expert"), budget=0.3).materialize(model)
    assert not {tuple(m.shape) for m in mask.values()} & created(model, split, mask)
    before = {n: p.clone() for n, p in model.weights.items()}
    expected, _ = by_hand(model, split, mask, NPO(), SGD(lr=0.1), 2)
    with unlearn(model, split, mask, NPO(), optimizer=SGD(lr=0.1), steps=2).applied(model):
        for value, live in zip(expected, model.live, strict=True):
            assert torch.allclose(value, live.tensor, atol=1e-6)
    assert all(torch.equal(before[n], p) for n, p in model.weights.items())


def test_a_full_weight_gradient_would_be_seen(split):
    """Tied embeddings, which not only a linear layer reads, do have one."""
    model = hooked("llama", torch.float32)
    name = "model.embed_tokens.weight"
    mask = torch.rand(model.weights[name].shape, generator=torch.Generator().manual_seed(0)) < 0.3
    assert tuple(mask.shape) in created(model, split, ParameterMask({name: mask}))


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", torch.bfloat16), ("gpt_neox", torch.float32), ("mixtral", torch.float32)]
)
def test_recomputed_activations_give_the_same_bits(architecture, dtype, split):
    model = hooked(architecture, dtype)
    mask = draw(model, "mixed")
    for objective in (NPO(retain="kl"), DPO(refusal="w5"), RMU(layer=1)):
        registered = hooks.count(model)
        kept, again = (
            unlearn(model, split, mask, objective, steps=2, accumulate=2, recompute=recompute)
            for recompute in (False, True)
        )
        assert hooks.count(model) == registered and not any("forward" in vars(b) for b in model.bridge.blocks)
        assert repr(kept.history) == repr(again.history)
        for name, (_, value) in kept.values.items():
            assert torch.equal(bits(value), bits(again.values[name].value))


def test_recomputed_activations_are_not_kept(split):
    """What the graph holds before the backward pass is a block's input, not its inside."""
    model = hooked("llama", torch.float32)
    mask = Mask.random(model.components("neuron"), budget=0.3, seed=0)
    widths, backward = [], torch.Tensor.backward

    def sizes(recompute):
        saved = []

        def watched(loss):
            widths.append({t.shape[-1] for t in saved})
            backward(loss)

        with (
            pytest.MonkeyPatch.context() as patch,
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            patch.setattr(torch.Tensor, "backward", watched)
            unlearn(model, split, mask, NPO(), steps=1, recompute=recompute)
        return widths[-1]

    d_mlp = model.cfg.d_mlp
    assert d_mlp in sizes(False) and d_mlp not in sizes(True)


@pytest.mark.parametrize("objective", [NPO(), NPO(retain="kl"), RMU(layer=1), RMU(layer=2, retain="kl")])
@pytest.mark.parametrize("structure", ["mixed", "full"])
def test_continuing_from_a_layer_equals_whole_passes(structure, objective, split):
    """The slow path, for models that cannot be continued, is the fast one's twin."""
    model = hooked("llama")
    mask = draw(model, structure)
    made = []
    for fast in (True, False):
        model.fast = fast
        made.append(unlearn(model, split, mask, objective, steps=3))
    assert [row["loss"] for row in made[0].history] == pytest.approx([r["loss"] for r in made[1].history], abs=1e-9)
    for name, (_, value) in made[0].values.items():
        assert torch.allclose(value, made[1].values[name].value, atol=1e-9, rtol=0)


def test_what_does_not_change_is_computed_once(split):
    """Blocks below the mask do not run in steps, and the original model's distributions take no pass of their own."""
    model = hooked("llama", torch.float32)
    neurons = model.components("neuron")
    mask = Mask.random(neurons, budget=0.2, disjoint_from=Mask(neurons, neurons.layers < 2))

    def calls(steps):
        ran = []
        handles = [
            block.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
            for layer, block in enumerate(model.bridge.blocks)
        ]
        unlearn(model, split, mask, NPO(retain="kl"), steps=steps)
        for handle in handles:
            handle.remove()
        return [ran.count(layer) for layer in range(3)]

    assert [b - a for a, b in zip(calls(1), calls(4), strict=True)] == [0, 0, 3]


def test_losses_are_those_of_the_stored_weights(split):
    """The float32 masters are rounded before they are read: the last loss is that of the update applied."""
    model = hooked("llama", torch.bfloat16)
    mask = Mask.random(model.components("neuron"), budget=0.5)
    update = unlearn(model, split, mask, NextToken(), optimizer=AdamW(lr=1e-2), steps=6)
    with update.applied(model):
        again = unlearn(model, split, mask, NextToken(), optimizer=AdamW(lr=1e-12), steps=1)
    assert again.status == "nothing moved"
    gap = abs(again.history[0]["loss"] - update.history[-1]["loss"])
    assert gap < 0.02 < 0.1 < abs(update.history[0]["loss"] - update.history[-1]["loss"])


@pytest.mark.parametrize(("structure", "dtype"), [("mixed", torch.float32), ("rows", torch.bfloat16)])
@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2, weight_decay=0.5), SGD(lr=0.05, momentum=0.9, weight_decay=0.1)])
def test_nothing_outside_the_mask_moves(optimizer, dtype, structure, split, tmp_path):
    """Weight decay, momentum, clipping, accumulation, bfloat16, and a run that goes on from a saved one."""
    model = hooked("llama", dtype)
    mask, settings = draw(model, structure), dict(steps=2, clip=0.3, accumulate=2, batch_size=2, recompute=True)
    before = {n: p.detach().clone() for n, p in model.weights.items()}
    first = unlearn(model, split, mask, NPO(), optimizer=optimizer, **settings).save(tmp_path / "first")
    with Update.load(first).applied(model):
        second = unlearn(model, split, mask, NPO(), optimizer=optimizer, **settings)
        with second.applied(model):
            for name, p in model.weights.items():
                outside = ~mask.get(name, torch.zeros(p.shape, dtype=torch.bool))
                assert torch.equal(bits(before[name])[outside], bits(p)[outside])
    assert second.n_changed > 0.9 * mask.n_parameters
    assert all(torch.equal(bits(before[n]), bits(p)) for n, p in model.weights.items())


def test_what_has_no_meaning_is_refused(split, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = hooked("llama")
    mask = draw(model, "rows")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = [
        (dict(split=FactSplit(Facts([]), split.retain, Facts([]), Facts([]), 0)), "split.forget"),
        (dict(split=FactSplit(split.forget, Facts([]), Facts([]), Facts([]), 0)), "split.retain"),
        (dict(mask=ParameterMask({"nowhere": torch.ones(2, 2, dtype=torch.bool)})), "nowhere"),
        (dict(mask=ParameterMask({name: torch.ones(2, 2, dtype=torch.bool)})), "made for another model"),
        (dict(mask=ParameterMask({name: torch.zeros(48, 32, dtype=torch.bool)})), "selects nothing"),
        (dict(split=split.forget), "give a FactSplit"),
        (dict(objective=NPO), "not an objective"),
        (dict(steps=0), "steps must be a number above 0"),
        (dict(clip=math.nan), "clip must be a number above 0"),
        (dict(optimizer=AdamW), r"not an optimizer of locus; give one, e.g. locus.AdamW\(lr=1e-4\)"),
        (dict(seed=-1), "seed must be a whole number, 0 or above, not -1"),
        (dict(checkpoints=[0, 99]), "checkpoints must be whole numbers from 0 to steps=1, not 99"),
        (dict(checkpoints=[-1]), "checkpoints must be whole numbers from 0"),
        (dict(checkpoints=5), r"checkpoints must be several numbers of steps, like \(0, 10\), not 5"),
        (dict(checkpoints=[0]), "callback is what checkpoints call; it must be a function of the step, not None"),
        (dict(callback=5), "must be a function of the step, not 5"),
        (dict(steps=True), "steps must be a number above 0, not True"),
    ]
    for change, says in cases:
        with pytest.raises(ValueError, match=says):
            unlearn(model, **(dict(split=split, mask=mask, objective=NPO(), steps=1) | change))
