"""Relevance patching and direct readouts, against Hugging Face models with rules written by hand."""

import pytest
import torch
import transformers as hf
from helpers import ARCHITECTURES, contrast_pairs, tokenizer
from test_localize import metric_of
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from locus import hooks, wrap
from locus.localize import AttributionPatching, DirectLogits, RelP, localize, logit_lens, logit_sum
from locus.localize.attribution import gradients_at
from locus.localize.interventions import targets
from locus.localize.relp import constant_scales, secants
from locus.metrics import log_probability, logit_difference


def _norm(self, x):
    scale = (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt().detach()
    return self.weight * x / scale


def _mlp(self, x):
    gate, up = self.gate_proj(x), self.up_proj(x)
    act = torch.nn.functional.silu(gate)
    by_gate = gate * (act / gate).detach() * up.detach()
    by_up = act.detach() * up
    return self.down_proj((by_gate + by_up) / 2)


def _relevance(model, tokens, pairs, modules):
    """Inputs of some modules and their relevance, from the plain Hugging Face model whose classes follow the rules."""
    found = {}
    handles = [m.register_forward_pre_hook(lambda m, args: found.update({m: args[0]})) for m in modules]
    logits = model(inputs_embeds=model.get_input_embeddings()(tokens).detach().requires_grad_()).logits
    for handle in handles:
        handle.remove()
    read = pairs.read[:, :, None].expand(-1, -1, logits.shape[-1])
    total = logit_difference(logits.gather(1, read), targets(pairs)).sum()
    return [found[m].detach() for m in modules], torch.autograd.grad(total, [found[m] for m in modules])


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_relevance_patching_equals_a_llama_with_the_rules_written_into_it(direction, monkeypatch):
    hf = ARCHITECTURES["llama"]().double()
    pairs = contrast_pairs()
    wrapped = wrap(ARCHITECTURES["llama"]().double(), tokenizer())
    method = RelP(direction)
    heads, neurons, mlps = (
        method.score(wrapped, pairs, wrapped.components(kind), logit_difference, False)
        for kind in ("head", "neuron", "mlp")
    )
    plain = AttributionPatching(direction).score(wrapped, pairs, wrapped.components("neuron"), logit_difference, False)
    monkeypatch.setattr(LlamaRMSNorm, "forward", _norm)
    monkeypatch.setattr(LlamaMLP, "forward", _mlp)
    layers = hf.model.layers
    modules = [*(layer.self_attn.o_proj for layer in layers), *(layer.mlp.down_proj for layer in layers)]
    clean, corrupted = (_relevance(hf, t, pairs, modules) for t in (pairs.clean, pairs.corrupted))
    slopes = (corrupted if direction == "denoising" else clean)[1]
    products = [(c - o) * s for c, o, s in zip(clean[0], corrupted[0], slopes, strict=True)]
    by_head = torch.cat([p.unflatten(-1, (4, -1)).sum((1, 3)) for p in products[:3]], 1)
    # Norms of Hugging Face are taken in float32.
    assert (heads - by_head).abs().max() < 1e-5
    assert (neurons - torch.cat([p.sum(1) for p in products[3:]], 1)).abs().max() < 1e-5
    assert (mlps - neurons.reshape(3, 3, -1).sum(-1)).abs().max() < 1e-5  # down_proj has no bias
    assert not torch.allclose(neurons, plain, rtol=0.2)  # else the rules change nothing here


def test_relevance_of_a_neuron_is_its_secant():
    """One neuron's only input scaled to zero removes all it writes: what the secant, and not the slope, predicts."""
    model = wrap(ARCHITECTURES["gpt2"]().double(), tokenizer())
    pairs = contrast_pairs()
    name = "blocks.2.mlp.hook_pre"
    with constant_scales(model), secants(model):
        slopes, values = gradients_at(model, pairs.clean, pairs, [name], logit_difference)
    with constant_scales(model):
        after, post = gradients_at(model, pairs.clean, pairs, ["blocks.2.mlp.hook_post"], logit_difference)
    expected = post["blocks.2.mlp.hook_post"] * after["blocks.2.mlp.hook_post"]
    assert (values[name] * slopes[name] - expected).abs().max() < 1e-9


def test_relevance_leaves_the_model_and_its_values_alone(any_model):
    pairs = contrast_pairs(padding="left")
    before, registered = metric_of(any_model, pairs.clean, pairs), hooks.count(any_model)
    with constant_scales(any_model), secants(any_model):
        inside = metric_of(any_model, pairs.clean, pairs)
    assert (inside - before).abs().max() < 1e-12
    assert hooks.count(any_model) == registered and torch.equal(metric_of(any_model, pairs.clean, pairs), before)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_direct_logits_and_the_rest_add_up_to_the_metric(any_model, padding):
    pairs = contrast_pairs(padding=padding)
    check = logit_sum(any_model, pairs)
    expected = metric_of(any_model, pairs.clean, pairs)
    assert torch.allclose(torch.tensor(check.metric.tolist()), expected.float(), rtol=1e-4)
    if getattr(any_model.bridge.original_model.config, "final_logit_softcapping", None) is None:
        assert check.error.abs().max() < 1e-5
    blocks = localize(any_model, pairs, DirectLogits(batch_size=2), components="attn", progress=False)
    assert torch.allclose(blocks.values.sum(1), torch.tensor(check.attention.tolist()), atol=1e-6)


def test_norms_of_a_list_of_tokens():
    """OPT flattens batch and positions before the norm of an MLP."""
    torch.manual_seed(0)
    size = {"vocab_size": 97, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3}
    config = hf.OPTConfig(**size, num_attention_heads=4, max_position_embeddings=64)
    opt = wrap(hf.OPTForCausalLM(config).double().eval(), tokenizer(), "opt")
    pairs = contrast_pairs(padding="left")
    assert logit_sum(opt, pairs).error.abs().max() < 1e-5
    plain = localize(opt, pairs, AttributionPatching(), components="neuron", progress=False).values
    found = localize(opt, pairs, RelP(), components="neuron", progress=False).values
    assert found.isfinite().all() and 0.3 < torch.corrcoef(torch.stack([plain.flatten(), found.flatten()]))[0, 1] < 0.99


def test_direct_logits_equal_the_formula_on_a_transformer_lens_cache():
    gpt2 = wrap(ARCHITECTURES["gpt2"]().double(), tokenizer())
    pairs = contrast_pairs()
    tokens = pairs.clean
    _, cache = gpt2.bridge.run_with_cache(tokens)
    norm = gpt2.bridge.ln_final
    unembed = gpt2.bridge.unembed.original_component.weight  # [vocab, d_model]
    scale = cache["ln_final.hook_scale"]
    for kind, name in (("attn", "hook_attn_out"), ("mlp", "hook_mlp_out")):
        values = DirectLogits().score(gpt2, pairs, gpt2.components(kind), logit_difference, False)
        for layer in range(3):
            out = cache[f"blocks.{layer}.{name}"]
            out = (out - out.mean(-1, keepdim=True)) / scale * norm.original_component.weight
            for row in range(3):
                used = pairs.read_mask[row]
                at, right, wrong = pairs.read[row, used], pairs.answer[row, used], pairs.distractor[row, used]
                direction = unembed[right] - unembed[wrong]
                expected = (out[row, at] * direction).sum(-1).mean()
                assert abs(values[row, layer] - expected) < 1e-6
    heads = DirectLogits().score(gpt2, pairs, gpt2.components("head"), logit_difference, False).reshape(3, 3, 4)
    attn = DirectLogits().score(gpt2, pairs, gpt2.components("attn"), logit_difference, False)
    bias = torch.stack([block.attn.o.original_component.bias for block in gpt2.bridge.blocks])
    bias = (bias - bias.mean(-1, keepdim=True)) * norm.original_component.weight
    for row in range(3):
        used = pairs.read_mask[row]
        direction = unembed[pairs.answer[row, used]] - unembed[pairs.distractor[row, used]]
        written = (bias[:, None] / scale[row, pairs.read[row, used]] * direction).sum(-1).mean(-1)
        assert (heads[row].sum(-1) + written - attn[row]).abs().max() < 1e-6


def test_logit_lens_takes_each_layers_own_norm(any_model):
    pairs = contrast_pairs(padding="right")
    frame = logit_lens(any_model, pairs, batch_size=2)
    assert len(frame) == int(pairs.read_mask.sum()) * 4 and set(frame.layer) == {-1, 0, 1, 2}
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3))]
    streams = hooks.states(any_model, pairs.clean, pairs.attention_mask, names)
    config = any_model.bridge.original_model.config
    cap = getattr(config, "final_logit_softcapping", None)
    for row in frame.itertuples():
        fact = [f.prompt for f in pairs.facts].index(row.fact)
        stream = streams[names[row.layer + 1]][fact, row.position]
        with torch.no_grad():
            norm = any_model.bridge.ln_final.original_component
            logits = any_model.bridge.unembed.original_component(norm(stream[None, None]))[0, 0]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        place = pairs.read[fact].tolist().index(row.position)
        answer = int(pairs.answer[fact, place])
        assert abs(row.probability - float(logits.softmax(-1)[answer])) < 1e-6
        assert row.rank == int((logits > logits[answer]).sum())
        assert row.top == any_model.tokenizer.convert_ids_to_tokens(int(logits.argmax()))
    last = frame[frame.layer == 2]
    assert last.kl.abs().max() < 1e-6 and frame[frame.layer == -1].kl.min() > 0
    expected = metric_of(any_model, pairs.clean, pairs, log_probability).exp()
    first = last[last.fact == pairs.facts[1].prompt].probability  # one token
    assert abs(float(first.iloc[0]) - float(expected[1])) < 1e-6
