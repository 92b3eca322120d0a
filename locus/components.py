"""Components of a transformer: where each one acts (hook site) and what it owns (parameter entries).

The only architecture-aware file. A component is a small frozen value; the numbers about it live in tensors
elsewhere. What a component owns is stated for the parameters as Hugging Face stores them, so that a mask means
the same thing for our engine, for a training loop of yours and for a checkpoint on disk.

| kind     | prints as | owns                                                                    | acts at            |
|----------|-----------|-------------------------------------------------------------------------|--------------------|
| `head`   | `L9H6`    | its query rows and output columns; its key and value rows too, unless    | `attn.hook_z`      |
|          |           | they are shared by a group (grouped-query attention)                     |                    |
| `kv`     | `L9KV2`   | the key and value rows of one key/value group                            | `attn.hook_k`, `v` |
| `neuron` | `L3N12`   | its input (and gate) row, their biases, and its output column            | `mlp.hook_post`    |
| `value`  | `L3V12`   | its output column only: the value vector of Geva et al. (2021)           | `mlp.hook_post`    |
| `mlp`    | `L4MLP`   | every parameter of the MLP (of a mixture: router and experts)            | `hook_mlp_out`     |
| `attn`   | `L4ATTN`  | every parameter of the attention block                                   | `hook_attn_out`    |
| `expert` | `L2E5`    | the input and output projections of one expert                           | its router weight  |

The output bias of attention or of an MLP belongs to no head and no neuron, only to the block.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import AttentionBridge

LABELS = {
    "head": "H",
    "kv": "KV",
    "neuron": "N",
    "value": "V",
    "mlp": "MLP",
    "attn": "ATTN",
    "expert": "E",
}
MEANING = {
    "head": "the output of one attention head before the output projection, index on the third axis",
    "kv": "the keys and values that the query heads of one group read; hook_k as well",
    "neuron": "one hidden unit of the MLP after the nonlinearity, with its input, gate and output weights",
    "value": "the same unit with its output weights only, the value vector that it adds to the residual stream",
    "mlp": "the whole MLP, as it is added to the residual stream",
    "attn": "the whole attention block, as it is added to the residual stream",
    "expert": "one expert of a mixture, by its router weight",
}
# Hooks of a block that belong to no component, as `locus.patching` names them.
STREAM = {
    "hook_resid_pre": "the residual stream before the block [batch, pos, d_model]",
    "hook_resid_mid": "between attention and MLP [batch, pos, d_model]",
    "hook_resid_post": "after the block [batch, pos, d_model]",
    "attn.hook_q": "queries [batch, pos, head, d_head]; hook_k and hook_v have one entry a key/value group",
    "attn.hook_pattern": "attention after the softmax [batch, head, query, key]",
}
BLOCKS = ("mlp", "attn")
_LABEL = re.compile(r"L(\d+)(MLP|ATTN|KV|H|N|V|E)(\d+)?")


@dataclass(frozen=True, order=True, slots=True)
class Component:
    """One component, e.g. `Component(9, "head", 6)`, printed `L9H6`. `index` is None for whole blocks."""

    layer: int
    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return f"L{self.layer}{LABELS[self.kind]}{'' if self.index is None else self.index}"

    @staticmethod
    def parse(label: str) -> "Component":
        """Inverse of `str`.

        Raises:
            ValueError: `label` is not of the form L9H6, L9KV2, L3N12, L3V12, L4MLP, L4ATTN or L2E5.
        """
        match = _LABEL.fullmatch(label)
        kind = next((k for k, v in LABELS.items() if match and v == match[2]), None)
        if match is None or kind is None or (match[3] is None) != (kind in BLOCKS):
            raise ValueError(f"{label!r} is not a component; write L9H6, L9KV2, L3N12, L3V12, L4MLP, L4ATTN or L2E5")
        return Component(int(match[1]), kind, None if match[3] is None else int(match[3]))


@dataclass(frozen=True, eq=False)
class Components(Sequence[Component]):
    """Components of one model in a fixed order, with the number of parameters of each.

    Attributes:
        items: the components.
        sizes: Int[" component"], how many parameter entries each owns.
        model: fingerprint of the model's weights.
    """

    items: tuple[Component, ...]
    sizes: Int[Tensor, " component"]
    model: str

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __iter__(self) -> Iterator[Component]:
        return iter(self.items)

    def __add__(self, other: "Components") -> "Components":
        if other.model != self.model:
            raise ValueError(
                f"components of two models ({self.model} and {other.model}) cannot be joined; "
                "take both from the same model"
            )
        if repeated := set(self.items) & set(other.items):
            raise ValueError(f"{min(repeated)} would be in the list twice; join different components only")
        return Components(self.items + other.items, torch.cat([self.sizes, other.sizes]), self.model)

    def take(self, some: Int[Tensor, " chosen"]) -> "Components":
        """Those at these places, in this order."""
        return Components(tuple(self.items[i] for i in some.tolist()), self.sizes[some], self.model)

    @property
    def layers(self) -> Int[Tensor, " component"]:
        return torch.tensor([c.layer for c in self.items], dtype=torch.long)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each component, in order."""
        return tuple(c.kind for c in self.items)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(str(c) for c in self.items)

    def __repr__(self) -> str:
        kinds = "+".join(sorted(set(self.kinds)))
        return f"Components({len(self)} {kinds}, {int(self.sizes.sum()):,} parameters, model {self.model})"


