"""Does the true location help, where the knowledge was routed to it while training from scratch?

    python experiments/routed.py --seeds 8

Planted knowledge is the last thing that its region learned. Here a model like tiny learns all its facts at once, from
random weights, and the gradients of the 24 facts to forget reach only V, a random 10% of the weights of attention
and MLPs (`worlds.routed`; a seed is another model). They are unlearned in V (oracle) and in two random regions of its
size, disjoint from it and matched by matrix. Trains one model a seed, kept in the cache. Writes results/routed.csv and
results/routed_verdicts.csv. Left out: θ_r, a second model a seed that never saw the facts.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from cases import ends, experiment

import locus
from locus import worlds
from locus.evaluate import drift_text, evaluate
from locus.facts import encode
from locus.inject import elsewhere, region
from locus.plans import planting_plan
from locus.runs import Case, smaller

SHARE = 0.1  # in 5% of the weights 19 of the 24 facts of the tuning seed were learned
LEAST = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/routed"))
    options = parser.parse_args()
    tiny, facts = locus.load("tiny"), locus.facts.biographies()
    plan = replace(planting_plan("tiny"), objectives=(locus.WGA(), locus.NPO()), planting=None)

    def one_seed(seed, rates):
        split = facts.split(forget=24, seed=seed)
        route = region(tiny, "weight", SHARE, seed=seed)
        world = worlds.routed([(split.forget, route)], facts, seed=seed, least=LEAST, quiet=True)
        model = locus.load(world, quiet=True)
        place = locus.ParameterMask.from_tensors(dict(route), model)
        split = smaller(split, plan, seed, ("holdout", "other"))
        masks = {("", "oracle", 0): place}
        masks |= {("", "random", i): mask for i, mask in enumerate(elsewhere(model, place, 2, seed=seed))}
        measured = encode(model, [*split.forget, *split.holdout])
        case = Case(split, measured, evaluate(model, split, wrong=plan.wrong), masks)
        return list(ends(model, case, plan, seed, rates, drift_text(model)))

    settings = {"model": tiny.fingerprint, "world": worlds.TINY | {"share": SHARE, "least": LEAST}}
    experiment("routed", one_seed, plan, options.seeds, [("oracle", "random")], options.out, settings)


if __name__ == "__main__":
    main()
