"""Loading models: one representation for locating and for editing.

`HookedModel` wraps a TransformerLens `TransformerBridge`, which itself wraps the Hugging Face module: the weights
that are located on are the weights that are edited and saved. Nothing is folded or centered.

Left out: quantized models (their entries cannot be edited one by one) and encoder-decoder models.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from locus import hooks
from locus.checked import continues, packs
from locus.components import Components, components
from locus.folder import new_directory

# Largest relative difference of logits that still counts as the same function, by dtype: float32 rounding
# through 30 layers is 1e-5, a wrong weight or position 1e-1.
PARITY = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class LiveParameter:
    """A tensor that the forward pass reads, and where it is stored under its Hugging Face name.

    On most architectures it is the stored tensor itself. Where queries, keys and values are stored fused, the
    bridge reads split tensors: `tensor == stored.index_select(dim, index)`, transposed if `transposed`.
    """

    name: str
    tensor: nn.Parameter
    module: nn.Module
    attribute: str
    dim: int | None = None
    index: Int[Tensor, " unit"] | None = None
    transposed: bool = False

    def take(self, stored: Tensor) -> Tensor:
        """The part of a stored-shaped tensor (weights, a mask) that this one holds, in this one's shape."""
        if self.index is None or self.dim is None:
            return stored
        part = stored.index_select(self.dim, self.index.to(stored.device))
        return part.T if self.transposed else part

    def put(self, stored: Tensor, values: Tensor) -> None:
        """Inverse of `take`: write this one's values into a stored-shaped tensor, in place."""
        if self.index is None or self.dim is None:
            stored.copy_(values)
        else:
            stored.index_copy_(self.dim, self.index.to(stored.device), values.T if self.transposed else values)


