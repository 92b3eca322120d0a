"""Direct readouts: what components write straight into the logits, and what each layer's stream would predict."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from locus import hooks
from locus.components import Components
from locus.localize.attribution import ENTRY, gradients_at, summed
from locus.localize.interventions import hook_names, per_example, targets
from locus.localize.paths import batches
from locus.localize.relp import constant_scales
from locus.metrics import logit_difference
from locus.reads import gather, unembed


@dataclass(frozen=True)
class DirectLogits:
    """Direct logit attribution: c(u) = (what u writes into the final residual stream) · ∂m/∂(stream), clean run.

    The final norm's scale is held at its value in the clean run, so that the stream's parts add up:

        m = Σ_u c(u) over attention and MLP blocks + embeddings + constant    (`logit_sum` checks it)

    exactly for a metric that is linear in the logits (`logit_difference`; not with a soft cap of logits), else to
    first order. What a component does through later ones is not seen. Only the positions that are read count. One
    forward and one backward pass. In units of the metric.

    nostalgebraist 2020; Elhage et al. 2021 (A Mathematical Framework for Transformer Circuits).

    Attributes:
        batch_size: pairs in one pass at the most.
    """

    batch_size: int = 32
    KINDS: ClassVar[tuple[str, ...]] = ("head", "neuron", "value", "mlp", "attn")

    def score(
        self, model: Any, pairs: Any, components: Components, metric: Callable, progress: bool
    ) -> Float[Tensor, "fact component"]:
        names = list(dict.fromkeys(name for component in components for name in hook_names(component)))
        return torch.cat(
            [
                summed(_written(model, some, names, metric), some.attention_mask, components)
                for some in batches(pairs, self.batch_size, "direct logits" if progress else None)
            ]
        )


def logit_sum(model: Any, pairs: Any, *, metric: Callable = logit_difference) -> pd.DataFrame:
    """The check of direct logit attribution: do the parts of the stream add up to the metric?

    Returns a row for each fact: fact (its prompt), embedding, attention, mlp (sums over the layers), constant (the
    metric of a stream of zeros: biases of the final norm and of the unembedding), total (of these four), metric (of
    the clean run) and error (total - metric; about 1e-6 of the parts in float32, if the metric is linear).
    """
    metric = per_example(metric)
    layers = range(model.cfg.n_layers)
    blocks = {kind: [f"blocks.{i}.{kind}" for i in layers] for kind in ("hook_attn_out", "hook_mlp_out")}
    names = [ENTRY, *blocks["hook_attn_out"], *blocks["hook_mlp_out"]]
    keep = pairs.attention_mask.to(model.device)[..., None]
    sums = {n: p.masked_fill(~keep, 0).sum((1, 2)) for n, p in _written(model, pairs, names, metric).items()}
    read = pairs.read.to(model.device)
    with torch.no_grad(), hooks.read_only(model, read):
        whole = metric(model.logits(pairs.clean, pairs.attention_mask), targets(pairs))
    with torch.no_grad():
        constant = metric(unembed(model, whole.new_zeros(*read.shape, model.cfg.d_model)), targets(pairs))
    columns = {
        "embedding": sums[ENTRY],
        "attention": torch.stack([sums[n] for n in blocks["hook_attn_out"]]).sum(0),
        "mlp": torch.stack([sums[n] for n in blocks["hook_mlp_out"]]).sum(0),
        "constant": constant,
    }
    total = torch.stack(list(columns.values())).sum(0)
    columns |= {"total": total, "metric": whole, "error": total - whole}
    return pd.DataFrame({"fact": [f.prompt for f in pairs.facts]} | {k: v.tolist() for k, v in columns.items()})


def _written(model: Any, pairs: Any, names: list[str], metric: Callable) -> dict[str, Float[Tensor, "fact pos *part"]]:
    """Activation · gradient along the direct path at some hooks: later blocks' own outputs are constants."""
    points = model.bridge.hook_dict
    outputs = [f"blocks.{i}.attn.hook_z" for i in range(model.cfg.n_layers)]
    for i in range(model.cfg.n_layers):
        neurons = f"blocks.{i}.mlp.hook_post"
        # The experts of a mixture have no such hook that fires; there the whole MLP's output is cut.
        outputs.append(neurons if f"blocks.{i}.mlp.out.hook_in" in points else f"blocks.{i}.hook_mlp_out")
    with constant_scales(model):
        slopes, values = gradients_at(model, pairs.clean, pairs, names, metric, dict.fromkeys(outputs))
    return {name: values[name] * slopes[name] for name in names}


def logit_lens(model: Any, pairs: Any, *, batch_size: int = 32) -> pd.DataFrame:
    """Logit lens: what the residual stream after each layer says, through the final norm and the unembedding.

        p_l = softmax(W_U · norm(h_l)),    the norm's statistics from h_l itself

    at the positions of the clean prompts from which the answers are read.

    Returns a row for each fact, layer (-1: the embeddings) and read position: fact, layer, position, probability and
    rank (0 = most likely) of the answer's token there, logit_difference (answer - distractor), top (the most likely
    token), kl (KL(p_final || p_l), in nats). nostalgebraist 2020.
    """
    parts = []
    with torch.no_grad():
        for some in batches(pairs, batch_size, None):
            recorded = hooks.trace(model, some.clean, some.attention_mask)
            read, answer = some.read.to(model.device), some.answer.to(model.device)
            final = unembed(model, gather(recorded.inputs[-1], read)).log_softmax(-1)
            for i, stream in enumerate(recorded.inputs):
                logits = unembed(model, gather(stream, read))
                own = logits.gather(-1, answer[..., None])
                other = logits.gather(-1, some.distractor.to(model.device)[..., None])
                log_p = logits.log_softmax(-1)
                columns = {
                    "probability": log_p.gather(-1, answer[..., None])[..., 0].exp(),
                    "rank": (logits > own).sum(-1),
                    "logit_difference": (own - other)[..., 0],
                    "top": logits.argmax(-1),
                    "kl": (final.exp() * (final - log_p)).sum(-1),
                }
                fact, place = some.read_mask.nonzero().T.tolist()
                found = {name: value[fact, place].tolist() for name, value in columns.items()}
                found["top"] = model.tokenizer.convert_ids_to_tokens(found["top"])
                labels = {"fact": [some.facts[f].prompt for f in fact], "layer": i - 1}
                parts.append(pd.DataFrame(labels | {"position": some.read[fact, place].tolist()} | found))
    return pd.concat(parts, ignore_index=True)
