"""Keep everything outside a mask bit-identical in a training loop of your own.

    with locus.guard(model, optimizer, mask) as report:  # or (model, trainer, mask), or (model, None, mask)
        ...                                              # your loop, or trainer.train()

Masking gradients is not enough: weight decay, momentum and a clipping norm over all parameters act outside
the mask too. So three things happen inside the block:

1. gradients outside the mask are zeroed as soon as they are accumulated, before any clipping sees them, and
   tensors that the mask does not touch ask for no gradient;
2. after the step of any torch optimizer, and before each forward pass, entries outside the mask are set back
   to their bits at entry. One hook for all optimizers does this, so the optimizer may be given here, wrapped
   by accelerate or a GradScaler, or made later by a Hugging Face `Trainer`;
3. on exit everything outside the mask is compared with its bits at entry and given a checksum.

It costs one copy of the touched tensors beside them and one of the others in main memory. Of the others, a
write that torch does not count (through `.data`) is set back on exit only. Left out: parameters that are
sharded over processes (FSDP, DeepSpeed ZeRO), and buffers.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from locus.unlearn.update import bits, checksum

TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(eq=False)
class GuardReport:
    """What `guard` did; complete once its block has ended.

    checksum: SHA-256 over the names and bits of everything outside the mask, the same at entry and at exit
    n_masked: entries that may change
    n_changed: entries inside the mask that ended different from their bits at entry
    n_outside_changed: entries outside the mask that ended different: 0, or the block has raised
    n_restored: entries outside the mask that something other than a torch optimizer had moved, and that were
        only set back on exit
    n_steps: optimizer steps seen
    """

    n_masked: int
    checksum: str = ""
    n_changed: int = 0
    n_outside_changed: int = 0
    n_restored: int = 0
    n_steps: int = 0


@dataclass(eq=False)
class _Guarded:
    """A parameter of the model, what of it may change (None = nothing), and its values at entry."""

    name: str
    parameter: nn.Parameter
    mask: Bool[Tensor, "..."] | None
    original: Tensor
    wanted_grad: bool
    version: int
    copy: bool  # of a part of another parameter

    def zero_outside(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(~self._mask(), 0)  # not a product: 0 · inf is not 0

    @torch.no_grad()
    def restore(self, *, force: bool = False) -> None:
        """Set entries outside the mask back to their bits at entry."""
        p = self.parameter
        if self.mask is not None:
            if self.original.device != p.device:
                self.original = self.original.to(p.device)
            moved = self.outside(self.changed())
            # No write without need: it would break the graph of a forward pass that is still to be differentiated.
            if moved.any():
                p.copy_(torch.where(moved, self.original, p))
        elif force or p._version != self.version:
            p.copy_(self.original)
            self.version = p._version

    @torch.no_grad()
    def changed(self) -> Bool[Tensor, "..."]:
        """Which entries differ in their bits from those at entry."""
        return bits(self.parameter) != bits(self.original.to(self.parameter.device))

    def outside(self, changed: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        return changed if self.mask is None else changed & ~self._mask()

    def converted(self) -> bool:
        p = self.parameter
        return p.dtype != self.original.dtype or p.shape != self.original.shape

    def _mask(self) -> Tensor:
        assert self.mask is not None
        if self.mask.device != self.parameter.device:  # the loop has moved the model
            self.mask = self.mask.to(self.parameter.device)
        return self.mask


@contextmanager
def guard(model: Any, optimizer: Any, mask: Any) -> Iterator[GuardReport]:
    """Within the block, nothing outside `mask` changes by a single bit, whatever trains the model.

    Args:
        model: a Hugging Face model (any `nn.Module`), or a `HookedModel`.
        optimizer: the torch optimizer or Hugging Face `Trainer` of the loop, to check that it trains this
            model; None if it is made later or there is none.
        mask: what may change: a `ParameterMask` or a dictionary of parameter name → boolean tensor; for a
            `HookedModel` also a `Mask`. A parameter that is not named may not change at all.

    Yields:
        A `GuardReport`, filled in at the end of the block.

    Raises:
        ValueError: the mask does not fit the model; the model has adapters (LoRA), quantized or sharded
            weights; the optimizer or trainer trains another model; a parameter was replaced inside the block.
    """
    guarded = _guarded(model, mask)
    _check_optimizer(optimizer, guarded)
    # A fused tensor and its split copies are the same entries.
    report = GuardReport(n_masked=sum(int(g.mask.sum()) for g in guarded if g.mask is not None and not g.copy))
    report.checksum = _checksum(guarded)
    ours = {id(g.parameter) for g in guarded}

    def restore(*_: Any) -> None:
        for g in guarded:
            g.restore()

    def after_step(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in ours for group in stepped.param_groups for p in group["params"]):
            report.n_steps += 1
            restore()

    handles = []
    try:
        for g in guarded:
            if g.mask is None:
                g.parameter.requires_grad_(False)
                g.parameter.grad = None  # left over from before: an optimizer would still apply it
            else:
                g.zero_outside(g.parameter)
                if g.wanted_grad:
                    handles.append(g.parameter.register_post_accumulate_grad_hook(g.zero_outside))
        handles.append(register_optimizer_step_post_hook(after_step))
        handles.append(_module(model).register_forward_pre_hook(restore))
        yield report
    finally:
        for handle in handles:
            handle.remove()
        _finish(model, guarded, report)
    _say(report)


def _finish(model: Any, guarded: list[_Guarded], report: GuardReport) -> None:
    """Set back what is outside, count, and compare the bits; also after an exception."""
    for g in guarded:
        g.parameter.requires_grad_(g.wanted_grad)
        if not g.converted():
            changed = g.changed()
            if n := int(g.outside(changed).sum()):
                report.n_restored += n
                g.restore(force=True)
                changed = g.changed()
            n_outside = int(g.outside(changed).sum())
            report.n_changed += int(changed.sum()) - n_outside
            report.n_outside_changed += n_outside
    _require_same_parameters(model, guarded)
    after = _checksum(guarded)
    if report.n_outside_changed or after != report.checksum:
        raise RuntimeError(
            f"guard: {report.n_outside_changed} entries outside the mask could not be set back "
            f"(checksum {after[:12]}, at entry {report.checksum[:12]})"
        )


def _say(report: GuardReport) -> None:
    if report.n_restored:
        warnings.warn(
            f"guard: {report.n_restored:,} entries outside the mask were moved by something other than a "
            "torch optimizer's step (a write to .data?) and were only set back on exit",
            stacklevel=4,
        )
    if not report.n_changed:
        warnings.warn(
            "guard: nothing moved: no entry inside the mask changed. Is the learning rate too small for the "
            "weights' dtype, or are the masked parameters frozen or not given to the optimizer?",
            stacklevel=4,
        )


def _checksum(guarded: list[_Guarded]) -> str:
    return checksum((g.name, g.parameter, g.mask) for g in guarded)


def _module(model: Any) -> nn.Module:
    """The module whose forward pass the loop runs."""
    return model if isinstance(model, nn.Module) else model.bridge


def _parameters(model: Any) -> dict[str, nn.Parameter]:
    """Every name of every parameter, tied ones under each of their names, as Hugging Face names them."""
    if not isinstance(model, nn.Module):
        model = model.bridge.original_model
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace("_original_component.", ""): p for name, p in named}


def _guarded(model: Any, mask: Any) -> list[_Guarded]:
    """Every parameter once, with the part of it that may change."""
    if not isinstance(model, nn.Module) and not hasattr(model, "bridge"):
        raise ValueError(
            f"guard got {model!r} as model; give the model itself: a Hugging Face model, any nn.Module, or a "
            'HookedModel, e.g. locus.load("tiny")'
        )
    _refuse_adapters(_module(model))
    if hasattr(mask, "materialize"):
        if isinstance(model, nn.Module):
            raise ValueError(
                "guard got a Mask of components and a plain module, which does not know its components; "
                "give guard(model, optimizer, mask.materialize(hooked_model))"
            )
        mask = mask.materialize(model)
    if not isinstance(mask, Mapping):
        raise ValueError(f"guard got a mask of type {type(mask).__name__}; give a Mask, a ParameterMask or a dict")
    if isinstance(model, nn.Module):
        parameters, split = _parameters(model), {}
    else:
        # What the forward pass reads. On some architectures these are split copies of a stored, fused tensor.
        parameters = dict(model.weights)
        split = {f"{live.name}[{i}]": live for i, live in enumerate(model.live) if live.index is not None}
    masks = _checked(mask, parameters)
    for name, live in split.items():
        stored = masks.get(id(parameters[live.name]))
        parameters[name] = live.tensor
        if stored is not None and live.take(stored).any():
            masks[id(live.tensor)] = live.take(stored).contiguous()
    found = {}
    for name, p in parameters.items():
        if id(p) not in found:
            m = masks.get(id(p))
            found[id(p)] = _Guarded(
                name,
                p,
                None if m is None else m.to(p.device),
                p.detach().clone() if m is not None else p.detach().cpu().clone(),
                p.requires_grad,
                p._version,
                name in split,
            )
    return list(found.values())


def _checked(mask: Mapping, parameters: dict[str, nn.Parameter]) -> dict[int, Tensor]:
    """The masks by the parameter they are of, once names, shapes and dtypes are known to fit."""
    masks: dict[int, Tensor] = {}
    for name, selected in mask.items():
        p = parameters.get(name)
        if p is None:
            raise ValueError(
                f"the mask names {name!r}, which the model has not; its parameters are named like "
                f"{next(iter(parameters))!r} (Hugging Face names, without `_original_component`)"
            )
        if not isinstance(selected, Tensor) or selected.dtype != torch.bool:
            kind = selected.dtype if isinstance(selected, Tensor) else type(selected).__name__
            raise ValueError(f"the mask of {name} is {kind}; give a boolean tensor, True = may change")
        if selected.shape != p.shape:
            shapes = f"{tuple(selected.shape)}, the model's {tuple(p.shape)}"
            raise ValueError(f"the mask of {name} has shape {shapes}; it was made for another model")
        if p.is_meta or type(p).__module__.startswith("torch.distributed"):
            raise ValueError(f"{name} is not wholly on one device; load the model on one (not meta or sharded)")
        if p.dtype not in TRAINABLE or getattr(p, "quant_state", None) is not None:
            raise ValueError(
                f"{name} is quantized ({type(p).__name__}, {p.dtype}): its entries share bytes and scales "
                "and cannot be kept one by one; load the model unquantized"
            )
        if id(p) in masks and not torch.equal(masks[id(p)], selected):
            raise ValueError(f"{name} is tied to another parameter of the mask, and the two masks differ")
        if selected.any():
            masks[id(p)] = selected
    if not masks:
        raise ValueError("the mask selects nothing: no entry could change; check how it was made")
    return masks


def _refuse_adapters(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if any(base.__name__ == "BaseTunerLayer" for base in type(part).__mro__) or hasattr(part, "lora_A"):
            raise ValueError(
                f"{name} carries an adapter (LoRA or another PEFT method). Its low-rank matrices add to the "
                "whole weight, so each of their entries moves entries outside the mask, and a mask of base "
                "weights cannot hold them. Train the base weights (model.unload() drops the adapter, "
                "model.merge_and_unload() adds it in), or train the adapter without a guard"
            )
        if getattr(part, "sparse", False) and isinstance(part, nn.Embedding):
            raise ValueError(f"{name} makes sparse gradients, which guard cannot mask; set sparse=False")


def _check_optimizer(optimizer: Any, guarded: list[_Guarded]) -> None:
    """Refuse an optimizer or trainer that would train something else."""
    if optimizer is None:
        return
    if hasattr(optimizer, "train") and hasattr(optimizer, "model"):
        theirs = list(optimizer.model.parameters())
        kind = "trainer"
    elif hasattr(optimizer, "param_groups"):
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        kind = "optimizer"
    else:
        raise ValueError(
            f"guard got a {type(optimizer).__name__} as optimizer; give a torch optimizer, a Trainer, or None"
        )
    masked = {id(g.parameter) for g in guarded if g.mask is not None}
    if masked.isdisjoint(map(id, theirs)):
        raise ValueError(
            f"the {kind} holds none of the masked parameters, so nothing could change; make it from this "
            "model (master copies in another precision are not supported)"
        )


def _require_same_parameters(model: Any, guarded: list[_Guarded]) -> None:
    """Refuse to vouch for a model that is not the one guarded."""
    known = {id(g.parameter): g for g in guarded}
    for name, p in _module(model).named_parameters():
        if id(p) not in known or known[id(p)].converted():
            raise ValueError(
                f"{name} was replaced, converted or added inside the guard's block, so nothing can be said "
                "of it; add adapters and convert dtypes before or after"
            )
