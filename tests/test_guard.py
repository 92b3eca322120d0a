import warnings

import pytest
import torch
import transformers as hf
from helpers import ARCHITECTURES, tokenizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from locus.masks import Mask, ParameterMask
from locus.models import wrap
from locus.unlearn.guard import guard


def snapshot(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def draw(model, seed=0):
    """Random entries of a middle matrix, whole rows of another, all of a norm; the rest may not change."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(32, 1, generator=g) < 0.3
    return {
        "model.layers.1.mlp.up_proj.weight": torch.rand(48, 32, generator=g) < 0.2,
        "model.layers.1.mlp.down_proj.weight": rows.expand(32, 48).contiguous(),
        "model.layers.1.input_layernorm.weight": torch.ones(32, dtype=torch.bool),
    }


def n_outside(model, before, masks):
    after = snapshot(model)
    different = {n: before[n].view(torch.uint8) != after[n].view(torch.uint8) for n in before}
    size = {n: before[n].element_size() for n in before}
    per_entry = {n: d.reshape(-1, size[n]).any(-1).reshape(before[n].shape) for n, d in different.items()}
    return sum(int((d & ~masks.get(n, torch.zeros_like(d))).sum()) for n, d in per_entry.items())


def batch(seed):
    return torch.randint(3, 97, (4, 8), generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, *, steps=3, clip=None, accumulate=1, scaler=None):
    for step in range(steps):
        for part in range(accumulate):
            tokens = batch(10 * step + part)
            loss = model(tokens, labels=tokens).loss / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        optimizer.zero_grad()


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **settings)


OPTIMIZERS = {
    "adamw": adamw,
    "adamw-foreach": lambda m: adamw(m, foreach=True),
    "adamw-fused": lambda m: adamw(m, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda m: hf.Adafactor(m.parameters(), lr=1e-2, weight_decay=0.1, relative_step=False),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_outside_moves(name, accumulate):
    model = ARCHITECTURES["llama"]()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, steps=2)  # momentum and second moments of the whole model
    before, masks = snapshot(model), draw(model)
    with guard(model, optimizer, masks) as report:
        train(model, optimizer, clip=0.1, accumulate=accumulate)
    assert n_outside(model, before, masks) == 0
    assert report.n_outside_changed == 0 and report.n_restored == 0 and report.n_steps == 3
    assert report.n_masked == sum(int(m.sum()) for m in masks.values())
    assert report.n_changed > 0.99 * report.n_masked
    # The same loop without the guard does move what is outside.
    train(model, optimizer, clip=0.1, accumulate=accumulate)
    assert n_outside(model, before, masks) > 0


def test_bfloat16_and_grad_scaler():
    model = ARCHITECTURES["llama"]().to(torch.bfloat16)
    optimizer, before, masks = adamw(model), snapshot(model), draw(model)
    with guard(model, optimizer, masks) as report:
        train(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert n_outside(model, before, masks) == 0 and report.n_changed > 0


def test_an_overflow_outside_the_mask_does_not_spoil_a_step():
    model = ARCHITECTURES["llama"]()
    masks = draw(model)
    name = "model.layers.1.mlp.up_proj.weight"
    with guard(model, None, masks):
        p = dict(model.named_parameters())[name]
        (p * torch.where(masks[name], 1.0, torch.inf)).sum().backward()
        assert torch.equal(p.grad, masks[name].to(p.dtype))
        p.grad = None
        optimizer = adamw(model)
        train(model, optimizer)


def test_clipping_sees_only_what_may_change():
    model = ARCHITECTURES["llama"]()
    masks, tokens = draw(model), batch(0)
    model(tokens, labels=tokens).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    expected = torch.stack([grads[n][m].pow(2).sum() for n, m in masks.items()]).sum().sqrt()
    with guard(model, None, masks):
        model(tokens, labels=tokens).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.allclose(norm, expected)


def test_a_guarded_step_is_the_plain_step_inside_the_mask():
    plain, guarded = ARCHITECTURES["llama"]().double(), ARCHITECTURES["llama"]().double()
    masks = draw(plain)
    train(plain, adamw(plain), steps=1)
    with guard(guarded, None, masks):
        train(guarded, adamw(guarded), steps=1)
    a, b = snapshot(plain), snapshot(guarded)
    for name, mask in masks.items():
        assert torch.equal(a[name][mask], b[name][mask])


@pytest.mark.parametrize("given", ["trainer", None])
def test_hugging_face_trainer(tmp_path, given):
    model = ARCHITECTURES["llama"]()
    before, masks = snapshot(model), draw(model)
    data = [{"input_ids": row, "labels": row} for row in batch(0).repeat(3, 1)]
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2,
        weight_decay=0.1, gradient_accumulation_steps=2, max_grad_norm=0.5, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=data)
    with guard(model, trainer if given else None, masks) as report:
        trainer.train()
    assert n_outside(model, before, masks) == 0
    assert report.n_steps == 3 and report.n_changed > 0.99 * report.n_masked


def test_a_loop_without_an_optimizer():
    model = ARCHITECTURES["llama"]()
    before, masks = snapshot(model), draw(model)
    name, mask = next(iter(masks.items()))
    p = dict(model.named_parameters())[name]
    with pytest.warns(UserWarning, match="other than a torch optimizer's step"):
        with guard(model, None, masks) as report:
            for step in range(2):
                tokens = batch(step)
                loss = model(tokens, labels=tokens).loss
                assert torch.equal(p[~mask], before[name][~mask])  # set back before the forward pass
                loss.backward()
                for q in model.parameters():
                    q.data.mul_(0.999)
                    if q.grad is not None:
                        q.data -= 0.1 * q.grad
                model.zero_grad()
    assert n_outside(model, before, masks) == 0 and report.n_restored > 0 and report.n_outside_changed == 0


def hooks(model):
    on_modules = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    return on_modules + [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]


def test_an_exception_leaves_nothing_behind():
    model = ARCHITECTURES["llama"]()
    model.model.embed_tokens.weight.requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    masks, optimizer = draw(model), adamw(model)
    n_global = len(_global_optimizer_post_hooks)
    train(model, optimizer, steps=1)
    before, registered = snapshot(model), hooks(model)
    with pytest.raises(KeyboardInterrupt):
        with guard(model, optimizer, masks) as report:
            train(model, optimizer, steps=1)
            for p in model.parameters():
                p.data.add_(1)
            raise KeyboardInterrupt
    assert n_outside(model, before, masks) == 0 and report.n_changed == report.n_masked
    assert hooks(model) == registered and [p.requires_grad for p in model.parameters()] == wanted
    assert len(_global_optimizer_post_hooks) == n_global


def test_gradients_from_before_are_masked_too():
    model = ARCHITECTURES["llama"]()
    before, masks, tokens = snapshot(model), draw(model), batch(0)
    model(tokens, labels=tokens).loss.backward()
    optimizer = adamw(model)
    with guard(model, optimizer, masks):
        p = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        assert (p.grad[~masks["model.layers.1.mlp.up_proj.weight"]] == 0).all()
        assert all(n in masks or p.grad is None for n, p in model.named_parameters())  # nor does clipping see them
        optimizer.step()
    assert n_outside(model, before, masks) == 0


def test_checksum_tells_models_apart_and_ignores_what_may_change():
    def run(model, masks):
        with guard(model, None, masks) as report:
            train(model, adamw(model), steps=1)
        return report.checksum

    model = ARCHITECTURES["llama"]()
    masks = draw(model)
    first = run(model, masks)
    assert run(model, masks) == first  # trained on: only the inside differs
    model.lm_head.weight.data[0, 0] += 1
    assert run(model, masks) != first


def test_nothing_moved_is_said():
    model = ARCHITECTURES["llama"]()
    with pytest.warns(UserWarning, match="nothing moved"), guard(model, None, draw(model)) as report:
        pass
    assert report.n_changed == 0


def test_parameter_mask_and_tied_names():
    model = ARCHITECTURES["llama"]()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rows = torch.zeros(97, 32, dtype=torch.bool)
    rows[:40] = True
    before = snapshot(model)
    with guard(model, None, ParameterMask({"lm_head.weight": rows})) as report:
        train(model, adamw(model))
    assert n_outside(model, before, {"model.embed_tokens.weight": rows}) == 0 and report.n_changed > 0


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_hooked_model_with_a_mask_of_components(architecture):
    model = wrap(ARCHITECTURES[architecture](), tokenizer(), architecture)
    mask = Mask.random(model.components("head"), budget=0.3)
    before = {i: live.tensor.detach().clone() for i, live in enumerate(model.live)}
    trained = [live.tensor for live in model.live]
    with guard(model, None, mask) as report:
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
        for _ in range(2):
            model.logits(batch(0)).log_softmax(-1)[..., 5].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = mask.materialize(model)
    n_changed = 0
    for i, live in enumerate(model.live):
        stored = wanted.get(live.name, torch.zeros(model.weights[live.name].shape, dtype=torch.bool))
        changed = before[i] != live.tensor
        assert not (changed & ~live.take(stored)).any()
        n_changed += int(changed.sum())
    assert 0 < n_changed == report.n_changed
    with pytest.raises(ValueError, match="mask.materialize"):
        with guard(model.bridge.original_model, None, mask):
            pass


def test_lora_is_refused_with_the_reason():
    peft = pytest.importorskip("peft")
    model = ARCHITECTURES["llama"]()
    masks = draw(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up_proj"]))
    for given in (model, adapted):
        with pytest.raises(ValueError, match="low-rank matrices add to the whole weight"):
            with guard(given, None, masks):
                pass


def test_a_model_changed_under_way_is_refused():
    model = ARCHITECTURES["llama"]()
    masks = draw(model)
    with pytest.raises(ValueError, match="replaced, converted or added"):
        with guard(model, None, masks):
            model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(48, 32))
    with pytest.raises(ValueError, match="replaced, converted or added"):
        with guard(model, None, masks):
            model.to(torch.bfloat16)


def refused(change):
    model = ARCHITECTURES["llama"]()
    masks, optimizer = draw(model), None
    if change == "unknown name":
        masks["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2, dtype=torch.bool)
    elif change == "wrong shape":
        masks["model.layers.0.mlp.up_proj.weight"] = torch.ones(32, 48, dtype=torch.bool)
    elif change == "not boolean":
        masks["model.layers.0.mlp.up_proj.weight"] = torch.ones(48, 32)
    elif change == "empty":
        masks = {n: torch.zeros_like(m) for n, m in masks.items()}
    elif change == "other optimizer":
        optimizer = adamw(ARCHITECTURES["llama"]())
    elif change == "quantized":
        module = model.model.layers[1].mlp.up_proj
        module.weight = torch.nn.Parameter(module.weight.data.to(torch.int8), requires_grad=False)
    elif change == "a mask for an optimizer":
        optimizer = masks
    elif change == "a name":
        model = "tiny"
    return model, optimizer, masks


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("unknown name", "layers.9"),
        ("wrong shape", r"shape \(32, 48\)"),
        ("not boolean", "boolean"),
        ("empty", "selects nothing"),
        ("other optimizer", "holds none of the masked parameters"),
        ("quantized", "quantized"),
        ("a name", "guard got 'tiny' as model; give the model itself"),
        ("a mask for an optimizer", "torch optimizer, a Trainer, or None"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    model, optimizer, masks = refused(change)
    with pytest.raises(ValueError, match=says):
        with guard(model, optimizer, masks):
            pass


def test_guards_nest():
    model = ARCHITECTURES["llama"]()
    outer, inner = draw(model, 0), draw(model, 1)
    before = snapshot(model)
    both = {n: outer[n] & inner[n] for n in outer}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with guard(model, None, outer), guard(model, None, inner):
            train(model, adamw(model))
    assert n_outside(model, before, both) == 0


def test_two_forward_passes_before_one_backward():
    """Gradient difference in one step, with masks in two layers: nothing is written while a graph needs it."""
    hf_model = ARCHITECTURES["llama"]().float()
    mask = {}
    for layer in (0, 2):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        mask[name] = torch.zeros_like(dict(hf_model.named_parameters())[name], dtype=torch.bool)
        mask[name][:, ::3] = True
    optimizer = torch.optim.AdamW(hf_model.parameters(), lr=1e-2, weight_decay=0.1)
    forget, retain = torch.randint(3, 97, (2, 2, 6))
    before = {name: p.detach().clone() for name, p in hf_model.named_parameters()}
    with guard(hf_model, optimizer, mask) as report:
        for _ in range(3):
            loss = hf_model(retain, labels=retain).loss - hf_model(forget, labels=forget).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert report.n_steps == 3 and report.n_changed == report.n_masked
    for name, p in hf_model.named_parameters():
        outside = ~mask[name] if name in mask else torch.ones_like(p, dtype=torch.bool)
        assert torch.equal(before[name][outside], p.detach()[outside])


def test_a_fused_tensor_counts_once():
    model = wrap(ARCHITECTURES["gpt_neox"]().float(), tokenizer(), "neox")
    mask = Mask.random(model.components("head"), budget=0.3, seed=0)
    with pytest.warns(UserWarning, match="nothing moved"), guard(model, None, mask) as report:
        pass
    assert report.n_masked == mask.n_parameters
