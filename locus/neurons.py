"""Neurons replaced one at a time: a change of rank one after the MLP, so that no MLP is run for it.

A neuron n adds a_n · W_out[n] to the output o of its MLP. Replacing a_n by a'_n adds δ = (a'_n - a_n) · W_out[n], and
the residual stream that enters the next layer moves by δ; by N(o + δ) - N(o) where a norm N follows the MLP (olmo2,
gemma). So each row begins at the next layer, or at the final norm.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Component, after_neurons
from locus.sweeps import Starter


def sites(layers: Sequence[int]) -> list[str]:
    """The hooks whose activations in the recorded run are needed."""
    return [f"blocks.{layer}.{name}" for layer in layers for name in ("mlp.hook_post", "mlp.out.hook_out")]


def rank_one(
    recorded: hooks.Trace, neurons: Sequence[Component], replacement: dict[str, Float[Tensor, "batch pos d_mlp"]]
) -> tuple[list[int], Starter]:
    """Cells of `sweeps.sweep`, one a neuron: the layer at which each begins, and their rows.

    Args:
        recorded: the run that is intervened on.
        neurons: components of kind "neuron" or "value".
        replacement: a' by hook; where it equals a, nothing is changed.
    """
    index = torch.tensor([neuron.index for neuron in neurons], device=recorded.inputs[0].device)
    positions = torch.arange(recorded.inputs[0].shape[1], device=index.device)
    rows = torch.arange(len(recorded), device=index.device)

    def start(some: list[int]) -> hooks.Start:
        layer = neurons[some[0]].layer
        name, here = f"blocks.{layer}.mlp.hook_post", index[some]
        change = (replacement[name] - recorded.site(name))[:, :, here].movedim(-1, 0)
        first = torch.where(change != 0, positions, len(positions)).amin(-1)
        vectors = after_neurons(recorded.model, layer)[0][here]

        def enter(residual: Tensor) -> Tensor:
            delta = change[..., None] * vectors[:, None, None]
            return residual + _moved(recorded, layer, delta).flatten(0, 1)

        return hooks.Start(rows.repeat(len(some)), enter=enter, first=first.flatten())

    return [neuron.layer + 1 for neuron in neurons], start


def adds_up(recorded: hooks.Trace, layers: Sequence[int]) -> bool:
    """Whether blocks are what this module takes them for, tried on the run of the first prompt without any neuron."""
    if not recorded.model.fast:
        return False  # its blocks cannot be run on other rows
    row = torch.zeros(1, dtype=torch.long, device=recorded.inputs[0].device)
    for layer in layers:
        name = f"blocks.{layer}.mlp.hook_post"
        with torch.no_grad(), hooks.edits(recorded.model, [(name, torch.zeros_like)]):
            expected = recorded.block(layer, recorded.inputs[layer][:1], row)
            delta = -(recorded.site(name)[:1] @ after_neurons(recorded.model, layer)[0])
            moved = _moved(recorded, layer, delta[None], 1)[0]
            error = (recorded.inputs[layer + 1][:1] + moved - expected).abs().amax(-1)
            # Of what moves at each position, and not of the stream, of which a few entries may be very large.
            rounding = 8 * torch.finfo(expected.dtype).eps * expected.abs().amax(-1)
        if not bool((error <= 1e-3 * moved.abs().amax(-1) + rounding).all()):
            return False
    return True


def _moved(
    recorded: hooks.Trace, layer: int, delta: Float[Tensor, "cell batch pos d_model"], batch: int | None = None
) -> Float[Tensor, "cell batch pos d_model"]:
    """By how much the output of a block moves when that of its MLP's last matrix moves by `delta`."""
    norm = after_neurons(recorded.model, layer)[1]
    if norm is None:
        return delta
    out = recorded.site(f"blocks.{layer}.mlp.out.hook_out")[:batch]
    return norm((out + delta).flatten(0, 1)).reshape(delta.shape) - norm(out)
