"""Edit only what a mask selects, and prove that nothing else moved.

Masking gradients alone leaks: weight decay shrinks entries without a gradient, momentum goes on, and a global
clipping norm depends on what is masked out. Here only the masked entries exist as leaves (`compact.py`), so
the optimizer cannot reach anything else. The model itself is written to for checkpoints only, and at the end,
once, to compare the bits of everything outside the mask before and after.

What makes it fast: no full gradient or optimizer state, the forward pass below the lowest edited block is run
once for all prompts (`hooks.prefix`), and logits are computed only where an answer token is predicted.

The model is used as it is, so without dropout when it is in evaluation mode, as `locus.load` leaves it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from locus import hooks
from locus.masks import Mask, ParameterMask
from locus.unlearn.compact import Leaf, edited, entries, leaves, lowest_layer
from locus.unlearn.objectives import Objective, kl, nll
from locus.unlearn.optimizers import AdamW, Optimizer
from locus.unlearn.update import Entries, Status, Update, bits, checksum, pick, written

CHUNK = 64  # prompts a forward pass where the original model is measured


def unlearn(
    model: Any,
    split: Any,
    mask: Mask | ParameterMask,
    objective: Objective,
    *,
    optimizer: Optimizer | None = None,
    steps: int = 60,
    seed: int = 0,
    batch_size: int | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    floor: float = 0.01,
    checkpoints: Collection[int] = (),
    callback: Callable[[int], None] | None = None,
    progress: bool = False,
) -> Update:
    """Lower `objective` by changing only the masked entries; the model is left as it was, bit for bit.

    Each step takes a batch of `split.forget` and as many facts of `split.retain`, both in random order and
    none again before all have been seen. Losses are taken on answer tokens only.

    Args:
        model: a `HookedModel`.
        split: a `FactSplit`; only `forget` and `retain` are read.
        mask: what may change.
        objective: `GradientDifference`, `NPO`, `WGA`, or anything like them.
        optimizer: `AdamW(lr=1e-4)` unless given. Weight decay and momentum act on the masked entries only.
        steps: optimizer steps.
        seed: of the order of the facts.
        batch_size: forget facts a forward pass; all of them unless given.
        accumulate: batches a step; the loss is their mean.
        clip: largest L2 norm of the gradient by the masked entries; None = no clipping.
        floor: the run ends as "collapsed" once the mean probability of the batch's retain answers (exp of the
            mean log-probability over an answer's tokens) is below `floor` times the original model's on them.
        checkpoints: after how many steps to call `callback`; 0 = the original model, `steps` = the end. Those
            that an early end does not reach are left out.
        callback: called with the number of steps made, the edit in place in the model as it would be stored.
        progress: show a bar.

    Returns:
        An `Update`; its `status` says whether the run finished, diverged, collapsed, or moved nothing.

    Raises:
        ValueError: the mask or the split does not fit; an argument has no meaning.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    _check(split, objective, steps, batch_size, accumulate, clip, floor)
    parameter_mask = mask.materialize(model) if isinstance(mask, Mask) else mask
    found = leaves(model, parameter_mask)
    state, before = model.state, _outside(model, parameter_mask)
    generator = torch.Generator().manual_seed(seed)
    size = min(batch_size or len(split.forget), len(split.forget))
    forget = _schedule(len(split.forget), size, steps * accumulate, generator)
    retain = _schedule(len(split.retain), size, steps * accumulate, generator)
    with torch.enable_grad(), _frozen(model):
        prompts = _prompts(model, split, forget, retain, lowest_layer(model, found))
        run = _Run(objective, found, prompts, forget, retain, accumulate, floor)
        with tqdm(total=steps, unit="step", disable=not progress) as bar:
            stepper = optimizer.build([leaf.values for leaf in found])
            for step in range(steps + 1):
                status = run.measure(step, train=step < steps)
                if status != "diverged" and step in checkpoints and callback is not None:
                    with written(model, entries(model, found, parameter_mask)), torch.no_grad():
                        callback(step)
                if status != "finished" or step == steps:
                    break
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_([leaf.values for leaf in found], clip)
                stepper.step()
                bar.update()
    # Gradients and the optimizer's state would stand beside the copies that the proof needs.
    del stepper
    for leaf in found:
        leaf.values.grad = None
    values = entries(model, found, parameter_mask)
    n_changed, norm = _change(model, values)
    _prove(model, parameter_mask, values, before)
    return Update(
        model=state,
        values=values,
        shapes={name: tuple(model.weights[name].shape) for name in values},
        recipe=mask.recipe,
        objective=objective,
        optimizer=optimizer,
        settings={
            "steps": steps,
            "seed": seed,
            "batch_size": size,
            "accumulate": accumulate,
            "clip": clip,
            "floor": floor,
        },  # fmt: skip
        history=tuple(run.history),
        status=status if n_changed or status != "finished" else "nothing moved",
        norm=norm,
        n_changed=n_changed,
        checksum=before,
    )


