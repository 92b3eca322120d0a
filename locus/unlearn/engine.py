"""Edit only what a mask selects, and prove that nothing else moved.

Masking gradients alone leaks: weight decay shrinks entries without a gradient, momentum goes on, and a global
clipping norm depends on what is masked out. Here only the masked entries exist as leaves (`compact.py`), so
the optimizer cannot reach anything else. The model itself is written to for checkpoints only, and at the end,
once, to compare the bits of everything outside the mask before and after.

What makes it fast: no full gradient or optimizer state, the forward pass below the lowest edited block is run
once for all prompts (`hooks.prefix`), logits are computed only where an answer token is predicted, nothing at tokens
after the last of these, and what the original model says is kept from one pass before the first step.

The model is used as it is, so without dropout when it is in evaluation mode, as `locus.load` leaves it.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locus import hooks
from locus.facts import Fact, FactSplit, encode
from locus.masks import Mask, ParameterMask
from locus.progress import tqdm
from locus.reads import unembed_normed
from locus.unlearn.compact import Leaf, edited, entries, leaves, lowest_layer, recomputed
from locus.unlearn.objectives import (
    Answers,
    Internal,
    Objective,
    Preference,
    Texts,
    kl,
    nll,
    over_tokens,
    squared_distance,
)
from locus.unlearn.optimizers import AdamW, Optimizer
from locus.unlearn.update import Entries, Status, Update, bits, checksum, pick, written

CHUNK = 64  # prompts a forward pass where the original model is measured


def unlearn(
    model: Any,
    split: Any,
    mask: Mask | ParameterMask,
    objective: Objective | Preference | Internal,
    *,
    optimizer: Optimizer | None = None,
    steps: int = 60,
    seed: int = 0,
    batch_size: int | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    floor: float | None = 0.01,
    checkpoints: Collection[int] = (),
    callback: Callable[[int], bool | None] | None = None,
    recompute: bool = False,
    progress: bool = False,
) -> Update:
    """Lower `objective` by changing only the masked entries; the model is left as it was, bit for bit.

    Each step takes a batch of `split.forget` and as many facts of `split.retain`, both in random order and
    none again before all have been seen. Likelihoods are those of the answer tokens only.

    Args:
        model: a `HookedModel`.
        split: a `FactSplit`; only `forget` and `retain` are read.
        mask: what may change.
        objective: `GradientDifference`, `NPO`, `SimNPO`, `WGA`, `DPO`, `RMU`, `MatchMLP`, `NextToken`, or anything
            like them.
        optimizer: `AdamW(lr=1e-4)` unless given. Weight decay and momentum act on the masked entries only.
        steps: optimizer steps.
        seed: of the order of the facts.
        batch_size: forget facts a forward pass; all of them unless given.
        accumulate: batches a step; the loss is their mean.
        clip: largest L2 norm of the gradient by the masked entries; None = no clipping.
        floor: the run ends as "collapsed" once the mean probability of the batch's retain answers (exp of the
            mean log-probability over an answer's tokens) is below `floor` times the original model's on them.
            None = it never does, and retain facts that are not in the loss either are not run at all.
        checkpoints: after how many steps to call `callback`; 0 = the original model, `steps` = the end. Those
            that an early end does not reach are left out.
        callback: called with the number of steps made, the edit in place in the model as it would be stored. The
            run ends there, as "finished", if it returns True.
        recompute: activations are computed again for the gradient instead of being kept (activation checkpointing):
            the same bits, less memory, about half as much time again.
        progress: show a bar.

    Returns:
        An `Update`; its `status` says whether the run finished, diverged, collapsed, or moved nothing.

    Raises:
        ValueError: the mask or the split does not fit; an argument has no meaning.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    _check(split, objective, optimizer, steps, batch_size, accumulate, clip, floor, seed, checkpoints, callback)
    steps, accumulate, seed = int(steps), int(accumulate), int(seed)  # of numpy's, torch and JSON take none
    if not isinstance(mask, Mask | ParameterMask):
        raise ValueError(f"mask is a {type(mask).__name__}; give a Mask or ParameterMask.from_tensors(…, model)")
    parameter_mask = mask.materialize(model) if isinstance(mask, Mask) else mask
    found = leaves(model, parameter_mask)
    state, before = model.state, _outside(model, parameter_mask)
    generator = torch.Generator().manual_seed(seed)
    size = len(split.forget) if batch_size is None else min(int(batch_size), len(split.forget))
    forget = schedule(len(split.forget), size, steps * accumulate, generator)
    n_retain = len(split.retain) if objective.retain_weight or floor is not None else 0
    retain = schedule(n_retain, size, steps * accumulate, generator)
    with torch.enable_grad(), model.frozen():
        prompts = _prompts(model, split, objective, forget, retain, found)
        run = _Run(objective, found, prompts, forget, retain, accumulate, floor, recompute)
        with tqdm(total=steps, unit="step", disable=not progress) as bar:
            stepper = optimizer.build([leaf.values for leaf in found])
            for step in range(steps + 1):
                status = run.measure(step, train=step < steps)
                stop = False
                if status != "diverged" and step in checkpoints and callback is not None:
                    with written(model, entries(model, found, parameter_mask)), torch.no_grad():
                        stop = bool(callback(step))
                if stop or status != "finished" or step == steps:
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
    """Prompts with their answers: forget facts, retain facts, and forget facts with another answer if needed.

    logits: rows, positions → logits, with whatever edit is in place
    read: positions whose logits predict the answer's tokens; answer: those tokens; mask: False = none left
    original: the original model's log-probabilities of the answer tokens
    normed: what the original model unembeds there, if its distributions are asked for and can be had from it
    others: how many rows after a forget fact its other answer stands
    compared: the tokens at which hidden states are compared
    sites: hooks that are read at each pass; states: what they and those that no edit reaches gave originally
    """

    model: Any
    facts: Sequence[Fact]
    logits: Callable[[Tensor, Tensor], Tensor]
    read: Int[Tensor, "fact read"]
    answer: Int[Tensor, "fact read"]
    mask: Bool[Tensor, "fact read"]
    original: Float[Tensor, "fact read"]
    normed: Float[Tensor, "fact read d_model"] | None
    others: int
    compared: Bool[Tensor, "fact pos"]
    sites: tuple[str, ...]
    states: dict[str, Tensor]

    def distribution(self, rows: Int[Tensor, " row"]) -> Float[Tensor, "row read d_vocab"]:
        """Logits where the answers are predicted, in float32 at least."""
        return _wide(self.logits(rows, self.read[rows]))

    @torch.no_grad()
    def reference(self, rows: Int[Tensor, " row"]) -> Float[Tensor, "row read d_vocab"]:
        """The same of the original model, to be called with no edit in place.

        Logits of all facts would fill the memory; what they are unembedded from does not.
        """
        return self.distribution(rows) if self.normed is None else _wide(unembed_normed(self.model, self.normed[rows]))

    def log_probs(
        self, logits: Float[Tensor, "row read d_vocab"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, "row read"]:
        """Log-probability of each answer token, in nats; 0 where there is none."""
        found = logits.log_softmax(-1).gather(-1, self.answer[rows][..., None])[..., 0]
        return found.masked_fill(~self.mask[rows], 0)

    def answers(self, log_probs: Float[Tensor, "row read"], rows: Int[Tensor, " row"]) -> Answers:
        return Answers(log_probs, self.original[rows], self.mask[rows])

    def texts(self, states: dict[str, Tensor], rows: Int[Tensor, " row"]) -> Texts:
        """`states`: what the sites gave for these rows in this pass."""
        original = {name: values[rows] for name, values in self.states.items()}
        facts = tuple(self.facts[i] for i in rows.tolist())
        return Texts(facts, original | states, original, self.compared[rows])


@dataclass(eq=False)
class _Run:
    """One run: its data, its settings and what it has measured so far."""

    objective: Any
    found: Sequence[Leaf]
    prompts: _Prompts
    forget: list[Tensor]
    retain: list[Tensor]
    accumulate: int
    floor: float | None
    recompute: bool

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
                parts.append(self._batch(self.forget[i], self.retain[i]))
        row = {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]}
        original = row.pop("original")
        gradients = [leaf.values.grad for leaf in self.found if leaf.values.grad is not None]
        row["grad_norm"] = float(torch.nn.utils.get_total_norm(gradients)) if train else float("nan")
        self.history.append({"step": step, **row})
        finite = torch.tensor([row["loss"], row["grad_norm"] if train else 0.0]).isfinite().all()
        if not finite or not all(bool(leaf.values.isfinite().all()) for leaf in self.found):
            return "diverged"
        collapsed = self.floor is not None and row["retain_probability"] < self.floor * original
        return "collapsed" if collapsed else "finished"

    def _batch(self, forget: Int[Tensor, " forget"], retain: Int[Tensor, " retain"]) -> dict[str, float]:
        """What is measured on a batch; its gradients are added, if they are on."""
        prompts, objective = self.prompts, self.objective
        others = forget + prompts.others if isinstance(objective, Preference) else forget[:0]
        rows = torch.cat([forget, others, retain])
        n = len(rows) - len(retain)
        reference = prompts.reference(retain) if objective.retain == "kl" and len(retain) else None
        # The gradient is taken in there too: what is computed again for it must be what was computed before.
        with (
            edited(self.found),
            hooks.capture(prompts.model, prompts.sites) as states,
            recomputed(prompts.model) if self.recompute else nullcontext(),
        ):
            logits = prompts.distribution(rows)
            log_probs = prompts.log_probs(logits, rows)
            forget_term = self._forget(log_probs[:n], {k: v[:n] for k, v in states.items()}, forget, others).mean()
            losses = nll(log_probs[n:], prompts.mask[retain], "mean")
            held = self._retain(logits[n:], {k: v[n:] for k, v in states.items()}, retain, losses, reference)
            retain_term = held.mean() if len(retain) else held.sum()
            loss = objective.forget_weight * forget_term + objective.retain_weight * retain_term
            if torch.is_grad_enabled():
                (loss / self.accumulate).backward()
        original = nll(prompts.original[retain], prompts.mask[retain], "mean")
        return {
            "loss": float(loss.detach()),
            "forget": float(forget_term.detach()),
            "retain": float(retain_term.detach()),
            "retain_probability": float((-losses.detach()).exp().mean()),
            "original": float((-original).exp().mean()),
        }

    def _forget(
        self, log_probs: Tensor, states: dict[str, Tensor], rows: Tensor, others: Tensor
    ) -> Float[Tensor, " fact"]:
        if isinstance(self.objective, Internal):
            return self.objective.forget_states(self.prompts.texts(states, rows))
        answers = self.prompts.answers(log_probs[: len(rows)], rows)
        if isinstance(self.objective, Preference):
            return self.objective.prefer(answers, self.prompts.answers(log_probs[len(rows) :], others))
        return self.objective.forget(*answers)

    def _retain(
        self, logits: Tensor, states: dict[str, Tensor], rows: Tensor, losses: Tensor, reference: Tensor | None
    ) -> Float[Tensor, " fact"]:
        """The retain term of each fact; `losses` is their negative log-likelihood, `reference` the original logits."""
        if self.objective.retain == "nll" or not len(rows):
            return losses
        if reference is not None:
            return kl(reference, logits, self.prompts.mask[rows], "mean")
        texts = self.prompts.texts(states, rows)
        gaps = [squared_distance(x, texts.original[name]) / x.shape[-1] for name, x in texts.states.items()]
        return over_tokens(torch.stack(gaps).sum(0), texts.mask, "mean")


