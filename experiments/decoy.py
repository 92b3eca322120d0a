"""Is it the location, or the freshness of the weights?

    python experiments/decoy.py --seeds 12

Region V differs from other weights not only by what it stores: it was also just trained. So two halves of the forget
facts are planted in two regions of equal size, and each half is unlearned in its own region (own), in the other half's
(decoy: as fresh, but it stores other facts) and in a third region (stale: neither). Own − decoy is the location alone,
decoy − stale the freshness alone. AUES of both halves is averaged within a seed. Writes results/decoy.csv.
"""

import argparse
from pathlib import Path

import pandas as pd
from controlled import RESULTS

import locus
from locus.decoy import plant_two
from locus.evaluate import drift_text, evaluate
from locus.facts import encode
from locus.folder import enter
from locus.inject import elsewhere, region
from locus.paired import judge
from locus.plans import planted_facts, planting_plan
from locus.progress import Progress
from locus.runs import Case, Run, execute

OBJECTIVES = (locus.WGA(), locus.NPO())
RATES = (2.8e-3, 5.6e-3, 1.12e-2)
TUNING_SEED = 1000


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


def one_seed(model, facts, known, plan, text, seed, rates):
    """Rows of objective, arm, half, rate, and what was measured in the end."""
    rows = []
    for half, case in enumerate(halves(model, facts, known, plan, seed)):
        for objective in OBJECTIVES:
            for rate in rates:
                for arm in ("own", "decoy", "stale"):
                    name = type(objective).__name__
                    run = Run("compare", seed, name, arm, rate=rate)
                    made = execute(model, case, plan, run, text)
                    values = {metric: value for step, metric, value in made["rows"] if step == -1}
                    row = {"objective": name, "arm": arm, "half": half, "rate": rate, "status": made["status"]}
                    kept = ("aues", "forget_at_95", "update_norm", "other_extraction_strength", "distance_to_retained")
                    rows.append(row | {metric: values[metric] for metric in kept})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/decoy"))
    options = parser.parse_args()
    model, (facts, known), plan = locus.load("tiny"), planted_facts("tiny"), planting_plan("tiny")
    text = drift_text(model)
    bar = Progress(options.seeds + 1)
    settings = {"model": model.fingerprint, "objectives": [repr(o) for o in OBJECTIVES], "rates": list(RATES)}
    folder = enter(options.out, settings, {"settings": settings}, bar.say)

    def kept(seed, rates):
        name = f"seed{seed}-{'-'.join(f'{rate:g}' for rate in rates)}.json"
        result = folder.load(name)
        if result is None:
            result = {"rows": one_seed(model, facts, known, plan, text, seed, rates)}
            folder.save(name, result)
        bar.done(f"seed {seed}")
        return pd.DataFrame(result["rows"]).assign(seed=seed)

    tuning = kept(TUNING_SEED, RATES).groupby("rate").aues.mean()
    print("mean AUES by rate on the tuning seed:", tuning.round(3).to_dict())
    rate = float(tuning.idxmax())
    table = pd.concat([kept(seed, (rate,)) for seed in range(options.seeds)])
    bar.close()
    wide = table.groupby(["objective", "seed", "arm"]).aues.mean().unstack("arm")
    differences = {
        (objective, f"{a} - {b}"): (pairs[a] - pairs[b]).to_numpy()
        for objective, pairs in wide.groupby("objective")
        for a, b in (("own", "decoy"), ("decoy", "stale"), ("own", "stale"))
    }
    verdicts = judge(differences)
    verdicts.index = pd.MultiIndex.from_tuples(verdicts.index, names=["objective", "contrast"])
    print(table.groupby(["objective", "arm"])[["aues", "other_extraction_strength", "update_norm"]].mean().round(3))
    print(verdicts[["verdict", "n", "difference", "sd", "low95", "high95", "p_different"]].round(4).to_string())
    table.to_csv(RESULTS / "decoy.csv", index=False)
    verdicts.to_csv(RESULTS / "decoy_verdicts.csv")


if __name__ == "__main__":
    main()