@dataclass(frozen=True, eq=False)
class _Prompts:
    """Prompts with their answers, forget facts first; what to read of each, and what the original model says.

    logits: rows, positions → logits, with whatever edit is in place
    read: positions whose logits predict the answer's tokens; answer: those tokens; mask: False = none left
    original: the original model's log-probabilities of the answer tokens
    """

    logits: Callable[[Tensor, Tensor], Tensor]
    read: Int[Tensor, "fact read"]
    answer: Int[Tensor, "fact read"]
    mask: Bool[Tensor, "fact read"]
    original: Float[Tensor, "fact read"]

    def distribution(self, rows: Int[Tensor, " row"]) -> Float[Tensor, "row read d_vocab"]:
        """Logits where the answers are predicted, in float32 at least."""
        logits = self.logits(rows, self.read[rows])
        return logits if logits.dtype == torch.float64 else logits.float()

    def log_probs(
        self, logits: Float[Tensor, "row read d_vocab"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, "row read"]:
        """Log-probability of each answer token, in nats; 0 where there is none."""
        found = logits.log_softmax(-1).gather(-1, self.answer[rows][..., None])[..., 0]
        return found.masked_fill(~self.mask[rows], 0)


@dataclass(eq=False)
class _Run:
    """One run: its data, its settings and what it has measured so far."""

    objective: Objective
    found: Sequence[Leaf]
    prompts: _Prompts
    forget: list[Tensor]
    retain: list[Tensor]
    accumulate: int
    floor: float

    def __post_init__(self) -> None:
        self.history: list[dict[str, int | float]] = []

    def measure(self, step: int, *, train: bool) -> Status:
        """Losses of the edit after `step` steps on the next batches, and their gradients if `train`.

        After the last step the last batches are measured again, without gradients.
        """
        first = min(step * self.accumulate, len(self.forget) - self.accumulate)
        for leaf in self.found:
            leaf.values.grad = None
        parts = []
        for i in range(first, first + self.accumulate):
            with torch.set_grad_enabled(train):
                loss, row = self._batch(self.forget[i], self.retain[i])
            if train:
                (loss / self.accumulate).backward()
            parts.append(row)
        row = {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]}
        original = row.pop("original")
        gradients = [leaf.values.grad for leaf in self.found if leaf.values.grad is not None]
        row["grad_norm"] = float(torch.nn.utils.get_total_norm(gradients)) if train else float("nan")
        self.history.append({"step": step, **row})
        finite = torch.tensor([row["loss"], row["grad_norm"] if train else 0.0]).isfinite().all()
        if not finite or not all(bool(leaf.values.isfinite().all()) for leaf in self.found):
            return "diverged"
        return "collapsed" if row["retain_probability"] < self.floor * original else "finished"

    def _batch(self, forget: Int[Tensor, " forget"], retain: Int[Tensor, " retain"]) -> tuple[Tensor, dict[str, float]]:
        prompts, objective, n = self.prompts, self.objective, len(forget)
        rows = torch.cat([forget, retain])
        with edited(self.found):
            logits = prompts.distribution(rows)
        log_probs, mask = prompts.log_probs(logits, rows), prompts.mask[rows]
        forget_term = objective.forget(log_probs[:n], prompts.original[forget], mask[:n]).mean()
        losses = nll(log_probs[n:], mask[n:], "mean")
        if objective.retain == "kl" and len(retain):
            with torch.no_grad():  # computed anew for each batch: all of it would fill the memory
                reference = prompts.distribution(retain)
            held = kl(reference, logits[n:], mask[n:], "mean")
        else:
            held = losses
        retain_term = held.mean() if len(retain) else held.sum()
        loss = objective.forget_weight * forget_term + objective.retain_weight * retain_term
        original = nll(prompts.original[retain], mask[n:], "mean")
        return loss, {
            "loss": float(loss.detach()),
            "forget": float(forget_term.detach()),
            "retain": float(retain_term.detach()),
            "retain_probability": float((-losses.detach()).exp().mean()),
            "original": float((-original).exp().mean()),
        }


