import pytest
import torch
from helpers import ARCHITECTURES, contrast_pairs, tokenizer
from test_components import kinds
from test_localize import metric_of, replaced

from locus import hooks, wrap
from locus.components import Components
from locus.localize import AtPStar, IntegratedGradients, KnowledgeNeurons
from locus.localize.atp_star import pattern_change
from locus.localize.attribution import gradients_at
from locus.localize.interventions import activations, targets
from locus.metrics import logit_difference, probability


def layer_of(components, layer):
    chosen = torch.tensor([i for i, c in enumerate(components) if c.layer == layer])
    return Components(tuple(components[i] for i in chosen), components.sizes[chosen], components.model)


def swapped(model, base, pairs, components, replacement):
    """m with every component of the layer replaced at once."""
    whole = {name: lambda act, value=value: value.reshape(act.shape) for name, value in replacement.items()}
    with hooks.edits(model, list(whole.items())):
        return metric_of(model, base, pairs)


def test_integrated_gradients_of_a_layer_add_up_to_patching_it(any_model):
    if "expert" not in kinds(any_model):  # a router switches along the path: the metric jumps, which no gradient sees
        adds_up(any_model, "denoising", "left")


def test_integrated_gradients_add_up_from_the_other_side(llama):
    adds_up(llama, "noising", "right")


def adds_up(any_model, direction, padding):
    pairs = contrast_pairs(padding=padding)
    base, source = (pairs.corrupted, pairs.clean) if direction == "denoising" else (pairs.clean, pairs.corrupted)
    sign = 1 if direction == "denoising" else -1
    for kind in ("head", "kv", "neuron", "mlp", "attn"):
        if kind not in kinds(any_model):
            continue
        components = layer_of(any_model.components(kind), 1)
        values = IntegratedGradients(direction=direction).score(any_model, pairs, components, logit_difference, False)
        source_acts = activations(any_model, source, pairs.attention_mask, components)
        change = swapped(any_model, base, pairs, components, source_acts) - metric_of(any_model, base, pairs)
        # Softmax and norms are taken in float32.
        assert torch.allclose(values.sum(1), sign * change, rtol=1e-3, atol=1e-4), (kind, values.sum(1), change)


def forward(model, pairs, metric):
    def run(tokens):
        # captum gives the rows of all steps at once, pairs within steps.
        n = len(tokens) // len(pairs)
        read = pairs.read.repeat(n, 1)[:, :, None].expand(-1, -1, 97)
        answers = targets(pairs)
        answers = type(answers)(*(getattr(answers, f).repeat(n, 1) for f in ("answer", "distractor", "mask")))
        return metric(model.logits(tokens).gather(1, read), answers)

    return run


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_integrated_gradients_over_activations_equal_captum(llama, direction):
    captum = pytest.importorskip("captum.attr")
    pairs = contrast_pairs()
    base, source = (pairs.corrupted, pairs.clean) if direction == "denoising" else (pairs.clean, pairs.corrupted)
    neurons = llama.components("neuron")
    method = IntegratedGradients(steps=5, direction=direction)
    values = method.score(llama, pairs, neurons, logit_difference, False).reshape(3, 3, -1)
    for layer in range(3):
        # captum moves the layer from its values at `baselines` to those at `inputs`, in the run of `inputs`: so
        # that is our base run, and its difference has the other sign.
        layered = captum.LayerIntegratedGradients(
            forward(llama, pairs, logit_difference), llama.bridge.blocks[layer].mlp.out
        )
        expected = layered.attribute(base, baselines=source, n_steps=5, attribute_to_layer_input=True)
        sign = -1 if direction == "denoising" else 1
        assert (values[:, layer] - sign * expected.sum(1)).abs().max() < 1e-6


def test_integrated_gradients_over_inputs_equal_a_hooked_loop(any_model):
    pairs = contrast_pairs(padding="left")
    components = any_model.components("attn")
    values = IntegratedGradients("inputs", steps=4).score(any_model, pairs, components, logit_difference, False)
    flipped = IntegratedGradients("inputs", steps=4, direction="noising")
    assert (values - flipped.score(any_model, pairs, components, logit_difference, False)).abs().max() < 1e-6
    entry = "blocks.0.hook_resid_pre"
    ends = [hooks.states(any_model, t, pairs.attention_mask, [entry])[entry] for t in (pairs.corrupted, pairs.clean)]
    acts = [activations(any_model, t, pairs.attention_mask, components) for t in (pairs.corrupted, pairs.clean)]
    captum = pytest.importorskip("captum.attr._utils.approximation_methods")
    step_sizes, alphas = captum.approximation_parameters("gausslegendre")
    expected = torch.zeros_like(values)
    for weight, alpha in zip(step_sizes(4), alphas(4), strict=True):
        here = (ends[0] + alpha * (ends[1] - ends[0])).requires_grad_()
        names = [f"blocks.{layer}.hook_attn_out" for layer in range(3)]
        with hooks.edits(any_model, [(entry, lambda _, here=here: here)]), hooks.capture(any_model, names) as found:
            logits = any_model.logits(pairs.corrupted, pairs.attention_mask)
        read = pairs.read[:, :, None].expand(-1, -1, logits.shape[-1])
        total = logit_difference(logits.gather(1, read), targets(pairs)).sum()
        slopes = torch.autograd.grad(total, [found[name] for name in names])
        keep = pairs.attention_mask[..., None]
        for layer, (name, slope) in enumerate(zip(names, slopes, strict=True)):
            product = ((acts[1][name] - acts[0][name]) * slope).masked_fill(~keep, 0)
            expected[:, layer] += weight * product.sum((1, 2))
    assert (values - expected).abs().max() < 1e-6