class HookedModel:
    """A language model to locate in and to edit.

    Attributes:
        name: how tables call it.
        bridge: the TransformerLens `TransformerBridge`; its methods (`run_with_cache`, `run_with_hooks`,
            `to_tokens`, `W_out`, …) are also reached from here.
        tokenizer: the tokenizer, as saved with the model (no token is added that it does not add itself).
        weights: Hugging Face parameter name → the stored tensor; tied names once.
        live: what the forward pass reads (see `LiveParameter`).
        fingerprint: first 12 hex digits of the SHA-256 of the weights as loaded; components and masks carry it.
        parity: largest difference of its logits from plain Hugging Face's, on a fixed batch.
        fast: whether the model can be continued from an inner layer (`hooks.Trace`), with the same logits.
        packed: whether a sweep may leave out the positions before a change (`checked.packs`).
    """

    def __init__(self, bridge: Any, tokenizer: Any, name: str, weights: dict[str, nn.Parameter]) -> None:
        self.bridge = bridge
        self.tokenizer = tokenizer
        self.name = name
        self.weights = weights
        self.parity = float("nan")
        self.fast = False
        self.packed = False
        self._names: dict[Tensor, str] = {p: n for n, p in weights.items()}
        self.live = tuple(_live_parameters(self))
        self._live_of: dict[Tensor, LiveParameter] = {live.tensor: live for live in self.live}
        self.fingerprint = _fingerprint(weights.items())
        self._hashed = (self._versions(), self.fingerprint)

    @property
    def state(self) -> str:
        """`fingerprint` of the weights as they are now, edits in place included; an `Update` belongs to a state."""
        versions = self._versions()
        if versions != self._hashed[0]:
            self._hashed = (versions, _fingerprint((name, self.stored(name)) for name in self.weights))
        return self._hashed[1]

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """Changes with every write to a weight: where each tensor is, and torch's count of writes to it.

        Torch does not count writes through `.data`; `write` does it right.
        """
        tensors = (*self.weights.values(), *(live.tensor for live in self.live))
        return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)

    @property
    def cfg(self) -> Any:
        return self.bridge.cfg

    @property
    def device(self) -> torch.device:
        return next(iter(self.weights.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

    def logits(
        self, tokens: Int[Tensor, "batch pos"], attention_mask: Bool[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch _ d_vocab"]:
        """Logits of a batch; padding may be on either side when `attention_mask` (True = a token) says where.

        One a position, [batch, pos, d_vocab]; only some within `hooks.read_only`.

        Autograd is on unless the caller turns it off. Logits at padding mean nothing.
        """
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.long()
        with hooks.finite_masks(self) if mask is not None and self.dtype == torch.float64 else nullcontext():
            return self.bridge(
                tokens.to(self.device),
                attention_mask=None if mask is None else mask.to(self.device),
                return_type="logits",
                use_cache=False,
            )

    def components(self, kind: str) -> Components:
        """All heads, kv groups, neurons, values, mlps, attns or experts of the model, layer by layer."""
        return components(self, kind)

    def name_of(self, parameter: Tensor) -> str:
        """Hugging Face name of a parameter that the model stores or reads."""
        name = self._names.get(parameter)
        return self._live_of[parameter].name if name is None else name

    def live_of(self, parameter: Tensor) -> LiveParameter:
        """The live parameter that a tensor of the forward pass is."""
        return self._live_of[parameter]

    @torch.no_grad()
    def write(self, name: str, values: Tensor) -> None:
        """Set a whole parameter by its Hugging Face name, in place, wherever the forward pass reads it."""
        self.weights[name].copy_(values)
        for live in self.live:
            if live.name == name and live.index is not None:
                live.tensor.copy_(live.take(self.weights[name]))

    @torch.no_grad()
    def stored(self, name: str) -> Tensor:
        """A copy of a parameter as it would be saved; a fused one rebuilt from what the forward pass reads."""
        tensor = self.weights[name].detach().clone(memory_format=torch.contiguous_format)
        for live in self.live:
            if live.name == name and live.index is not None:
                live.put(tensor, live.tensor.detach())
        return tensor

    @contextmanager
    def frozen(self, but: Iterable[nn.Parameter] = ()) -> Iterator[None]:
        """Only the parameters of `but` ask for a gradient inside; what asked before asks again afterwards."""
        free = {id(p) for p in but}
        before = [(p, p.requires_grad) for p in self.bridge.parameters()]
        try:
            for p, _ in before:
                p.requires_grad_(id(p) in free)
            yield
        finally:
            for p, asked in before:
                p.requires_grad_(asked)

    def save_pretrained(self, directory: str | os.PathLike) -> Path:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` loads with equal logits.

        Weights (fused tensors rebuilt from what the forward pass reads), tied embeddings, configuration and
        tokenizer. Written to a temporary directory and renamed.

        Raises:
            ValueError: `directory` exists and is not empty.
        """
        from transformers import AutoModelForCausalLM

        directory = Path(directory)
        if directory.is_file():
            raise ValueError(f"{directory} is a file; choose a new directory for the model")
        if directory.exists() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty; choose a new directory for the model")
        stored = {name: self.stored(name) for name in self.weights}
        config = self.bridge.original_model.config
        with torch.random.fork_rng():
            plain = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        missing, unexpected = plain.load_state_dict(stored, strict=False)
        plain.tie_weights()
        untied = [n for n in missing if n in dict(plain.named_parameters())]
        if unexpected or untied:
            raise ValueError(f"{self.name} cannot be saved: {unexpected or untied} have no place in its architecture")
        generation = getattr(self.bridge.original_model, "generation_config", None)
        if generation is not None:
            plain.generation_config = generation
        with new_directory(directory) as temporary:
            plain.save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
        return directory

    def __getattr__(self, name: str) -> Any:
        # Only reached for what HookedModel itself has not: the habits of TransformerLens users.
        if name.startswith("_") or "bridge" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.bridge, name)

    def __repr__(self) -> str:
        n = sum(p.numel() for p in self.weights.values())
        return (
            f"HookedModel({self.name}: {self.cfg.n_layers} layers, {self.cfg.n_heads} heads, {n:,} parameters, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device})"
        )


def load(
    name: str | os.PathLike,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    quiet: bool = False,
) -> HookedModel:
    """Load a model by name and check that its logits are those of plain Hugging Face.

    Args:
        name: `"tiny"` (trained on first use), `"smollm2"` (after `locus fetch smollm2`), a directory in Hugging
            Face's format, or a name on the hub.
        device: where to put it; default `cuda` if there is one, else `cpu`.
        dtype: of the weights.
        quiet: say nothing about the parity check.

    Raises:
        ValueError: not a model, damaged, missing from the cache, or of an unsupported architecture; the message
            says what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from locus import worlds

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source, label = _source(str(name), worlds)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        hf_model, info = loaded
    except Exception as error:  # transformers, safetensors, json and the hub each raise their own
        raise ValueError(_reason(str(name), source, error)) from error
    if info["missing_keys"] or info["mismatched_keys"]:
        lacking = sorted(map(str, info["missing_keys"])) or sorted(map(str, info["mismatched_keys"]))
        raise ValueError(
            f"{source} is incomplete: {len(lacking)} parameters are missing or misshapen, e.g. {lacking[0]}; "
            "copy or download the directory again"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise ValueError(
            f"{source} has no tokenizer that transformers can load ({_first_line(error)}); "
            "save one there with tokenizer.save_pretrained(directory)"
        ) from error
    model = wrap(hf_model.to(device).eval(), tokenizer, label)
    if not quiet:
        print(f"{label}: logits equal plain Hugging Face's (largest difference {model.parity:.1e})", file=sys.stderr)
    return model


def wrap(hf_model: Any, tokenizer: Any, name: str = "local") -> HookedModel:
    """Wrap a Hugging Face causal language model in memory; it must not be used on its own afterwards.

    Raises:
        ValueError: TransformerLens has no adapter for the architecture, the weights are quantized, or the
            wrapped model's logits differ from the plain model's.
    """
    from transformer_lens.model_bridge import TransformerBridge

    config = hf_model.config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name} is quantized, so its entries cannot be edited; load it unquantized")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder ({config.model_type}); locus takes decoder-only models")
    config.architectures = config.architectures or [type(hf_model).__name__]
    weights = dict(hf_model.named_parameters())
    dtype = next(iter(weights.values())).dtype
    if dtype == torch.float64 and hasattr(hf_model, "set_experts_implementation"):
        hf_model.set_experts_implementation("eager")  # grouped matrix products of experts have no float64
    tokens = _probe_tokens(config)
    with torch.no_grad():
        plain = hf_model(tokens.to(next(iter(weights.values())).device), use_cache=False).logits
    try:
        bridge = TransformerBridge.boot_transformers(
            "local", hf_model=hf_model, tokenizer=_reloadable(tokenizer), dtype=dtype
        )
    except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"{name} has the architecture {config.architectures[0]}, which TransformerLens cannot wrap: "
            f"{_first_line(error)}"
        ) from error
    # TransformerLens prepends BOS by default, also for models trained without one: follow the tokenizer.
    bridge.cfg.default_prepend_bos = _adds_bos(tokenizer)
    model = HookedModel(bridge, tokenizer, name, weights)
    try:
        with torch.no_grad():
            wrapped = model.logits(tokens)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: TransformerLens cannot run {config.architectures[0]} in {dtype}: {_first_line(error)}. "
            "Try another dtype, such as torch.float32."
        ) from error
    model.parity = float((wrapped - plain).abs().max())
    # Not `>`: a NaN must fail too.
    if not model.parity <= PARITY[dtype] * max(1.0, float(plain.abs().max())):
        why = "its architecture is not supported correctly, so nothing measured on it could be trusted"
        if hf_model.training:
            why = "it is in training mode, in which a pass is random; call model.eval() first"
        raise ValueError(
            f"{name}: the wrapped model's logits differ from Hugging Face's by up to {model.parity:.2g}; {why}"
        )
    model.fast = continues(model, tokens)
    model.packed = model.fast and packs(model, tokens)
    return model


def _source(name: str, worlds: Any) -> tuple[str, str]:
    """Where to load from, and what to call it."""
    if name == "tiny":
        return str(worlds.tiny()), "tiny"
    if name == "smollm2":
        return str(worlds.smollm2()), "SmolLM2-135M, 4-bit, de-quantized"
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} is not a model: it has no config.json. Give a directory written by "
                "save_pretrained, 'tiny', 'smollm2' or a name on the hub"
            )
        return str(path), path.resolve().name
    if path.exists() or name.startswith((".", "/", "~")):
        raise ValueError(f"{path} is not a directory; give a directory written by save_pretrained")
    return name, name


def _reason(name: str, source: str, error: Exception) -> str:
    """One sentence for what went wrong while loading, and the way out."""
    detail = _first_line(error)
    if not Path(source).is_dir():
        return (
            f"{name!r} is neither 'tiny', 'smollm2', a directory here, nor a model that the hub gave ({detail}); "
            "check the name and the network, or give a local directory"
        )
    if "does not recognize this architecture" in str(error) or "Unrecognized" in str(error):
        return f"{source} has an architecture that transformers cannot load as a causal language model: {detail}"
    return f"{source} is damaged or incomplete ({detail}); copy or download the directory again"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _probe_tokens(config: Any) -> Int[Tensor, "batch pos"]:
    """A fixed batch for parity checks, within the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    vocab = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    return torch.randint(0, vocab, (2, 8), generator=generator)


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def _reloadable(tokenizer: Any) -> Any:
    """A copy of the tokenizer that TransformerLens may change (it re-reads it from where it was saved)."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        copy: Any = AutoTokenizer.from_pretrained(directory)
        copy.add_bos_token = True
        return copy


def _fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, p in weights:
        digest.update(json.dumps([name, list(p.shape), str(p.dtype)]).encode())
        digest.update(p.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:12]


def _live_parameters(model: HookedModel) -> Iterator[LiveParameter]:
    """What the forward pass reads: the stored parameters, or the bridge's split copies of fused ones."""
    replaced: set[Tensor] = set()
    split: list[LiveParameter] = []
    for block in model.bridge.blocks:
        for fused, parts, pieces in _fused(block):
            for attribute in ("weight", "bias"):
                stored = getattr(fused, attribute, None)
                if isinstance(stored, nn.Parameter):
                    replaced.add(stored)
                    split += _split(model, fused, attribute, parts, pieces)
    for module in model.bridge.original_model.modules():
        for attribute, p in module._parameters.items():
            if p is not None and p in model._names and p not in replaced:
                replaced.add(p)
                yield LiveParameter(model._names[p], p, module, attribute)
    yield from split


def _fused(block: Any) -> Iterator[tuple[nn.Module, list[Any], Callable[[], tuple]]]:
    """Fused projections of a block, the modules that the bridge reads instead, and the bridge's way to split them."""
    if "attn" in block.submodules and "qkv" in block.attn.submodules:
        attn = block.attn
        yield (
            attn.qkv.original_component,
            [attn.q, attn.k, attn.v],
            lambda: attn.split_qkv_matrix(attn.original_component),
        )
    if hasattr(mlp := block.mlp, "split_gate_up_matrix"):
        fused = getattr(mlp.original_component, mlp.fused_attr)
        yield fused, [mlp.gate, getattr(mlp, "in")], lambda: mlp.split_gate_up_matrix(mlp.original_component)


def _split(
    model: HookedModel, fused: nn.Module, attribute: str, parts: Sequence[Any], pieces: Callable[[], tuple]
) -> list[LiveParameter]:
    """Where each output unit of the parts that the bridge reads lies in the fused tensor.

    Found by splitting, with the bridge's own function, a fused tensor whose entries are the numbers of their
    output units; so every layout (interleaved by head, concatenated) is right by construction.
    """
    stored = getattr(fused, attribute)
    kept = stored.data
    axis = 1 if attribute == "weight" and not isinstance(fused, nn.Linear) else 0  # Conv1D is [in, out]
    units = torch.arange(kept.shape[axis], dtype=torch.float64)
    shape = [1] * kept.ndim
    shape[axis] = -1
    try:
        stored.data = units.reshape(shape).expand(kept.shape).contiguous()
        numbered = pieces()
    finally:
        stored.data = kept
    found = []
    for part, piece in zip(parts, numbered, strict=True):
        module = part.original_component
        tensor = getattr(module, attribute)
        numbers = getattr(piece, attribute).detach()
        transposed = attribute == "weight" and axis == 1
        index = (numbers[:, 0] if numbers.ndim == 2 else numbers).long().cpu()
        live = LiveParameter(model._names[stored], tensor, module, attribute, axis, index, transposed)
        if not torch.equal(live.take(kept), tensor.detach()):
            raise ValueError(f"{model.name}: {live.name} is split in a way that locus cannot follow")
        found.append(live)
    return found