def _prompts(model: Any, split: Any, forget: list[Tensor], retain: list[Tensor], layer: int | None) -> _Prompts:
    """Encode the facts that the run will read, and measure the original model on them.

    The batches are renumbered in place to rows of these prompts.
    """
    from locus.facts import encode

    used = [sorted({int(i) for batch in batches for i in batch}) for batches in (forget, retain)]
    facts = [split.forget[i] for i in used[0]] + [split.retain[i] for i in used[1]]
    for batches, indices, offset in ((forget, used[0], 0), (retain, used[1], len(used[0]))):
        for n, batch in enumerate(batches):
            batches[n] = torch.searchsorted(torch.tensor(indices, dtype=torch.long), batch) + offset
    encoded = encode(model, facts)
    device = model.device
    tokens, attention_mask = encoded.tokens.to(device), encoded.attention_mask.to(device)
    positions, targets = encoded.reads()
    read, answer, mask = (t.to(device) for t in (positions, targets.answer, targets.mask))
    if layer is None or not model.fast:

        def logits(rows: Tensor, positions: Tensor) -> Tensor:
            full = model.logits(tokens[rows], attention_mask[rows])
            return full.gather(1, positions[..., None].expand(-1, -1, full.shape[-1]))
    else:
        logits = hooks.prefix(model, tokens, attention_mask, layer).run
    prompts = _Prompts(logits, read, answer, mask, torch.empty(mask.shape))
    with torch.no_grad():
        chunks = torch.arange(len(facts)).split(CHUNK)
        original = torch.cat([prompts.log_probs(prompts.distribution(rows), rows) for rows in chunks])
    return _Prompts(logits, read, answer, mask, original)


def _schedule(n: int, size: int, n_batches: int, generator: torch.Generator) -> list[Tensor]:
    """Batches of `size` of n facts in random order, none again before all have been seen; all if n ≤ size."""
    if n <= size:
        return [torch.arange(n)] * n_batches
    rounds = -(-size * n_batches // n)
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(rounds)])
    return list(order[: size * n_batches].split(size))


class _frozen:
    """No parameter asks for a gradient inside; what asked before asks again afterwards."""

    def __init__(self, model: Any) -> None:
        self.parameters = [p for p in model.bridge.parameters() if p.requires_grad]

    def __enter__(self) -> None:
        for p in self.parameters:
            p.requires_grad_(False)

    def __exit__(self, *_: Any) -> None:
        for p in self.parameters:
            p.requires_grad_(True)


def _outside(model: Any, mask: ParameterMask) -> str:
    return checksum((name, model.stored(name), mask.get(name)) for name in model.weights)


@torch.no_grad()
def _change(model: Any, values: dict[str, Entries]) -> tuple[int, float]:
    """How many entries differ in their bits from the model's, and the L2 norm of the difference."""
    n, square = 0, 0.0
    for name, (index, value) in values.items():
        old = pick(model.stored(name), index)
        n += int((bits(old) != bits(value)).sum())
        square += float((value.double() - old.double()).square().sum())
    return n, square**0.5


def _prove(model: Any, mask: ParameterMask, values: dict[str, Entries], before: str) -> None:
    """Write the edit, compare everything outside the mask, take it back, and compare everything."""
    inside = {name: bits(pick(model.stored(name), entries.index)) for name, entries in values.items()}
    with written(model, values):
        after = _outside(model, mask)
        for name, (index, value) in values.items():
            assert torch.equal(bits(pick(model.stored(name), index)), bits(value))
    back = _outside(model, mask)
    for name, (index, _) in values.items():
        assert torch.equal(bits(pick(model.stored(name), index)), inside[name])
    if not before == after == back:
        raise RuntimeError(f"something outside the mask changed: {before[:12]}, {after[:12]}, {back[:12]}")


def _check(
    split: Any,
    objective: Any,
    steps: int,
    batch_size: int | None,
    accumulate: int,
    clip: float | None,
    floor: float,
) -> None:
    for name, value in (
        ("steps", steps),
        ("accumulate", accumulate),
        ("batch_size", batch_size),
        ("clip", clip),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be a fraction of the original probability, in [0, 1], not {floor!r}")
    if not isinstance(objective, Objective):
        raise ValueError(
            f"{objective!r} is not an objective: it needs forget_weight, retain_weight, retain and forget(); "
            "see locus.unlearn.objectives, e.g. locus.NPO(beta=0.1)"
        )
    if not len(split.forget):
        raise ValueError("split.forget has no facts, so there is nothing to unlearn")
    if not len(split.retain) and objective.retain_weight:
        raise ValueError("split.retain has no facts; split more facts, or set retain_weight=0 in the objective")
