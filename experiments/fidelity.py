"""How well do gradients predict exact patching? Heads, MLPs and sampled neurons, beside the published GPT-2 figures.

    python experiments/fidelity.py --model smollm2

Capitals and elements that the model knows, denoising. Attribution patching, RelP and integrated gradients over
activations against `ActivationPatching` of the same components; AtP*, which scores what a head's queries and keys do,
against exact patching of the head's whole attention pattern. Agreement is that of the mean scores over the facts, with
the central 95% over resampled facts, and the mean of each fact's own Pearson correlation. Writes
results/fidelity_MODEL.csv.
"""

import argparse

import numpy as np
import pandas as pd
import torch
from controlled import RESULTS

import locus
from locus import patching
from locus.components import Components
from locus.facts import Facts
from locus.localize.interventions import targets
from locus.metrics import logit_difference
from locus.scores import Scores

# Pearson with exact patching, GPT-2 small: RelP's table 1 (arXiv 2508.21258).
PUBLISHED = {
    ("head", "AttributionPatching"): 0.979,
    ("head", "RelP"): 0.962,
    ("mlp", "AttributionPatching"): 0.195,
    ("mlp", "RelP"): 0.992,
}


def patterns(model, pairs, heads) -> Scores:
    """Exact patching of whole attention patterns, one head at a time."""
    fact = torch.arange(len(pairs))[:, None]

    def metric(logits):
        return logit_difference(logits[fact, pairs.read], targets(pairs))

    found = patching.get_act_patch_attn_head_pattern_all_pos(
        model, pairs.corrupted, pairs.clean, metric, reduce="none", baseline=True, attention_mask=pairs.attention_mask
    )
    effects = (found.values - found.baseline).flatten(0, 1).T
    return Scores(effects.float(), heads, "exact patterns", "logit_difference", ())


def sampled(components, n):
    some = torch.randperm(len(components), generator=torch.Generator().manual_seed(0))[:n].sort().values
    return Components(tuple(components[i] for i in some.tolist()), components.sizes[some], components.model)


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
    for kind in ("head", "mlp", "neuron"):
        chosen = sampled(model.components(kind), options.neurons)
        exact = locus.localize(model, pairs, locus.ActivationPatching(), components=chosen)
        for method in methods:
            rows += rows_of(model, pairs, locus.localize(model, pairs, method, components=chosen), exact, kind)
    heads = model.components("head")
    attended = locus.localize(model, pairs, locus.AtPStar(), components=heads)
    rows += rows_of(model, pairs, attended, patterns(model, pairs, heads), "head's pattern")
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
    table.to_csv(RESULTS / f"fidelity_{options.model}.csv", index=False)


if __name__ == "__main__":
    main()
