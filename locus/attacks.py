"""What comes back: attacks on an edited model.

Half of the forget facts is the attacker's, the other half, of other subjects, is tested. Knowledge that comes back
there was hidden, not removed: nothing that the attacker trained on says it (cross-split relearning, Deeb & Roger 2024,
arXiv 2410.08827). A model that never knew the facts gains something too, from the form and the base rates of the
answers, so attack such a model as well and read `recovery`.

An attack is a frozen dataclass with one learning rate; a list of attacks is the grid of an attacker, and the strongest
one counts (`worst`). Left out: attacks that search for a prompt, and quantization.
"""

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from locus import hooks
from locus.evaluate import interval, score
from locus.facts import Fact, Facts, FactSplit, encode
from locus.masks import ParameterMask
from locus.metrics import Targets, log_probability
from locus.models import HookedModel
from locus.progress import tqdm
from locus.require import COUNT, POSITIVE, require, require_fields, require_objects
from locus.unlearn import AdamW, NextToken, Update, unlearn
from locus.unlearn.engine import schedule as schedule_of
from locus.unlearn.update import Status, checksum

COLUMNS = "attack lr step part metric n value low high status seed".split()
Checkpoint = Callable[[int], None]


@runtime_checkable
class Attack(Protocol):
    """What `attack` asks of an attack."""

    @property
    def name(self) -> str: ...
    @property
    def lr(self) -> float: ...

    def facts(self, split: FactSplit, half: Facts) -> Facts:
        """What it trains on; `half` is the attacker's half of the forget facts."""

    def prompts(self, fact: Fact) -> tuple[str, ...]:
        """The wordings in which a fact is asked; values are averaged within the fact."""

    def run(self, model: HookedModel, facts: Facts, checkpoint: Checkpoint, *, seed: int) -> Status:
        """Attack the model as it is; call `checkpoint(steps made)` with the attack in place; leave no trace."""


@dataclass(frozen=True, kw_only=True)
class FullRelearn:
    """Train all parameters on the attacker's half with AdamW and the ordinary next-token loss of the answers.

    lr: constant.   every: steps from one checkpoint to the next; the last step is always one.
    batch_size: facts a step; all of them unless given.
    """

    name: ClassVar[str] = "full"
    lr: float = 3e-4
    steps: int = 20
    every: int = 4
    batch_size: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    def facts(self, split: FactSplit, half: Facts) -> Facts:
        return half

    def prompts(self, fact: Fact) -> tuple[str, ...]:
        return (fact.prompt,)

    def run(self, model: HookedModel, facts: Facts, checkpoint: Checkpoint, *, seed: int) -> Status:
        return _train_all(self, model, facts, checkpoint, seed)


@dataclass(frozen=True, kw_only=True)
class LoRARelearn:
    """Train low-rank adapters of every linear layer of every block on the attacker's half: W + (alpha / rank) B A.

    The adapters are peft's (Hu et al. 2021, arXiv 2106.09685); the other settings are those of `FullRelearn`.
    Experts that are stored fused, embeddings and the unembedding get none.
    """

    name: ClassVar[str] = "lora"
    lr: float = 3e-3
    steps: int = 20
    every: int = 4
    batch_size: int | None = None
    rank: int = 8
    alpha: int = 16

    def __post_init__(self) -> None:
        _check(self)

    def facts(self, split: FactSplit, half: Facts) -> Facts:
        return half

    def prompts(self, fact: Fact) -> tuple[str, ...]:
        return (fact.prompt,)

    def run(self, model: HookedModel, facts: Facts, checkpoint: Checkpoint, *, seed: int) -> Status:
        with torch.enable_grad(), adapters(model, rank=self.rank, alpha=self.alpha, seed=seed) as trained:
            return _train_adapters(self, model, trained, facts, checkpoint, seed)