@pytest.mark.parametrize("padding, at", [("left", "read"), (None, "all")])
def test_knowledge_neurons_equal_finite_differences(any_model, padding, at):
    """Each term of the paper's sum by central differences, one neuron at a time."""
    if "neuron" not in kinds(any_model):
        return
    pairs = contrast_pairs(padding=padding)
    neurons = layer_of(any_model.components("neuron"), 1)
    values = KnowledgeNeurons(steps=3, at=at).score(any_model, pairs, neurons, logit_difference, False)
    name = "blocks.1.mlp.hook_post"
    clean = activations(any_model, pairs.clean, pairs.attention_mask, neurons)[name]
    places = pairs.attention_mask.clone()
    if at == "read":
        places[:] = False
        for row, (positions, used) in enumerate(zip(pairs.read.tolist(), pairs.read_mask.tolist(), strict=True)):
            for position, here in zip(positions, used, strict=True):
                places[row, position] |= here
    for i in (0, 17, 47):
        expected = 0
        for k in (1, 2, 3):
            sides = []
            for eps in (1e-2, -1e-2):
                scale = torch.where(places[..., None], torch.tensor(k / 3, dtype=clean.dtype), 1.0).repeat(
                    1, 1, clean.shape[-1]
                )
                scale[..., i] += eps * places
                sides.append(swapped(any_model, pairs.clean, pairs, neurons, {name: clean * scale}))
            expected = expected + (sides[0] - sides[1]) / 2e-2 / 3
        assert torch.allclose(values[:, i], expected, rtol=2e-2, atol=1e-4), i


def test_knowledge_neurons_tend_to_the_knockout_of_their_layer(llama):
    pairs = contrast_pairs()
    neurons = layer_of(llama.components("neuron"), 2)
    values = KnowledgeNeurons(steps=60, at="all").score(llama, pairs, neurons, probability, False)
    with hooks.edits(llama, [("blocks.2.mlp.hook_post", torch.zeros_like)]):
        without = metric_of(llama, pairs.clean, pairs, probability)
    change = metric_of(llama, pairs.clean, pairs, probability) - without
    assert torch.allclose(values.sum(1), change, rtol=2e-2, atol=1e-5)


def test_integrated_gradients_see_past_saturation_where_patching_moves_one_part(llama):
    """For the output of a block alone, the integral is activation patching itself."""
    pairs = contrast_pairs()
    mlps = llama.components("mlp")
    values = IntegratedGradients(steps=20).score(llama, pairs, mlps, logit_difference, False)
    source = activations(llama, pairs.clean, pairs.attention_mask, mlps)
    before = metric_of(llama, pairs.corrupted, pairs)
    for i, mlp in enumerate(mlps):
        exact = replaced(llama, pairs.corrupted, pairs, mlp, source) - before
        assert torch.allclose(values[:, i], exact, rtol=1e-4, atol=1e-5)


def test_batches_of_pairs_do_not_change_integrals(llama):
    pairs = contrast_pairs(5, padding="right")
    for method in (IntegratedGradients, KnowledgeNeurons):
        whole, parts = (
            method(steps=2, batch_size=size).score(llama, pairs, llama.components("neuron"), logit_difference, False)
            for size in (32, 2)
        )
        assert (whole - parts).abs().max() < 1e-9


def test_bad_requests_say_the_way_out():
    with pytest.raises(ValueError, match="'activations' or 'inputs'"):
        IntegratedGradients("weights")
    with pytest.raises(ValueError, match="'denoising' or 'noising'"):
        IntegratedGradients(direction="up")
    with pytest.raises(ValueError, match="'read' or 'all'"):
        KnowledgeNeurons(at="last")
    for method in (IntegratedGradients, KnowledgeNeurons):
        with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
            method(steps=0)


