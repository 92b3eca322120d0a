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
    "llama": functools.partial(
        _random, hf.LlamaForCausalLM, hf.LlamaConfig, **_GROUPED, tie_word_embeddings=True
    ),
    "qwen3": functools.partial(_random, hf.Qwen3ForCausalLM, hf.Qwen3Config, **_GROUPED, head_dim=8),
    "olmo2": functools.partial(_random, hf.Olmo2ForCausalLM, hf.Olmo2Config, **_GROUPED),
    "gemma2": functools.partial(_random, hf.Gemma2ForCausalLM, hf.Gemma2Config, **_GEMMA),
    "gemma3": functools.partial(_random, hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, **_GEMMA),
    "mixtral": functools.partial(
        _random, hf.MixtralForCausalLM, hf.MixtralConfig, **_GROUPED, num_local_experts=4
    ),
    "olmoe": functools.partial(
        _random, hf.OlmoeForCausalLM, hf.OlmoeConfig, **_GROUPED, num_experts=4, num_experts_per_tok=2
    ),
}