def counts(model: Any) -> dict[str, int]:
    """How many components of each kind a layer of `model` has; 0 where the model has none."""
    cfg = model.cfg
    dense = "out" in model.bridge.blocks[0].mlp.submodules
    neurons = len(model.bridge.blocks[0].mlp.W_out) if dense else 0
    experts = 0 if dense else _experts(model, 0)[0].shape[0]
    return {
        "head": cfg.n_heads,
        "kv": n_kv(model),
        "neuron": neurons,
        "value": neurons,
        "mlp": 1,
        "attn": 1,
        "expert": experts,
    }


def n_kv(model: Any) -> int:
    """Number of key/value groups; equals the number of heads without grouped-query attention."""
    return getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads


def components(model: Any, kind: str) -> Components:
    """All components of one kind, layer by layer.

    Raises:
        ValueError: the kind is unknown, or the model has none of it (neurons of a mixture of experts).
    """
    if kind not in LABELS:
        raise ValueError(f"unknown kind of component {kind!r}; the kinds are {', '.join(LABELS)}")
    per_layer = counts(model)[kind]
    if not per_layer:
        have = ", ".join(k for k, n in counts(model).items() if n)
        raise ValueError(f"{model.name} has no component of kind {kind!r}; it has {have}")
    indices: Sequence[int | None] = [None] if kind in BLOCKS else range(per_layer)
    items = tuple(Component(layer, kind, i) for layer in range(model.cfg.n_layers) for i in indices)
    # All components of a kind in a layer own equally many entries, so one of them is measured.
    sizes = torch.tensor([_size(model, Component(k, kind, indices[0])) for k in range(model.cfg.n_layers)])
    sizes = sizes.repeat_interleave(len(indices))
    return Components(items, sizes, model.fingerprint)


def slices(model: Any, component: Component) -> dict[str, tuple[Any, ...]]:
    """What a component owns: Hugging Face parameter name → index into that tensor.

    `weights[name][index]` are its entries; zeroing them all equals zeroing its activation (a test, in float64,
    for every kind and architecture).

    Raises:
        ValueError: the component does not exist in this model.
    """
    available = counts(model).get(component.kind, 0)
    if component.layer >= model.cfg.n_layers or (component.index or 0) >= available:
        raise ValueError(
            f"{model.name} has no {component}: it has {model.cfg.n_layers} layers with {available} "
            f"of kind {component.kind!r} each"
        )
    return _slices(model, component.layer, component.kind, [component.index or 0])