@dataclass(frozen=True, kw_only=True)
class Unrelated:
    """Train all parameters, as `FullRelearn` does, on facts that have nothing to do with the forgotten ones.

    others: what to train on, of other subjects than the forget facts; unless given, as many facts of `split.other` as
        the other attacks train on. Facts that the model knows already hardly move it: new ones are the stronger attack.
    """

    name: ClassVar[str] = "unrelated"
    others: Facts | None = None
    lr: float = 1e-3
    steps: int = 20
    every: int = 4
    batch_size: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    def facts(self, split: FactSplit, half: Facts) -> Facts:
        others = self.others
        if others is None:
            n = min(len(half), len(split.other))
            others = Facts(random.Random(f"unrelated {split.seed}").sample(split.other, n), name=split.other.name)
        if not others:
            raise ValueError(
                "Unrelated has no facts to train on: split.other is empty. Give some, Unrelated(others=facts), or "
                "split with other=… or other_relations=…"
            )
        if shared := {fact.subject for fact in others} & {fact.subject for fact in split.forget}:
            raise ValueError(
                f"Unrelated must train on other subjects than those of the forget facts, not {sorted(shared)}"
            )
        return others

    def prompts(self, fact: Fact) -> tuple[str, ...]:
        return (fact.prompt,)

    def run(self, model: HookedModel, facts: Facts, checkpoint: Checkpoint, *, seed: int) -> Status:
        return _train_all(self, model, facts, checkpoint, seed)


@dataclass(frozen=True, kw_only=True)
class Paraphrase:
    """Ask in other words, without training: each fact's paraphrases in the place of its prompt."""

    name: ClassVar[str] = "paraphrase"
    lr: ClassVar[float] = math.nan

    def facts(self, split: FactSplit, half: Facts) -> Facts:
        return Facts()

    def prompts(self, fact: Fact) -> tuple[str, ...]:
        return fact.paraphrases

    def run(self, model: HookedModel, facts: Facts, checkpoint: Checkpoint, *, seed: int) -> Status:
        checkpoint(0)
        return "finished"


def _check(one: FullRelearn | LoRARelearn | Unrelated) -> None:
    require_fields(one, (COUNT, "steps every"), (COUNT.or_none, "batch_size"), (POSITIVE, "lr"))
    require(COUNT, rank=getattr(one, "rank", 1))


# Rates at which most came back on tiny, within these steps; on SmolLM2 it was 1e-4 (full) and 1e-3 (LoRA).
ATTACKS: tuple[Attack, ...] = (
    *(FullRelearn(lr=lr) for lr in (3e-4, 1e-3)),
    *(LoRARelearn(lr=lr) for lr in (1e-3, 3e-3)),
    Unrelated(),
    Paraphrase(),
)


# ------------------------------------------------------------------------------------------------ running them