def _prompts(
    model: Any, split: Any, objective: Any, forget: list[Tensor], retain: list[Tensor], found: Sequence[Leaf]
) -> _Prompts:
    """Encode the facts that the run will read, and measure the original model on them.

    The batches are renumbered in place to rows of these prompts.
    """
    used = [sorted({int(i) for batch in batches for i in batch}) for batches in (forget, retain)]
    facts = [split.forget[i] for i in used[0]] + [split.retain[i] for i in used[1]]
    for batches, indices, offset in ((forget, used[0], 0), (retain, used[1], len(used[0]))):
        for n, batch in enumerate(batches):
            batches[n] = torch.searchsorted(torch.tensor(indices, dtype=torch.long), batch) + offset
    layer = lowest_layer(model, found)
    others, sites = len(facts), _sites(model, objective, layer)
    if isinstance(objective, Preference):
        facts += _other_answers(model, objective, split, used[0])
    encoded = encode(model, facts)
    tokens, attention_mask = encoded.tokens, encoded.attention_mask
    read, targets = encoded.reads()
    kept = slice(None) if objective.retain == "states" else slice(len(used[0]))
    states = hooks.states(model, tokens[kept], attention_mask[kept], sites) if sites else {}
    # No later token has a say in what is read.
    width = tokens.shape[1] if sites else int(read.max()) + 1
    logits = _reader(model, tokens[:, :width], attention_mask[:, :width], layer)
    if layer is not None and model.fast:
        sites = tuple(site for site in sites if _layer(site) >= layer)
    compared = encoded.answer_mask if getattr(objective, "tokens", "") == "answer" else attention_mask
    prompts = _Prompts(
        model,
        facts,
        logits,
        read,
        targets.answer,
        targets.mask,
        torch.empty(read.shape),
        None,
        others,
        compared,
        sites,
        states,
    )
    return _measured(prompts, found, keep=objective.retain == "kl" and model.fast)


