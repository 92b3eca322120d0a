"""Lists that put every method under every property test, and small random models to test them on."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{i}" for i in range(94)]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """A word-level tokenizer of 97 words that adds no special token by itself."""
    vocab = {w: i for i, w in enumerate(["<unk>", "<pad>", "<bos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<bos>"
    )


_SIZE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
)
_GROUPED = {**_SIZE, "num_key_value_heads": 2, "pad_token_id": 1}
_GEMMA = {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}


def _random(model: type, config: type, /, **settings: Any) -> Any:
    """A random model in evaluation mode; norms and biases are drawn too, so that a wrong slice shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = model(config(**settings)).eval()
        for p in made.parameters():
            p.data.add_(torch.randn_like(p) * 0.1)
    return made


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": functools.partial(
        _random, hf.GPT2LMHeadModel, hf.GPT2Config, vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64
    ),
    "gpt_neox": functools.partial(_random, hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, **_SIZE),
    "llama": functools.partial(_random, hf.LlamaForCausalLM, hf.LlamaConfig, **_GROUPED, tie_word_embeddings=True),
    "phi3": functools.partial(_random, hf.Phi3ForCausalLM, hf.Phi3Config, **_GROUPED),
    "qwen3": functools.partial(_random, hf.Qwen3ForCausalLM, hf.Qwen3Config, **_GROUPED, head_dim=8),
    "olmo2": functools.partial(_random, hf.Olmo2ForCausalLM, hf.Olmo2Config, **_GROUPED),
    "gemma2": functools.partial(_random, hf.Gemma2ForCausalLM, hf.Gemma2Config, **_GEMMA),
    "gemma3": functools.partial(_random, hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, **_GEMMA),
    "mixtral": functools.partial(_random, hf.MixtralForCausalLM, hf.MixtralConfig, **_GROUPED, num_local_experts=4),
    "olmoe": functools.partial(
        _random, hf.OlmoeForCausalLM, hf.OlmoeConfig, **_GROUPED, num_experts=4, num_experts_per_tok=2
    ),
}


def contrast_pairs(n: int = 3, padding: str | None = None) -> Any:
    """Random aligned pairs that differ in the second token; two read positions, of which some are padding."""
    from locus.facts import ContrastPairs, Fact, Facts

    generator = torch.Generator().manual_seed(2)
    length = 6
    clean = torch.randint(3, 97, (n, length), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] - 3 + 17) % 94 + 3
    lengths = torch.tensor([length - (i % 3 if padding else 0) for i in range(n)])
    first = length - lengths if padding == "left" else torch.zeros_like(lengths)
    at = torch.arange(length)
    mask = (at >= first[:, None]) & (at < (first + lengths)[:, None])
    if padding:
        rows = [row[:k].tolist() for row, k in zip(clean, lengths.tolist(), strict=True)]
        others = [row[:k].tolist() for row, k in zip(corrupted, lengths.tolist(), strict=True)]
        clean, corrupted = torch.ones_like(clean), torch.ones_like(corrupted)
        for i, (row, other) in enumerate(zip(rows, others, strict=True)):
            clean[i, mask[i]], corrupted[i, mask[i]] = torch.tensor(row), torch.tensor(other)
    last = first + lengths - 1
    read_mask = torch.ones(n, 2, dtype=torch.bool)
    read_mask[1:, 1] = False
    return ContrastPairs(
        clean=clean,
        corrupted=corrupted,
        attention_mask=mask,
        read=torch.stack([last, last - 1], dim=1).where(read_mask, torch.zeros(n, 2, dtype=torch.long)),
        answer=torch.tensor([[5, 7]] * n).where(read_mask, torch.zeros(n, 2, dtype=torch.long)),
        distractor=torch.tensor([[6, 8]] * n).where(read_mask, torch.zeros(n, 2, dtype=torch.long)),
        read_mask=read_mask,
        subject=(at == first[:, None] + 1).expand(n, -1),
        facts=Facts([Fact(f"w{i}", "relation", f"w{i} w50", "w60") for i in range(n)]),
    )


def localizers() -> dict[str, Any]:
    """Every localizer, under the property tests of test_localize.py."""
    import locus as lo

    kept = lo.facts.Facts([lo.facts.Fact(f"w{i}", "relation", f"w{i} w51", f"w{i + 20} w61") for i in range(3)])
    return {
        "patching": lo.ActivationPatching(),
        "patching, noising": lo.ActivationPatching(direction="noising"),
        "attribution": lo.AttributionPatching(),
        "attribution, noising": lo.AttributionPatching(direction="noising"),
        "relp": lo.RelP(),
        "direct logits": lo.DirectLogits(),
        "atp*": lo.AtPStar(),
        "atp*, graddrop": lo.AtPStar(drop=True),
        "integrated gradients": lo.IntegratedGradients(steps=3),
        "integrated gradients, inputs": lo.IntegratedGradients(over="inputs", steps=3),
        "knowledge neurons": lo.KnowledgeNeurons(steps=3),
        "causal tracing": lo.CausalTracing(samples=2, window=2),
        "attention knockout": lo.AttentionKnockout(window=1),
        "fact lookup": lo.FactLookup(),
        "probing": lo.Probing(folds=3),
        "mean rank": lo.MeanRank(),
        "eap": lo.EAP(),
        "eap-ig": lo.EAP(steps=3),
        "path patching": lo.PathPatching(),
        "path patching, noising": lo.PathPatching("noising", receiver="L2H1.q"),
        "knockout, zero": lo.Knockout("zero"),
        "knockout, mean": lo.Knockout("mean"),
        "knockout, resample": lo.Knockout("resample"),
        "activations": lo.Activations(),
        "activations, abs_mean": lo.Activations("abs_mean"),
        "random": lo.Random(),
        "slimming": lo.Slimming(steps=10),
        "hard concrete": lo.HardConcrete(steps=10),
        "saliency": lo.GradientSaliency(),
        "saliency, pooled": lo.GradientSaliency(pooled=True),
        "snip": lo.SNIP(),
        "snip, signed": lo.SNIP(signed=True),
        "fisher": lo.Fisher(),
        "wagle": lo.WAGLE(retain=kept),
        "memflex": lo.MemFlex(retain=kept, copies=2),
        "magnitude": lo.Magnitude(),
        "wanda": lo.Wanda(),
    }


LOCALIZERS = tuple(localizers())


def as_users(kind, /, **fields):
    """A frozen dataclass as users make it, whose types nothing checks before its own `__post_init__` does."""
    made = object.__new__(kind)
    made.__dict__.update(vars(kind()) | fields)
    made.__post_init__()
    return made
