"""How well do gradients predict exact patching? Heads, MLPs and sampled neurons, beside the published GPT-2 figures.

    python experiments/fidelity.py --model smollm2

Capitals and elements that the model knows, denoising. Attribution patching, RelP and integrated gradients over
activations against `ActivationPatching` of the same components; AtP*, which scores queries and keys, and attribution
patching of these nodes, against exact patching of them, one position at a time and summed. Agreement is that of the
mean scores over the facts, with the central 95% over resampled facts, and the mean of each fact's own Pearson
correlation. Writes results/fidelity_MODEL.csv; kinds that are not run keep their rows.
"""

import argparse

import numpy as np
import pandas as pd
import torch
from controlled import RESULTS

import locus
from locus import patching
from locus.components import n_kv
from locus.facts import Facts
from locus.hooks import states
from locus.localize.attribution import gradients_at
from locus.localize.interventions import targets
from locus.metrics import logit_difference
from locus.scores import Scores

KINDS = ("head", "mlp", "neuron", "query-key")

# Pearson with exact patching, GPT-2 small: RelP's table 1 (arXiv 2508.21258).
PUBLISHED = {
    ("head", "AttributionPatching"): 0.979,
    ("head", "RelP"): 0.962,
    ("mlp", "AttributionPatching"): 0.195,
    ("mlp", "RelP"): 0.992,
}


def query_key(model, pairs) -> tuple[Scores, list[Scores]]:
    """Query and key nodes, one position at a time, summed for each key/value group: exact, and by AtP and AtP*."""
    fact = torch.arange(len(pairs))[:, None]
    layers, group = range(model.cfg.n_layers), n_kv(model)

    def metric(logits):
        return logit_difference(logits[fact, pairs.read], targets(pairs))

    def exact(sweep):
        kept = {"reduce": "none", "baseline": True, "attention_mask": pairs.attention_mask}
        found = sweep(model, pairs.corrupted, pairs.clean, metric, **kept)
        return grouped((found.values - found.baseline).sum(1).permute(2, 0, 1))  # [fact, layer, head or group]

    def grouped(effects):
        return effects.unflatten(-1, (group, -1)).sum(-1).flatten(1)

    def estimated(end):
        names = [f"blocks.{layer}.attn.hook_{end}" for layer in layers]
        other = states(model, pairs.clean, pairs.attention_mask, names)
        slopes, here = gradients_at(model, pairs.corrupted, pairs, names, logit_difference)
        keep = pairs.attention_mask[:, :, None, None]
        products = [((other[n] - here[n]) * slopes[n]).masked_fill(~keep, 0).sum((1, 3)) for n in names]
        return grouped(torch.stack(products, 1))

    groups = model.components("kv")

    def scores(values, method, passes=None):
        return Scores(values.float(), groups, method, "logit_difference", (), passes)

    nodes = exact(patching.get_act_patch_attn_head_q_by_pos) + exact(patching.get_act_patch_attn_head_k_by_pos)
    plain = estimated("q") + estimated("k")
    star = locus.localize(model, pairs, locus.AtPStar(), components="head")
    starred = grouped(star.values.unflatten(1, (len(layers), -1)))
    return scores(nodes, "exact query and key nodes"), [
        scores(plain, locus.AttributionPatching(), (2.0 * len(pairs), 1.0 * len(pairs))),
        scores(starred, star.method, star.passes),
    ]


def sampled(components, n):
    return components.take(
        torch.randperm(len(components), generator=torch.Generator().manual_seed(0))[:n].sort().values
    )


def rows_of(model, pairs, scores, exact, kind):
    """Agreement of one method's scores with the exact ones."""
    found = locus.trust(model, pairs, scores, sample=len(exact.components), against=exact)
    own = [np.corrcoef(a, b)[0, 1] for a, b in zip(scores.values.numpy(), exact.values.numpy(), strict=True)]
    name, n = type(scores.method).__name__, len(exact.components)
    low, high = np.quantile(own, [0.025, 0.975])
    measured = found.rows[found.rows.of == "exact"]
    agreements = [
        *measured[["measure", "value", "low", "high"]].itertuples(index=False),
        ("of a fact", np.mean(own), low, high),
    ]
    for measure, *values in agreements:
        published = PUBLISHED.get((kind, name)) if measure == "pearson" else None
        yield (kind, name, measure, *values, n, found.facts, published, *found.passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--facts", type=int, default=60)
    parser.add_argument("--neurons", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5, help="of integrated gradients")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    model = locus.load(options.model)
    source = (
        [locus.facts.biographies()] if options.model == "tiny" else [locus.facts.capitals(), locus.facts.elements()]
    )
    known = Facts([fact for facts in source for fact in facts.known_by(model)])
    pairs = known.contrast_pairs(model)
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[: options.facts]]
    methods = (locus.AttributionPatching(), locus.RelP(), locus.IntegratedGradients(steps=options.steps))
    rows = []
    for kind in [kind for kind in options.kinds if kind != "query-key"]:
        chosen = sampled(model.components(kind), options.neurons)
        exact = locus.localize(model, pairs, locus.ActivationPatching(), components=chosen)
        for method in methods:
            rows += rows_of(model, pairs, locus.localize(model, pairs, method, components=chosen), exact, kind)
    if "query-key" in options.kinds:
        exact, estimates = query_key(model, pairs)
        for scores in estimates:
            rows += rows_of(model, pairs, scores, exact, "query-key")
    names = [
        "kind",
        "method",
        "measure",
        "value",
        "low",
        "high",
        "components",
        "facts",
        "published",
        "forward",
        "backward",
    ]
    table = pd.DataFrame(rows, columns=names)
    print(table.round(3).to_string(index=False))
    path = RESULTS / f"fidelity_{options.model}.csv"
    if path.exists():
        earlier = pd.read_csv(path)
        table = pd.concat([earlier[~earlier.kind.isin(options.kinds)], table])
    table.to_csv(path, index=False)


if __name__ == "__main__":
    main()