def _reader(
    model: Any, tokens: Int[Tensor, "fact pos"], attention_mask: Bool[Tensor, "fact pos"], layer: int | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows, positions → logits; from `layer` on if there is one and the model can be continued from there."""
    if layer is not None and model.fast:
        return hooks.prefix(model, tokens, attention_mask, layer).run

    def logits(rows: Tensor, positions: Tensor) -> Tensor:
        with hooks.read_only(model, positions):
            return model.logits(tokens[rows], attention_mask[rows])

    return logits


@torch.no_grad()
def _measured(prompts: _Prompts, found: Sequence[Leaf], *, keep: bool) -> _Prompts:
    """With the original model's log-probabilities, and with what it unembeds if `keep`."""
    original, normed = [], []
    # By the path that steps take, so that nothing but the values can make a difference.
    with edited(found), hooks.capture(prompts.model, ("unembed.hook_in",) if keep else ()) as seen:
        for rows in torch.arange(len(prompts.facts)).split(CHUNK):
            original.append(prompts.log_probs(prompts.distribution(rows), rows))
            normed += list(seen.values())
    return replace(prompts, original=torch.cat(original), normed=torch.cat(normed) if keep else None)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _sites(model: Any, objective: Any, layer: int | None) -> tuple[str, ...]:
    """The hooks that the objective reads; at least one of them lies where the edit acts."""
    if not isinstance(objective, Internal):
        return ()
    sites = objective.sites(model.cfg.n_layers)
    highest = max(map(_layer, sites))
    if layer is not None and highest < layer:
        raise ValueError(
            f"{objective!r} reads block {highest} and below, but the mask lets nothing below block {layer} change, so "
            "no edit can reach what is read; select lower components, or read a higher layer"
        )
    return sites


def _layer(site: str) -> int:
    """The block of a hook `blocks.<layer>.…`."""
    return int(site.split(".")[1])


def _other_answers(model: Any, objective: Preference, split: Any, used: list[int]) -> list[Fact]:
    answers = objective.others(split.forget)
    facts = [replace(split.forget[i], answer=answers[i]) for i in used]
    try:
        encode(model, facts)
    except ValueError as error:
        raise ValueError(
            f"the other answers of {objective!r} do not fit {model.name}: {error}. Word them in its tokens; "
            "DPO(refusal=None) takes answers of other subjects"
        ) from error
    return facts


def schedule(n: int, size: int, n_batches: int, generator: torch.Generator) -> list[Tensor]:
    """Batches of `size` of n facts in random order, none again before all have been seen; all if n ≤ size."""
    if n <= size:
        return [torch.arange(n)] * n_batches
    rounds = -(-size * n_batches // n)
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(rounds)])
    return list(order[: size * n_batches].split(size))


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
    optimizer: Any,
    steps: int,
    batch_size: int | None,
    accumulate: int,
    clip: float | None,
    floor: float | None,
    seed: int,
    checkpoints: Collection[int],
    callback: Any,
) -> None:
    for name, value in (("steps", steps), ("accumulate", accumulate), ("batch_size", batch_size), ("clip", clip)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not value > 0):
            raise ValueError(f"{name} must be a number above 0, not {value!r}")
        if name != "clip" and value is not None and not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
    if not isinstance(split, FactSplit):
        raise ValueError(f"split is a {type(split).__name__}; give a FactSplit: facts.split(forget=…, seed=0)")
    if not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed must be a whole number, 0 or above, not {seed!r}")
    if not isinstance(checkpoints, Collection) or isinstance(checkpoints, str):
        raise ValueError(f"checkpoints must be several numbers of steps, like (0, 10), not {checkpoints!r}")
    if beyond := [step for step in checkpoints if not isinstance(step, Integral) or not 0 <= step <= steps]:
        raise ValueError(f"checkpoints must be whole numbers from 0 to steps={steps}, not {beyond[0]!r}")
    if (len(checkpoints) or callback is not None) and not callable(callback):
        raise ValueError(f"callback is what checkpoints call; it must be a function of the step, not {callback!r}")
    if isinstance(optimizer, type) or not isinstance(optimizer, Optimizer):
        raise ValueError(f"{optimizer!r} is not an optimizer of locus; give one, e.g. locus.AdamW(lr=1e-4)")
    if torch.is_inference_mode_enabled():
        raise ValueError("unlearning needs gradients, which torch.inference_mode() forbids: leave that block first")
    if floor is not None and not 0 <= floor <= 1:
        raise ValueError(f"floor must be a fraction of the original probability, in [0, 1], or None; not {floor!r}")
    if isinstance(objective, type) or not isinstance(objective, Objective | Preference | Internal):
        raise ValueError(
            f"{objective!r} is not an objective: it needs forget_weight, retain_weight, retain and forget(); "
            "see locus.unlearn.objectives, e.g. locus.NPO(beta=0.1)"
        )
    if objective.retain == "states" and not isinstance(objective, Internal):
        raise ValueError(f"{objective!r} reads no hidden states to hold on to; use retain='nll' or 'kl'")
    if not len(split.forget):
        raise ValueError("split.forget has no facts, so there is nothing to unlearn")
    if not len(split.retain) and objective.retain_weight:
        raise ValueError("split.retain has no facts; split more facts, or set retain_weight=0 in the objective")