def halves(forget: Facts, seed: int) -> tuple[Facts, Facts]:
    """(attacker's half, tested half) of the forget facts, disjoint by subject; drawn by `seed`, for all attacks."""
    subjects = sorted({fact.subject for fact in forget})
    if len(subjects) < 2:
        raise ValueError(f"Relearning needs forget facts of two subjects or more, to train on some; got {subjects}.")
    chosen = set(random.Random(f"relearn {seed}").sample(subjects, len(subjects) // 2))
    half, tested = (
        Facts([fact for fact in forget if (fact.subject in chosen) == mine], name=forget.name) for mine in (True, False)
    )
    return half, tested


def attack(
    model: HookedModel,
    split: FactSplit,
    *,
    update: Update | None = None,
    attacks: Sequence[Attack] = ATTACKS,
    seed: int = 0,
    progress: bool = False,
) -> pd.DataFrame:
    """Attack an edited model, each attack from the same start, and measure along the way; the model is left as it was.

    update: the edit to attack; None attacks the model as it is.
    seed: of the halves, of the order of the facts and of LoRA's first values.

    Returns tidy rows: attack, lr (NaN without training), step (-1 = before the update, 0 = before the attack), part
        ("trained" = what the attack trains on | "tested" = the other half of the forget facts), metric ("probability",
        "extraction_strength"), n, value (mean over the n facts that could be scored; higher = more came back), low,
        high (95%, within [0, 1]), status (of the whole attack; one that diverged has the rows before it did), seed.
    """
    require_objects(Attack, "FullRelearn()", attacks=attacks)
    half, tested = halves(split.forget, seed)
    meters = []
    for one in attacks:
        meters.append(_Meter(model, one, {"trained": one.facts(split, half), "tested": tested}))
        meters[-1](-1)
    rows: list[tuple[Any, ...]] = []
    with update.applied(model) if update is not None else nullcontext():
        for one, meter in zip(tqdm(attacks, unit="attack", disable=not progress), meters, strict=True):
            status = one.run(model, meter.parts["trained"], meter, seed=seed)
            rows += [(one.name, one.lr, *row, status, seed) for row in meter.rows]
    return pd.DataFrame(rows, columns=COLUMNS)


def relearn(
    model: HookedModel,
    update: Update | None,
    split: FactSplit,
    *,
    steps: int = 20,
    every: int = 1,
    lr: float = 1e-3,
    batch_size: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Train the unlearned model on half of the forget facts, test it on the other half: `attack` by one `FullRelearn`.

    lr: try several and report the strongest (`worst`).   Returns the rows of `attack`.
    """
    one = FullRelearn(lr=lr, steps=steps, every=every, batch_size=batch_size)
    return attack(model, split, update=update, attacks=[one], seed=seed)


def worst(rows: pd.DataFrame, *, by: Sequence[str] = ("attack", "metric")) -> pd.DataFrame:
    """The strongest point of each attack: the row with the highest value on the tested half, over rates and steps.

    The unattacked model (step 0) counts, since an attacker may stop there. A maximum over a grid is too high by chance,
    for every arm alike: compare it with that of θ_r under the same grid.

    by: one row for each combination of these columns; `["metric"]` takes the strongest of all attacks.
    """
    tested = rows[(rows.part == "tested") & (rows.step >= 0)].reset_index(drop=True)
    order = tested.sort_values("value", ascending=False, kind="stable", na_position="last")
    return order.groupby(list(by), sort=False).head(1).sort_index().reset_index(drop=True)


def recovery(arm: float, attacked_r: float, original_o: float) -> float:
    """(arm − attacked θ_r) / (θ_o − attacked θ_r): how much of the forgotten knowledge an attack brought back.

    arm: an edited model's value under attack.   attacked_r: that of θ_r, which never knew the facts, under the same
    attack.   original_o: that of θ_o, which knows them, without attack or edit.
    0 = no more than from a model that never knew; 1 = all. Not clipped. NaN where the attack brings θ_r to as much as
    θ_o knows, since then there is nothing to recover.
    """
    span = original_o - attacked_r
    return (arm - attacked_r) / span if span > 0 else math.nan


class _Meter:
    """Measures what an attack is judged on: one forward pass a checkpoint, one row a part and metric."""

    def __init__(self, model: HookedModel, one: Attack, parts: dict[str, Facts]) -> None:
        self.model, self.parts = model, parts
        self.rows: list[tuple[Any, ...]] = []
        facts = [fact for part in parts.values() for fact in part]
        asked = [(i, prompt) for i, fact in enumerate(facts) for prompt in one.prompts(fact)]
        if not asked:
            raise ValueError(f"No forget fact has another wording, so {one} asks nothing. Leave it out of the attacks.")
        self.owner = torch.tensor([i for i, _ in asked])
        self.count = torch.bincount(self.owner, minlength=len(facts)).double()
        self.batch = encode(model, [facts[i] for i, _ in asked], prompts=[prompt for _, prompt in asked])

    def __call__(self, step: int) -> None:
        answers = score(self.model, self.batch)
        columns = {"probability": answers.log_probability.exp(), "extraction_strength": answers.extraction_strength}
        for metric, values in columns.items():
            per_fact = torch.zeros_like(self.count).index_add(0, self.owner, values) / self.count  # 0 / 0 is NaN
            for part, of_part in zip(self.parts, per_fact.split([*map(len, self.parts.values())]), strict=True):
                if len(of_part):
                    self.rows.append((step, part, metric, *_summary(of_part)))


def _summary(values: Float[Tensor, " fact"]) -> tuple[int, float, float, float]:
    """n, mean, low, high of the facts that could be scored; an interval of numbers in [0, 1] stays there."""
    scored = values[~values.isnan()]
    low, high = (min(max(x, 0.0), 1.0) if x == x else math.nan for x in interval(values))
    return len(scored), float(scored.mean()) if len(scored) else math.nan, low, high


# ------------------------------------------------------------------------------------------------ training


def _train_all(
    one: FullRelearn | Unrelated, model: HookedModel, facts: Facts, checkpoint: Checkpoint, seed: int
) -> Status:
    none = Facts()
    return unlearn(
        model,
        FactSplit(forget=facts, retain=none, holdout=none, other=none, seed=seed),
        ParameterMask.full(model),
        NextToken(),
        optimizer=AdamW(lr=one.lr),
        steps=one.steps,
        seed=seed,
        batch_size=one.batch_size,
        floor=None,
        callback=checkpoint,
        checkpoints=_checkpoints(one),
    ).status


def _train_adapters(
    one: LoRARelearn,
    model: HookedModel,
    trained: Sequence[nn.Parameter],
    facts: Facts,
    checkpoint: Checkpoint,
    seed: int,
) -> Status:
    """The loop of `unlearn` for adapters: the same loss, optimizer and order of facts."""
    batch = encode(model, facts)
    read, targets = batch.reads()
    size = len(facts) if one.batch_size is None else min(one.batch_size, len(facts))
    schedule = schedule_of(len(facts), size, one.steps, torch.Generator().manual_seed(seed))
    optimizer = AdamW(lr=one.lr).build(trained)
    checkpoints = _checkpoints(one)
    start = [p.detach().clone() for p in trained]
    for step in range(one.steps + 1):
        rows = schedule[min(step, one.steps - 1)]
        with hooks.read_only(model, read[rows]):
            logits = model.logits(batch.tokens[rows], batch.attention_mask[rows])
        answer, mask = targets.answer[rows], targets.mask[rows]
        loss = -log_probability(logits, Targets(answer, answer, mask)).mean()
        if not (loss.isfinite() and all(p.isfinite().all() for p in trained)):
            return "diverged"
        if step in checkpoints:
            with torch.no_grad():
                checkpoint(step)
        if step < one.steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    moved = any(not torch.equal(p, before) for p, before in zip(trained, start, strict=True))
    return "finished" if moved else "nothing moved"


@contextmanager
def adapters(model: HookedModel, *, rank: int, alpha: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Within it, every linear layer of every block has a trainable low-rank adapter of peft's; yields their values.

    Nothing else asks for a gradient inside. Afterwards, also after an error, the model has its own modules again, and
    what asked for gradients before asks again; that its weights are the same bits is checked.

    peft puts its layer in the place of the linear layer that a bridge component wraps, so hooks stay where they are.
    """
    from peft import LoraConfig, inject_adapter_in_model  # slow to import, and nothing else needs it

    root = model.bridge.original_model
    wrapped = {id(live.module) for live in model.live if _in_block(live.name) and live.attribute == "weight"}
    targets = [n for n, m in root.named_modules() if isinstance(m, nn.Linear | Conv1D) and id(m) in wrapped]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    children = [(m, dict(m._modules)) for m in dict.fromkeys((*model.bridge.modules(), *root.modules()))]
    asks = [(p, p.requires_grad) for p in model.bridge.parameters()]
    config_before = root.__dict__.get("peft_config")
    before = _bits(model)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about merging into Conv1D, which never happens here
            torch.manual_seed(seed)
            inject_adapter_in_model(config, root)
        trained = [p for p in root.parameters() if p.requires_grad]
        if len(trained) != 2 * len(targets):
            raise RuntimeError(f"peft made {len(trained)} tensors for the {len(targets)} linear layers of {model.name}")
        yield trained
    finally:
        for module, own in children:
            module._modules.clear()
            module._modules.update(own)
        for p, asked in asks:
            p.requires_grad_(asked)
        root.__dict__.pop("peft_config", None)
        if config_before is not None:
            root.peft_config = config_before
        if _bits(model) != before:
            raise RuntimeError(f"the weights of {model.name} changed while it had adapters; load it again")


def _in_block(name: str) -> bool:
    return re.search(r"\.\d+\.", name) is not None


def _bits(model: HookedModel) -> str:
    return checksum((name, model.stored(name), None) for name in model.weights)


def _checkpoints(one: FullRelearn | LoRARelearn | Unrelated) -> set[int]:
    return {*range(0, one.steps, one.every), one.steps}