def test_patched_patterns_equal_the_formula():
    """GPT-2 has no rotation: softmax(q k / √d) by hand, one node at a time."""
    model, pairs = wrap(ARCHITECTURES["gpt2"]().double(), tokenizer()), contrast_pairs(padding="right")
    names = [f"blocks.1.attn.hook_{n}" for n in "qk"]
    (q, k), (q2, k2) = (
        hooks.states(model, t, pairs.attention_mask, names).values() for t in (pairs.corrupted, pairs.clean)
    )
    allowed = torch.ones(6, 6).tril().bool() & pairs.attention_mask[:, None, None]

    def pattern(q, k):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
        return scores.masked_fill(~allowed, float("-inf")).softmax(-1)

    expected = torch.zeros(3, 4, 6, 6, dtype=torch.float64)
    for at in range(6):
        one = (torch.arange(6) == at)[None, :, None, None] & pairs.attention_mask[..., None, None]
        expected += pattern(torch.where(one, q2, q), k) - pattern(q, k)
        expected += pattern(q, torch.where(one, k2, k)) - pattern(q, k)
    expected = expected * pairs.attention_mask[:, None, :, None]
    got = pattern_change(model, pairs.corrupted, pairs.clean, pairs, 1)
    assert expected.abs().max() > 1e-2 and (got - expected).abs().max() < 1e-6


def test_atp_star_sees_a_saturated_head_that_the_gradient_does_not():
    """Queries 300 times as large: the pattern is one-hot, its slope 0; the other prompt's queries look elsewhere."""
    model, pairs = wrap(ARCHITECTURES["gpt2"]().double(), tokenizer()), contrast_pairs()
    model.bridge.blocks[2].attn.q.original_component.weight.data.mul_(300)
    heads = layer_of(model.components("head"), 2)
    names = [f"blocks.2.attn.hook_{n}" for n in "qk"]
    here, other = (hooks.states(model, t, pairs.attention_mask, names) for t in (pairs.corrupted, pairs.clean))
    slopes = gradients_at(model, pairs.corrupted, pairs, names, logit_difference)[0]
    plain = sum(((other[name] - here[name]) * slopes[name]).sum((1, 2, 3)) for name in names)
    exact, before = torch.zeros(3, dtype=torch.float64), metric_of(model, pairs.corrupted, pairs)
    for name in names:
        for position in range(6):
            act = here[name].clone()
            act[:, position] = other[name][:, position]
            exact += swapped(model, pairs.corrupted, pairs, heads, {name: act}) - before
    fixed = AtPStar().score(model, pairs, heads, logit_difference, False).sum(1)
    saturated = exact.abs() > 0.1
    assert saturated.sum() == 2
    assert (plain[saturated].abs() < 0.01 * exact[saturated].abs()).all(), (plain, fixed, exact)
    # What is left is the curvature of the final norm: AtP* is first-order in the pattern.
    assert ((fixed - exact)[saturated].abs() < 0.4 * exact[saturated].abs()).all(), (plain, fixed, exact)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_atp_star_is_the_slope_of_moving_the_pattern(llama, drop, direction):
    """By central differences, with the outputs of the dropped layer held."""
    pairs, sign = contrast_pairs(padding="left"), 1 if direction == "denoising" else -1
    base, source = (pairs.corrupted, pairs.clean)[::sign]
    heads = layer_of(llama.components("head"), 0)
    values = AtPStar(drop, direction).score(llama, pairs, heads, logit_difference, False)
    name, change = "blocks.0.attn.hook_pattern", pattern_change(llama, base, source, pairs, 0)
    for head in range(4):
        terms = []
        for layer in range(3) if drop else [None]:
            held = [] if layer is None else [f"blocks.{layer}.hook_{n}_out" for n in ("attn", "mlp")]
            kept = hooks.states(llama, base, pairs.attention_mask, held) if held else {}
            sides = []
            for eps in (1e-2, -1e-2):
                step = torch.zeros_like(change)
                step[:, head] = eps * change[:, head]
                fixed = [(n, lambda _, value=value: value) for n, value in kept.items()]
                with hooks.edits(llama, [(name, lambda act, step=step: act + step), *fixed]):
                    sides.append(metric_of(llama, base, pairs))
            terms.append((sides[0] - sides[1]) / 2e-2)
        expected = torch.stack(terms).abs().sum(0) / 2 if drop else sign * terms[0]
        assert torch.allclose(values[:, head], expected, rtol=2e-2, atol=1e-4), head


def test_atp_star_runs_on_every_architecture(any_model):
    """Finite, with padding; and batches of pairs do not change it."""
    pairs, heads = contrast_pairs(padding="left"), any_model.components("head")
    whole = AtPStar().score(any_model, pairs, heads, logit_difference, False)
    parts = AtPStar(batch_size=2).score(any_model, pairs, heads, logit_difference, False)
    assert whole.isfinite().all() and whole.std() > 0
    assert (whole - parts).abs().max() < 1e-5