def describe(model: Any) -> str:
    """What can be located and edited in a model: every kind of component, its hook, shape, weights and meaning."""
    from locus import hooks  # which needs this module

    lines = [
        f"{model.name}: {model.cfg.n_layers} layers, {sum(w.numel() for w in model.weights.values()):,} parameters"
    ]
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    for kind, meaning in MEANING.items():
        if not counts(model).get(kind):
            lines.append(f"\n{kind}: none")
            continue
        found = components(model, kind)
        with torch.no_grad(), hooks.capture(model, [site(found[0])]) as held:
            model.logits(tokens)
        activation = held[site(found[0])]
        whole = len(activation) == 1  # a router's axis is flat
        axes = ["batch, pos", *activation.shape[2:]] if whole else ["batch * pos", *activation.shape[1:]]
        lines += [
            f"\n{kind}: {len(found):,}, {found[0]} … {found[-1]}: {meaning}",
            f"  hook     {site(found[0]).replace('blocks.0', 'blocks.LAYER')} [{', '.join(map(str, axes))}]",
        ]
        for name, index in slices(model, found[0]).items():
            weight = model.weights[name]
            lines.append(f"  weights  {name} {tuple(weight.shape)}: {weight[index].numel():,} parameters of {found[0]}")
    lines.append("\nOther hooks of a block, for locus.patching:")
    known = model.bridge.hook_dict
    lines += [f"  blocks.LAYER.{name:18} {meaning}" for name, meaning in STREAM.items() if f"blocks.0.{name}" in known]
    return "\n".join(lines)


def parameter_mask(
    model: Any, components: Components, selected: Bool[Tensor, " component"]
) -> dict[str, Bool[Tensor, "..."]]:
    """Full-shape masks of the parameter entries that the selected components own; touched names only."""
    if components.model != model.fingerprint:
        raise ValueError(
            f"these components belong to model {components.model}, not to {model.name} ({model.fingerprint}); "
            "make the mask from this model's components"
        )
    masks: dict[str, Tensor] = {}
    for (layer, kind), members in _groups(components, selected.nonzero().flatten().tolist()).items():
        for name, index in _slices(model, layer, kind, [components[i].index or 0 for i in members]).items():
            if name not in masks:
                masks[name] = torch.zeros(model.weights[name].shape, dtype=torch.bool)
            masks[name][index] = True
    return masks


def owned(model: Any, components: Components) -> list[str]:
    """Names of the parameters of which the components own entries."""
    groups = _groups(components, range(len(components)))
    return list(dict.fromkeys(name for (layer, kind) in groups for name in _slices(model, layer, kind, [0])))


def totals(
    model: Any, entries: Mapping[str, Float[Tensor, "..."]], components: Components
) -> Float[Tensor, " component"]:
    """Sum over the entries that each component owns, of full-shape tensors of numbers about the parameters."""
    first = next(iter(entries.values()))
    sums = torch.zeros(len(components), dtype=first.dtype, device=first.device)
    for (layer, kind), members in _groups(components, range(len(components))).items():
        each = model.cfg.d_head if kind in ("head", "kv") else 1
        for name, index in _slices(model, layer, kind, [components[i].index or 0 for i in members]).items():
            values = entries[name]
            if kind in BLOCKS:
                sums[members] += values.sum()
                continue
            axis, units = len(index) - 1, index[-1].to(values.device)
            line = values.movedim(axis, 0).reshape(values.shape[axis], -1).sum(1)
            # A fused tensor has several parts, each with the units of all components in their order.
            sums[members] += line[units].reshape(-1, len(members), each).sum((0, 2))
    return sums


def site(component: Component) -> str:
    """The hook at which a component acts, in TransformerLens' names.

    The index of the component is the head axis of `hook_z` and `hook_v`, and the last axis of `hook_post`.
    """
    names = {
        "head": "attn.hook_z",
        "kv": "attn.hook_v",
        "neuron": "mlp.hook_post",
        "value": "mlp.hook_post",
        "mlp": "hook_mlp_out",
        "attn": "hook_attn_out",
        "expert": "mlp.hook_expert_weights",
    }
    return f"blocks.{component.layer}.{names[component.kind]}"


def used_already(model: Any, name: str) -> bool:
    """Whether a hook of attention fires after its values were used, where attention is Hugging Face's own."""
    if not name.endswith(("hook_pattern", "hook_attn_scores")):
        return False
    attn = model.bridge.get_submodule(name.rpartition(".")[0])
    inside = getattr(attn.original_component, "accepts_pattern_fn", False)
    return type(attn).forward is AttentionBridge.forward and not inside


