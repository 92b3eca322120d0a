import pytest
import torch

from locus import hooks
from locus.components import LABELS, Component, Components, counts, parameter_mask, site, slices


def kinds(model):
    return [kind for kind, n in counts(model).items() if n]


def zeroed(act, component):
    """The activation of a site with one component's part set to zero."""
    act = act.clone()
    if component.index is None:
        act[:] = 0
    elif component.kind in ("head", "kv"):
        act[:, :, component.index] = 0
    else:
        act[..., component.index] = 0
    return act


def hook_knockout(model, component, tokens):
    name = site(component)
    edit = [(name, lambda act: zeroed(act, component))]
    if component.kind == "kv":
        edit.append((f"blocks.{component.layer}.attn.hook_k", lambda act: zeroed(act, component)))
    with torch.no_grad(), hooks.edits(model, edit):
        return model.logits(tokens)


def weight_knockout(model, component, tokens):
    owned = slices(model, component)
    if component.kind == "head" and model.name in ("olmo2", "olmoe"):
        # Queries are normalized over all heads together, so one head's query rows scale the others.
        owned = {name: index for name, index in owned.items() if "o_proj" in name}
    kept = {name: model.weights[name].detach().clone() for name in owned}
    try:
        for name, index in owned.items():
            values = kept[name].clone()
            values[index] = 0
            model.write(name, values)
        with torch.no_grad():
            return model.logits(tokens)
    finally:
        for name, values in kept.items():
            model.write(name, values)


def test_hook_knockout_is_weight_knockout(any_model, tokens):
    with torch.no_grad():
        base = any_model.logits(tokens)
    for kind in kinds(any_model):
        of_kind = any_model.components(kind)
        for component in (of_kind[1], of_kind[len(of_kind) // 2], of_kind[-1]):
            by_hook = hook_knockout(any_model, component, tokens)
            by_weight = weight_knockout(any_model, component, tokens)
            assert (by_hook - by_weight).abs().max() < 1e-9, component
            assert (by_hook - base).abs().max() > 1e-4, f"{component} changes nothing"
    with torch.no_grad():
        assert torch.equal(any_model.logits(tokens), base)


def test_every_slice_is_read_by_the_forward_pass(any_model, tokens):
    """Noise in any entry that a component owns changes the logits (a constant could hide behind a norm)."""
    with torch.no_grad():
        base = any_model.logits(tokens)
    for kind in kinds(any_model):
        component = any_model.components(kind)[0]
        for name, index in slices(any_model, component).items():
            kept = any_model.weights[name].detach().clone()
            values = kept.clone()
            values[index] += torch.randn(kept[index].shape, generator=torch.Generator().manual_seed(0))
            any_model.write(name, values)
            with torch.no_grad():
                changed = any_model.logits(tokens)
            any_model.write(name, kept)
            assert (changed - base).abs().max() > 1e-6, (component, name)


def test_components_of_a_kind_do_not_overlap(any_model):
    for kind in kinds(any_model):
        of_kind = any_model.components(kind)
        full = parameter_mask(any_model, of_kind, torch.ones(len(of_kind), dtype=torch.bool))
        assert sum(int(m.sum()) for m in full.values()) == int(of_kind.sizes.sum())


def test_mask_of_many_is_union_of_slices(any_model):
    for kind in kinds(any_model):
        of_kind = any_model.components(kind)
        selected = torch.arange(len(of_kind)) % 3 == 1
        mask = parameter_mask(any_model, of_kind, selected)
        slow = {name: torch.zeros_like(m) for name, m in mask.items()}
        for i in selected.nonzero().flatten().tolist():
            for name, index in slices(any_model, of_kind[i]).items():
                slow[name][index] = True
        assert all(torch.equal(mask[name], slow[name]) for name in slow)
        assert set(mask) == set(slow)


def test_labels_parse_back():
    for kind in LABELS:
        component = Component(9, kind, None if kind in ("mlp", "attn") else 6)
        assert Component.parse(str(component)) == component
    for bad in ("L9", "9H6", "L9H", "L9MLP3", "L1X2", "H6"):
        with pytest.raises(ValueError, match="not a component"):
            Component.parse(bad)


def test_grouped_query_heads_own_no_keys(llama):
    names = slices(llama, Component(0, "head", 3))
    assert not any("k_proj" in n or "v_proj" in n for n in names)
    assert all("k_proj" in n or "v_proj" in n for n in slices(llama, Component(0, "kv", 1)))


def test_bad_requests_name_the_way_out(llama):
    with pytest.raises(ValueError, match="kinds are head"):
        llama.components("layer")
    with pytest.raises(ValueError, match="no component of kind 'expert'"):
        llama.components("expert")
    for missing in (Component(0, "head", 4), Component(3, "mlp"), Component(0, "kv", 2)):
        with pytest.raises(ValueError, match=f"no {missing}"):
            slices(llama, missing)
    heads = llama.components("head")
    foreign = Components(heads.items, heads.sizes, "another")
    with pytest.raises(ValueError, match="belong to model another"):
        parameter_mask(llama, foreign, torch.ones(len(heads), dtype=torch.bool))
    with pytest.raises(ValueError, match="twice"):
        heads + heads
