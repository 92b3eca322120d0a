"""Is everything outside a mask bit-identical after training inside it? By `unlearn` and by `guard`.

    python experiments/bit_identity.py [--model smollm2]

5% of the neurons at random; AdamW with weight decay 0.1, momentum and clipping to norm 1; three steps.
"""

import argparse

import torch

import locus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    model = locus.load(options.model)
    source = locus.facts.biographies if options.model == "tiny" else locus.facts.capitals
    split = source().known_by(model).split(forget=8, seed=0)
    mask = locus.Mask.random(model.components("neuron"), budget=0.05, seed=0)
    before = {name: p.detach().clone() for name, p in model.weights.items()}

    update = locus.unlearn(
        model, split, mask, locus.NPO(), optimizer=locus.AdamW(lr=1e-4, weight_decay=0.1), steps=3, clip=1.0
    )
    masks = mask.materialize(model)
    with update.applied(model):
        outside = sum(count_outside(before[name], p, masks.get(name)) for name, p in model.weights.items())
    restored = all(torch.equal(before[name], p) for name, p in model.weights.items())
    print(
        f"unlearn: {update.n_changed:,} of {mask.n_parameters:,} masked entries changed, {outside} outside; "
        f"restored bit for bit: {restored}; checksum {update.checksum[:16]}"
    )

    hf_model = model.bridge.original_model
    parameters = list(model.weights.values())
    for p in parameters:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)
    tokens = torch.tensor([model.tokenizer("The capital of France is Paris")["input_ids"]])
    with locus.guard(model, optimizer, mask) as proof:
        for _ in range(3):
            optimizer.zero_grad()
            logits = hf_model(input_ids=tokens).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    outside = sum(count_outside(before[name], p, masks.get(name)) for name, p in model.weights.items())
    print(
        f"guard:   {proof.n_changed:,} of {mask.n_parameters:,} masked entries changed, {outside} outside; "
        f"checksum {proof.checksum[:16]}"
    )


def count_outside(before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor | None) -> int:
    differs = before.view(torch.int32) != after.detach().view(torch.int32)
    return int((differs if mask is None else differs & ~mask).sum())


if __name__ == "__main__":
    main()