def after_neurons(model: Any, layer: int) -> tuple[Float[Tensor, "d_mlp d_model"], nn.Module | None]:
    """What the neurons of a layer write: their output vectors, and the norm of the MLP's output, if there is one."""
    block = model.bridge.blocks[layer]
    return block.mlp.W_out.detach(), block.ln2_post if "ln2_post" in block.submodules else None


def _groups(components: Components, members: Iterable[int]) -> dict[tuple[int, str], list[int]]:
    """Positions in `components` by layer and kind."""
    groups: dict[tuple[int, str], list[int]] = {}
    for i in members:
        groups.setdefault((components[i].layer, components[i].kind), []).append(i)
    return groups


def _slices(model: Any, layer: int, kind: str, indices: list[int]) -> dict[str, tuple[Any, ...]]:
    """What several components of one layer and kind own together."""
    block = model.bridge.blocks[layer]
    chosen = torch.tensor(indices)
    if kind in BLOCKS:
        return {name: (slice(None),) for name in _owned(model, getattr(block, kind))}
    if kind == "expert":
        return {model.name_of(p): (chosen,) for p in _experts(model, layer)}
    found: dict[str, list[tuple[int, Tensor]]] = {}
    if kind in ("head", "kv"):
        d_head = model.cfg.d_head
        units = (chosen[:, None] * d_head + torch.arange(d_head)).flatten()
        shared = n_kv(model) != model.cfg.n_heads
        names = {"kv": ["k", "v"], "head": ["q"] if shared else ["q", "k", "v"]}[kind]
        inputs = [getattr(block.attn, name) for name in names]
        output = block.attn.o if kind == "head" else None
    else:
        units = chosen
        mlp = block.mlp
        inputs = [getattr(mlp, n) for n in ("gate", "in") if kind == "neuron" and n in mlp.submodules]
        output = mlp.out
    for linear in inputs:
        _add(model, linear, "weight", 0, units, found)
        _add(model, linear, "bias", 0, units, found)
    if output is not None:
        _add(model, output, "weight", 1, units, found)
    return {name: _index(parts) for name, parts in found.items()}


def _size(model: Any, component: Component) -> int:
    return sum(model.weights[name][index].numel() for name, index in slices(model, component).items())


def _owned(model: Any, module: nn.Module) -> list[str]:
    """Names of the stored parameters that belong to a block, fused ones once."""
    names = dict.fromkeys(model.name_of(p) for p in module.parameters())
    return list(names)


def _experts(model: Any, layer: int) -> list[nn.Parameter]:
    """The fused expert tensors [expert, ...] of a layer of a mixture."""
    mlp = model.bridge.blocks[layer].mlp
    fused = [p for _, p in mlp.named_parameters() if p.ndim == 3]
    if not fused:
        raise ValueError(f"{model.name}: layer {layer} has neither an MLP nor fused experts that locus can find")
    return fused


def _add(
    model: Any,
    linear: nn.Module,
    attribute: str,
    axis: int,
    units: Tensor,
    found: dict[str, list[tuple[int, Tensor]]],
) -> None:
    """Record `units` along `axis` (0 = output, 1 = input, as in nn.Linear) of a module's parameter."""
    module = linear.original_component
    tensor = getattr(module, attribute, None)
    if not isinstance(tensor, nn.Parameter):
        return
    live = model.live_of(tensor)
    if attribute == "weight" and not isinstance(module, nn.Linear):
        axis = 1 - axis  # transformers' Conv1D stores [in, out]
    if live.index is not None:
        if live.transposed:
            axis = 1 - axis
        if axis == live.dim:
            units = live.index[units]
    found.setdefault(live.name, []).append((axis, units))


def _index(parts: list[tuple[int, Tensor]]) -> tuple[Any, ...]:
    """One index for the parts of a stored tensor, all along one axis (q, k and v rows of a fused tensor)."""
    axes = {axis for axis, _ in parts}
    assert len(axes) == 1, "a component's parts of one tensor lie along one axis"
    units = torch.cat([units for _, units in parts])
    return (slice(None),) * axes.pop() + (units,)
