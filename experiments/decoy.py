"""Is it the location, or the freshness of the weights?

    python experiments/decoy.py --seeds 12

Region V differs from other weights not only by what it stores: it was also just trained. So two halves of the forget
facts are planted in two regions of equal size, and each half is unlearned in its own region (own), in the other half's
(decoy: as fresh, but it stores other facts) and in a third region (stale: neither). Own − decoy is the location alone,
decoy − stale the freshness alone. AUES of both halves is averaged within a seed. Writes
results/decoy.csv and results/decoy_verdicts.csv.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from cases import ends, experiment

import locus
from locus.decoy import plant_two
from locus.evaluate import drift_text, evaluate
from locus.facts import encode
from locus.inject import elsewhere, region
from locus.plans import planted_facts, planting_plan
from locus.runs import Case


def halves(model, facts, known, plan, seed):
    """The two halves of a seed as cases, with the three places of each."""
    split = facts.split(forget=48, seed=seed)
    first = region(model, "value", 0.05, seed=seed)
    second = elsewhere(model, first, 1, seed=seed)[0]
    third = locus.Mask.random(like=first, disjoint_from=first | second, seed=seed)
    found = plant_two(model, split, (first, second), seed=seed, known=known[:60])
    for planted, own, decoy in zip(found, (first, second), (second, first), strict=True):
        with planted.applied(model, "retained"):
            retained = evaluate(model, planted.split, wrong=plan.wrong)
        with planted.applied(model, "planted"):
            original = evaluate(model, planted.split, wrong=plan.wrong)
        measured = encode(model, [*planted.split.forget, *planted.split.holdout])
        masks = {("", "own", 0): own, ("", "decoy", 0): decoy, ("", "stale", 0): third}
        yield Case(planted.split, measured, original, masks, planted, retained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/decoy"))
    options = parser.parse_args()
    model, (facts, known) = locus.load("tiny"), planted_facts("tiny")
    plan, text = replace(planting_plan("tiny"), objectives=(locus.WGA(), locus.NPO())), drift_text(model)

    def one_seed(seed, rates):
        cases = enumerate(halves(model, facts, known, plan, seed))
        return [row | {"half": half} for half, case in cases for row in ends(model, case, plan, seed, rates, text)]

    contrasts = [("own", "decoy"), ("decoy", "stale"), ("own", "stale")]
    experiment("decoy", one_seed, plan, options.seeds, contrasts, options.out, {"model": model.fingerprint})


if __name__ == "__main__":
    main()
