import copy
import json

import pytest
import torch
from helpers import ARCHITECTURES, tokenizer
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

import locus
from locus import hooks
from locus.models import wrap


@pytest.fixture(params=ARCHITECTURES)
def directory(request, tmp_path):
    """A Hugging Face directory of each architecture, in float32."""
    path = tmp_path / request.param
    ARCHITECTURES[request.param]().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def plain_logits(directory, tokens, **mask):
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(tokens, **mask).logits


def test_load_any_directory_with_equal_logits_and_save_it_again(directory, tokens, tmp_path, capsys):
    model = locus.load(directory)
    assert "logits equal plain Hugging Face's" in capsys.readouterr().err
    assert model.parity < 1e-5 and model.fast
    expected = plain_logits(directory, tokens)
    with torch.no_grad():
        assert (model.logits(tokens) - expected).abs().max() < 1e-5
    saved = model.save_pretrained(tmp_path / "saved")
    assert torch.equal(plain_logits(saved, tokens), expected)
    assert AutoTokenizer.from_pretrained(saved)("w1 w2")["input_ids"] == tokenizer()("w1 w2")["input_ids"]
    with pytest.raises(ValueError, match="not empty"):
        model.save_pretrained(saved)


def test_an_edit_of_any_parameter_is_read_and_saved(directory, tokens, tmp_path):
    """Perturb every parameter by its Hugging Face name; the wrapped model and the saved one must agree."""
    model = locus.load(directory, quiet=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = model.logits(tokens)
    for name, p in model.weights.items():
        model.write(name, p.detach() + 0.05 * torch.randn(p.shape, generator=generator))
    with torch.no_grad():
        after = model.logits(tokens)
    assert (after - before).abs().max() > 1e-2
    saved = model.save_pretrained(tmp_path / "edited")
    assert (plain_logits(saved, tokens) - after).abs().max() < 1e-5


def test_a_deep_copy_is_a_model_of_its_own(any_model, tokens):
    other, state = copy.deepcopy(any_model), any_model.state
    with torch.no_grad():
        before = any_model.logits(tokens)
        assert torch.equal(other.logits(tokens), before)
        for name, p in other.weights.items():
            other.write(name, p / 2)
        assert (other.logits(tokens) - before).abs().max() > 1e-2
        assert torch.equal(any_model.logits(tokens), before)
    assert any_model.state == state != other.state
    assert {other.name_of(live.tensor) for live in other.live} == set(other.weights)


def test_tied_embeddings_stay_tied(tokens, tmp_path):
    path = tmp_path / "tied"
    ARCHITECTURES["llama"]().save_pretrained(path)
    tokenizer().save_pretrained(path)
    model = locus.load(path, quiet=True)
    saved = model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert "lm_head.weight" not in model.weights


def test_padding_on_either_side_gives_what_prompts_give_alone(any_model, tokens):
    length = 4
    with torch.no_grad():
        alone = any_model.logits(tokens[1:2, :length])
    for side in ("left", "right"):
        padded, mask = tokens.clone(), torch.ones_like(tokens, dtype=torch.bool)
        span = slice(-length, None) if side == "left" else slice(length)
        mask[1] = False
        mask[1, span] = True
        padded[1] = 1
        padded[1, span] = tokens[1, :length]
        with torch.no_grad():
            together = any_model.logits(padded, mask)
            traced = hooks.trace(any_model, padded, mask).logits()
        assert (together[1, span] - alone[0]).abs().max() < 1e-6, side
        assert (traced[1, span] - alone[0]).abs().max() < 1e-6, side
        assert not together[:, span].isnan().any()


def test_prefix_continues_with_the_same_logits_and_gradients(any_model, tokens):
    read = torch.tensor([[6], [6], [5]])
    rows = torch.tensor([2, 0])
    weight = any_model.weights[next(n for n in reversed(any_model.weights) if "layers.2" in n or "h.2" in n)]
    weight.requires_grad_(True)
    whole = any_model.logits(tokens).gather(1, read[:, :, None].expand(-1, -1, 97))[rows]
    expected = torch.autograd.grad(whole.square().sum(), weight)[0]
    for layer in range(any_model.cfg.n_layers):
        continued = hooks.prefix(any_model, tokens, None, layer).run(rows, read[rows])
        assert (continued - whole).abs().max() < 1e-6
        gradient = torch.autograd.grad(continued.square().sum(), weight)[0]
        assert (gradient - expected).abs().max() < 1e-5


def test_reading_few_positions_gives_their_logits(any_model, tokens):
    read = torch.tensor([[6, 2], [1, 1], [0, 5]])
    with torch.no_grad():
        whole = any_model.logits(tokens).gather(1, read[:, :, None].expand(-1, -1, 97))
        with hooks.read_only(any_model, read):
            few = any_model.logits(tokens)
    assert (few - whole).abs().max() < 1e-12


def test_hooks_never_stay(llama, tokens):
    before = hooks.count(llama)

    def broken(act):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hooks.edits(llama, [("blocks.1.attn.hook_z", broken)]):
        llama.logits(tokens)
    with pytest.raises(ValueError, match="no hook 'blocks.9.nothing'"), hooks.capture(llama, ["blocks.9.nothing"]):
        pass
    assert hooks.count(llama) == before


def test_frozen_gives_back_what_asked_for_gradients(llama):
    wanted = {n: p.requires_grad for n, p in llama.weights.items()}
    with pytest.raises(KeyError), llama.frozen():
        assert not any(p.requires_grad for p in llama.weights.values())
        raise KeyError
    assert {n: p.requires_grad for n, p in llama.weights.items()} == wanted


def test_habits_of_transformer_lens(llama, tokens):
    _, cache = llama.run_with_cache(tokens)
    assert cache["blocks.0.attn.hook_z"].shape == (3, 7, 4, 8)
    assert llama.W_out.shape == (3, 48, 32)
    assert "llama" in repr(llama)
    with pytest.raises(AttributeError):
        _ = llama.nothing_of_the_kind


def test_what_is_not_a_model_says_what_to_do(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        locus.load(empty)
    with pytest.raises(ValueError, match="not a directory"):
        locus.load(str(tmp_path / "nowhere"))
    file = tmp_path / "file.txt"
    file.write_text("x")
    with pytest.raises(ValueError, match="not a directory"):
        locus.load(file)
    with pytest.raises(ValueError, match="nor a model that the hub gave"):
        locus.load("no-such-org/no-such-model")


def test_damaged_directories_say_so(tmp_path, tokens):
    def fresh(name):
        path = tmp_path / name
        ARCHITECTURES["llama"]().save_pretrained(path)
        tokenizer().save_pretrained(path)
        return path

    truncated = fresh("truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        locus.load(truncated)

    lacking = fresh("lacking")
    from safetensors.torch import load_file, save_file

    tensors = load_file(lacking / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 parameters are missing.*layers.1.mlp.up_proj"):
        locus.load(lacking)

    no_weights = fresh("no_weights")
    (no_weights / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="damaged or incomplete"):
        locus.load(no_weights)

    bad_config = fresh("bad_config")
    (bad_config / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged or incomplete"):
        locus.load(bad_config)

    unknown = fresh("unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "perceptron"}))
    with pytest.raises(ValueError, match="architecture"):
        locus.load(unknown)

    no_tokenizer = fresh("no_tokenizer")
    for file in no_tokenizer.glob("token*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        locus.load(no_tokenizer)


def test_unsupported_models_are_refused():
    import transformers as hf

    t5 = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1))
    with pytest.raises(ValueError, match="encoder-decoder"):
        wrap(t5, tokenizer(), "t5")
    xlnet = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=97, d_model=16, n_layer=1, n_head=2, d_inner=16))
    with pytest.raises(ValueError, match="XLNetLMHeadModel"):
        wrap(xlnet.eval(), tokenizer(), "xlnet")


def test_a_file_in_the_way_is_refused(llama, tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        llama.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


def test_a_model_whose_logits_differ_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"logits differ .* training mode, .* call model.eval\(\) first"):
        wrap(ARCHITECTURES["gpt2"]().train(), tokenizer())
    forward = TransformerBridge.forward
    monkeypatch.setattr(TransformerBridge, "forward", lambda *args, **kwargs: 2 * forward(*args, **kwargs))
    with pytest.raises(ValueError, match="not supported correctly, so nothing measured on it could be trusted"):
        wrap(ARCHITECTURES["gpt2"](), tokenizer())
