import json
import re

import numpy as np
import pytest
import small
import torch
from browser import CHROMIUM, browser, opened
from helpers import ARCHITECTURES, contrast_pairs
from synthetic import synthetic_study

import locus
from locus import hooks, view
from locus.components import site
from locus.evaluate import evaluate
from locus.localize import CausalTracing, causal_trace
from locus.metrics import log_probability, logit_difference
from locus.scores import Scores
from locus.view.show import Panel, View
from locus.view.text import _literal

EDGES = [
    *[("input", "L0H1", 0.5), ("input", "L0MLP", 0.1), ("L0H1", "L1H2.q", 0.4), ("L0H1", "L2MLP", -0.2)],
    *[("L1H2", "logits", 0.6), ("L2MLP", "logits", 0.2), ("L0MLP", "L1H3", 0.2), ("L1H3", "logits", -0.5)],
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as in Debian's package chromium")


def digest(model) -> str:
    """Of the weights as they are, however they were written."""
    return str([(name, float(weight.detach().double().sum())) for name, weight in model.weights.items()]) + model.state


@pytest.fixture(scope="module")
def data() -> dict:
    model, facts = small.model(), small.facts()
    pairs, split = facts.contrast_pairs(model), facts.split(forget=6, seed=0)
    scores = {
        kind: locus.localize(model, pairs, locus.AttributionPatching(), components=kind, progress=False)
        for kind in ("head", "neuron", "mlp")
    }
    mask = locus.Mask.top(scores["neuron"], budget=0.2)
    update = locus.unlearn(model, split, mask, locus.NPO(beta=0.1), optimizer=locus.AdamW(lr=3e-2), steps=6, seed=0)
    traced = causal_trace(model, pairs, CausalTracing(samples=2), progress=False)
    found = dict(scores=scores, mask=mask, update=update, traced=traced)
    return dict(model=model, facts=facts, pairs=pairs, split=split, **found)


@pytest.fixture(scope="module")
def views(data) -> dict[str, tuple[View, list[str]]]:
    """A view of every public function, with words that a reader must find in the page."""
    model, pairs, scores, mask = data["model"], data["pairs"], data["scores"], data["mask"]
    fact = data["split"].forget[0]
    heads, neurons = scores["head"], scores["neuron"]
    other = locus.Mask.random(like=mask, seed=1)
    study = synthetic_study({"NPO": [0.01, 0.02, 0.03]})
    best, top = heads.top(3).component.tolist(), neurons.top(3).component.tolist()
    return {
        "attention": (view.attention(model, fact, scores=heads, top=5), [*best, "5 heads", f"{best[0]} Zoomed"]),
        "neurons": (view.neurons(model, "w1 w90 w33", neurons), [*top, "w90", "10 neurons, 3 tokens"]),
        "neuron_attributions": (view.neuron_attributions(model, pairs, neurons), [*top, "logit difference"]),
        "attribution": (view.attribution(model, fact), ["attribution to heads", "attribution to neurons", fact.answer]),
        "before_after": (
            view.before_after(model, data["update"], fact, heads=best[:1]),
            [f"{best[0]} before", f"{best[0]} after", f"{best[0]} change", "probability of the next token", "→"],
        ),
        "grid": (view.grid(heads), ["layer", "head", "48 facts", "AttributionPatching"]),
        "sweep": (view.sweep(torch.randn(3, 2), ["<bos>", " Paris"], n=7), ["<bos> 0", "Paris 1", "n = 7 prompts"]),
        "trace": (view.trace(data["traced"]), ["last subject", "answer", "residual stream", "48 facts", "m(noised)"]),
        "ranking": (view.ranking(heads), [*best, "95% intervals"]),
        "density": (view.density(neurons), ["neurons", "share of the top 1%", "144 neurons"]),
        "overlap": (view.overlap({"top": mask, "random": other}), ["top", "random", "1.00", "both / either"]),
        "mask": (view.mask(mask), ["may change", "layer", "28 of 144 neuron"]),
        "update": (view.update(data["update"]), ["forget", "retain probability", "grad norm", "step", "NPO"]),
        "evaluation": (view.evaluation(evaluate(model, data["split"])), ["extraction strength", "holdout", "95%"]),
        "tradeoff": (view.tradeoff(study), ["retain strength (higher is better)", "located (top)", "3 seeds"]),
        "study": (view.study(study), ["AUES (higher is better)", "true location (oracle)", "95% interval"]),
        "circuit": (view.circuit(EDGES), ["input", "L0H1", "L1H2", "L2MLP", "logits", "8 edges"]),
    }


def test_every_public_function_is_under_the_tests_below(views):
    assert set(views) == {name for name in vars(view) if not name.startswith("_") and callable(getattr(view, name))} - {
        *("View", "page", "notebook")
    }


# ------------------------------------------------------------------------------------------------ in the browser


@pytest.fixture(scope="module")
def running():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def shown(running, views, tmp_path_factory) -> tuple[dict[str, str], list[str], list[str]]:
    """What a reader finds in each view, all on one page; what the page asked for; what went wrong."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(view.page([v for v, _ in views.values()], title="All views"))
    with opened(running, path) as page:
        page.drawn(len(views))
        text = "f => f.innerText + [...f.querySelectorAll('svg text')].map(t => ' ' + t.textContent).join('')"
        found = {
            name: page.tab.locator(f"#view-{i + 1}").evaluate(text).replace("\u2060", "")
            for i, name in enumerate(views)
        }
        assert page.tab.evaluate("locusViews.errors") == []
        return found, page.requests, page.errors


@needs_browser
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in dir(view)
        if n in view.__dict__ and callable(getattr(view, n)) and n[0].islower() and n not in ("page", "notebook")
    ],
)
def test_the_page_shows_the_labels_of_each_view(name, views, shown):
    made, words = views[name]
    for word in [made.title, *words]:
        assert word in shown[0][name], word
    assert re.search(r"n = (forget )?\d|Share of each layer", made.caption) and len(made.alt) > 20
    # The drawing has taken the place of the words that stand for it.
    assert made.alt not in shown[0][name]


@needs_browser
def test_the_page_is_quiet(shown):
    _, requests, errors = shown
    assert [r for r in requests if not r.startswith(("data:", "blob:"))] == requests[:1] and len(requests) == 1
    assert errors == []


@needs_browser
def test_thirty_views_of_circuitsvis_on_one_page(running, data, tmp_path):
    """At most 4 MB, drawn within 10 s, the script once."""
    texts = [f"w{i} w90 w33 w4 w5 w6 w7 w8 w9 w10" for i in range(30)]
    made = [view.attention(data["model"], text, scores=data["scores"]["head"]) for text in texts]
    path = tmp_path / "thirty.html"
    path.write_text(view.page(made, title="Thirty"))
    assert path.stat().st_size < 4e6 and path.read_text().count("DecompressionStream") == 1
    with opened(running, path) as page:
        page.drawn(30, seconds=10)
        assert page.tab.locator("canvas").count() == 30 * 13
        assert len(page.requests) == 1 and page.errors == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_a_phone_and_can_be_read(running, views, tmp_path, dark):
    path = tmp_path / "phone.html"
    path.write_text(view.page([views[n][0] for n in ("attention", "grid", "neurons", "circuit")], title="Phone"))
    with opened(running, path, dark=dark, width=390) as page:
        page.drawn(4)
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390
        ground = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = page.tab.evaluate("getComputedStyle(document.querySelector('#view-2 svg text')).fill")
        bright = [sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in (ground, ink)]
        assert abs(bright[0] - bright[1]) > 150
        zoomed = page.tab.locator("#view-1 canvas").last.bounding_box()
        assert zoomed["width"] > 250


@needs_browser
def test_a_notebook_has_the_script_once_and_views_are_pictures_without_it(running, views, tmp_path):
    made = [views[name][0] for name in ("attention", "grid", "neurons")]
    cells = [one._repr_html_() for one in made]
    assert not any("<script" in cell or "http" in re.sub(r'\$schema":"[^"]*', "", cell) for cell in cells)
    assert max(map(len, cells)) < 2e5 < len(view.notebook()._repr_html_()) < 1.1e6
    path = tmp_path / "alone.html"
    path.write_text("<!doctype html><body>" + "".join(cells))
    with opened(running, path) as page:
        assert (
            page.tab.evaluate("[...document.images].map(i => i.naturalWidth > 50 && i.alt.length > 20)") == [True] * 3
        )
        assert page.errors == []
    path.write_text(f"<!doctype html><body>{cells[0]}{cells[1]}{view.notebook()._repr_html_()}<div id=later></div>")
    with opened(running, path) as page:
        page.drawn(2)
        # A cell that is run afterwards.
        page.tab.evaluate("html => { document.getElementById('later').innerHTML = html }", cells[2])
        page.drawn(3)
        assert page.tab.locator("img").count() == 0 and "L0H" in page.text()
        # The script a second time, as when its cell is run again, changes nothing.
        assert page.tab.evaluate("Object.keys(window).filter(k => k.startsWith('locus')).length") == 1
        assert len([r for r in page.requests if not r.startswith(("data:", "blob:"))]) == 1 and page.errors == []


@needs_browser
def test_what_cannot_be_drawn_stays_in_words(running, views, tmp_path):
    class Broken:
        def to_dict(self) -> dict:
            return {"hconcat": 3}

    broken = View("Broken", "n = 1", "These words.", (views["grid"][0].panels[0], Panel(Broken())))
    path = broken.save(tmp_path / "broken.html")
    with opened(running, path) as page:
        page.tab.wait_for_function("window.locusViews && locusViews.errors.length == 1")
        assert "These words." in page.text()


@needs_browser
def test_tokens_that_look_like_html_are_shown(running, tmp_path):
    from locus.view.text import heads_panel, tokens_panel

    words = ["<bos>", "&lt;", "</script>", " a'b\"", "<img src=x onerror=alert(1)>"]
    values = torch.arange(5.0)[None] - 2
    panels = (tokens_panel(["L0N1"], words, values), heads_panel(["L0H0"], np.full((1, 5, 5), 0.2), words))
    made = View("<b>Title</b> & 'quotes'", "n = 1", "words </script>", panels)
    path = made.save(tmp_path / "nasty.html")
    with opened(running, path) as page:
        page.drawn(1)
        text = page.text().replace("\u2060", "").replace("\xa0", " ")
        assert all(word in text for word in words) and made.title in text
        assert page.tab.locator("img").count() == 0 and page.errors == []


# ------------------------------------------------------------------------------------------------ files and errors


@pytest.mark.parametrize("name", ["attention", "attribution", "before_after", "circuit", "study"])
def test_views_save_as_pictures(name, views, tmp_path):
    made = views[name][0]
    starts = {".svg": b"<svg", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    for suffix, start in starts.items():
        assert made.save(tmp_path / f"a{suffix}").read_bytes().startswith(start)
    svg = (tmp_path / "a.svg").read_text()
    assert made.title.split()[0].strip("“”") in svg and "n =" in svg
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pdf", "a.png", "a.svg"]
    with pytest.raises(ValueError, match="a.gif.*end the name in .html"):
        made.save(tmp_path / "a.gif")


def test_errors_name_the_way_out(data, views):
    model, heads = data["model"], data["scores"]["head"]
    with pytest.raises(ValueError, match="name heads"):
        view.attention(model, "w1 w2")
    with pytest.raises(ValueError, match="has no head L9H6: it has 3 layers of 4"):
        view.attention(model, "w1 w2", heads=["L9H6"])
    with pytest.raises(ValueError, match="0 tokens; give 1 to"):
        view.attention(model, "", layers=[0])
    with pytest.raises(ValueError, match="no neuron"):
        view.neurons(model, "w1", heads)
    with pytest.raises(ValueError, match="belong to model other"):
        components = locus.Components(heads.components.items, heads.components.sizes, "other")
        view.attention(model, "w1", scores=Scores(heads.values, components, "x", "y"))
    with pytest.raises(ValueError, match="none of 48 pairs"):
        view.neuron_attributions(model, data["pairs"], ["L0N1"], fact=48)
    with pytest.raises(ValueError, match="3 tokens for 2 positions"):
        view.sweep(torch.zeros(2, 2), ["a", "b", "c"])
    with pytest.raises(ValueError, match="fact must be from 0 to 47 or None, got 48"):
        view.trace(data["traced"], fact=48)
    with pytest.raises(ValueError, match="two masks"):
        view.overlap({"one": data["mask"]})
    with pytest.raises(ValueError, match="0 edges"):
        view.circuit([])
    with pytest.raises(ValueError, match="at least one View, and got no view"):
        view.page([], title="x")
    with pytest.raises(ValueError, match="no finite value"):
        view.sweep(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match="draw a density"):
        view.sweep(torch.zeros(101, 100))


def test_the_library_never_asks_whether_there_is_a_network(monkeypatch, data):
    """CircuitsVis opens google.com whenever one of its elements is shown; our views do not go through that."""
    import urllib.request

    def refuse(*_, **__):
        raise AssertionError("a view asked the network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    made = view.attention(data["model"], "w1 w2", layers=[0])
    assert "AttentionHeads" in made._repr_html_() and "AttentionHeads" in view.page([made], title="x")


# ------------------------------------------------------------------------------------------------ numbers


def rows(chart) -> list[dict]:
    return chart.to_dict()["data"]["values"]


def test_attention_equals_hugging_faces(any_model):
    words = "w1 w5 w7 w1 w60 w9"
    made = view.attention(any_model, words, layers=[0, 2])
    props = made.panels[0].elements[0].props
    assert props["attentionHeadNames"] == [f"L{i}H{j}" for i in (0, 2) for j in range(4)]
    assert props["tokens"] == words.split()
    # The same weights without the bridge, which replaces the attention.
    hf = ARCHITECTURES[any_model.name]().double()
    tokens = torch.tensor([any_model.tokenizer(words)["input_ids"]])
    hf.set_attn_implementation("eager")
    hf.set_experts_implementation("eager")
    with torch.no_grad():
        patterns = hf(tokens, output_attentions=True).attentions
    expected = torch.cat([patterns[0][0], patterns[2][0]])
    torch.testing.assert_close(torch.tensor(props["attention"]).double(), expected.double(), atol=6e-5, rtol=0)
    # The picture has the same numbers.
    here = [r for r in rows(made.panels[0].chart) if r["head"] == "L2H1"]
    assert len(here) == 21
    last = next(r for r in here if r["from"] == "w9 5" and r["to"] == "w5 1")
    assert last["attention"] == pytest.approx(float(expected[5, 5, 1]), abs=1e-5)


def test_heads_are_sorted_by_their_scores(data):
    scores = data["scores"]["head"]
    made = view.attention(data["model"], "w1 w2 w3", scores=scores, top=7)
    names = made.panels[0].elements[0].props["attentionHeadNames"]
    assert names == scores.top(7).component.tolist()
    some = ["L2H0", "L0H2", "L1H1"]
    ordered = view.attention(data["model"], "w1 w2 w3", heads=some, scores=scores)
    names = ordered.panels[0].elements[0].props["attentionHeadNames"]
    assert names == [c for c in scores.top(12).component if c in some]


def test_activations_are_those_of_the_model(llama):
    made = view.neurons(llama, "w1 w5 w7", ["L2N3", "L0N40"])
    with torch.no_grad():
        _, cache = llama.bridge.run_with_cache(torch.tensor([llama.tokenizer("w1 w5 w7")["input_ids"]]))
    for element, (layer, neuron) in zip(made.panels[0].elements, ((2, 3), (0, 40)), strict=True):
        expected = cache[f"blocks.{layer}.mlp.hook_post"][0, :, neuron]
        torch.testing.assert_close(torch.tensor(element.props["values"]).double(), expected.double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_attributions_of_neurons_sum_to_attribution_patching(llama, padding):
    pairs = contrast_pairs(padding=padding)
    labels = ["L0N1", "L1N30", "L2N7"]
    exact = locus.localize(llama, pairs, locus.AttributionPatching(), components="neuron", progress=False)
    for fact in range(3):
        made = view.neuron_attributions(llama, pairs, labels, fact=fact)
        for label, element in zip(labels, made.panels[0].elements, strict=True):
            column = exact.components.labels.index(label)
            assert len(element.props["values"]) == int(pairs.attention_mask[fact].sum())
            assert sum(element.props["values"]) == pytest.approx(float(exact.values[fact, column]), rel=5e-3, abs=1e-6)


def test_attribution_is_the_slope_of_the_metric_in_each_activation(llama):
    """c(a) = d m / d s where s scales the activation, by finite differences."""
    fact = locus.facts.Fact("w1", "r", "w1 w5 w7", "w20 w30")
    made = view.attribution(llama, fact, top=4)
    tokens = torch.tensor([llama.tokenizer("w1 w5 w7 w20")["input_ids"]])
    answer = torch.tensor([llama.tokenizer("w20 w30")["input_ids"]])
    from locus.metrics import Targets

    def metric(name: str, scale) -> float:
        with hooks.edits(llama, [(name, scale)]), torch.no_grad():
            logits = llama.logits(tokens)[:, 2:4]
        return float(log_probability(logits, Targets(answer, answer, torch.ones_like(answer, dtype=torch.bool))))

    def slope(name: str, index) -> float:
        def by(factor: float):
            def scale(activation):
                activation = activation.clone()
                activation[index] *= factor
                return activation

            return scale

        # Hugging Face's norm computes in float32 whatever the weights are, so smaller steps are lost in rounding.
        return (metric(name, by(1 + 3e-3)) - metric(name, by(1 - 3e-3))) / 6e-3

    embeddings = llama.weights["model.embed_tokens.weight"][tokens].detach().requires_grad_()
    log_p = ARCHITECTURES["llama"]().double()(inputs_embeds=embeddings).logits[:, 2:4].log_softmax(-1)
    (gradient,) = torch.autograd.grad(log_p.gather(-1, answer[..., None]).mean(), embeddings)
    expected = (embeddings * gradient).sum(-1)[0].tolist()
    assert made.panels[0].elements[0].props["values"] == pytest.approx(expected, rel=2e-3)
    for panel in made.panels[1:]:
        found = rows(panel.chart)
        assert len(found) == 4 and max(abs(row["attribution"]) for row in found) > 0.02
        for row in found:
            c = locus.Component.parse(row["component"])
            by_steps = slope(site(c), (slice(None), slice(None), c.index))
            assert row["attribution"] == pytest.approx(by_steps, rel=5e-3, abs=1e-4)


@pytest.mark.parametrize("method", ["attribution", "neurons", "attention", "before_after", "neuron_attributions"])
def test_looking_changes_nothing(data, method):
    model, fact = data["model"], data["split"].forget[1]
    before, registered = digest(model), hooks.count(model)
    {
        "attribution": lambda: view.attribution(model, fact),
        "neurons": lambda: view.neurons(model, fact, ["L0N1"]),
        "attention": lambda: view.attention(model, fact, layers=[0]),
        "before_after": lambda: view.before_after(model, data["update"], fact),
        "neuron_attributions": lambda: view.neuron_attributions(
            model, data["pairs"], ["L0N1"], metric=logit_difference
        ),
    }[method]()
    assert digest(model) == before and hooks.count(model) == registered
    assert all(p.requires_grad for p in model.bridge.parameters())


def test_before_and_after_are_the_models_own_probabilities(data):
    model, update, fact = data["model"], data["update"], data["split"].forget[0]
    made = view.before_after(model, update, fact, heads=["L2H1"])
    tokens = torch.tensor([model.tokenizer(fact.prompt)["input_ids"]])

    def next_token():
        with torch.no_grad():
            return model.bridge.original_model(tokens).logits[0, -1].softmax(-1)

    expected = {"before": next_token()}
    with update.applied(model):
        expected["after"] = next_token()
    found = rows(made.panels[0].chart)
    for row in found:
        i = model.tokenizer.convert_tokens_to_ids(row["token"])
        assert row["probability"] == pytest.approx(float(expected[row["state"]][i]), rel=1e-3, abs=1e-6)
    assert {r["token"] for r in found} >= {model.tokenizer.decode([int(p.argmax())]) for p in expected.values()}
    before, after, change = np.array(made.panels[1].elements[0].props["attention"])
    np.testing.assert_allclose(after - before, change, atol=2e-4)
    assert np.abs(change).max() > 1e-3
    own = evaluate(model, data["split"]).values("forget", "probability")[0]
    assert f"P({fact.answer}) {float(own):.3g} →" in made.caption


def test_heads_that_move_most_come_first(data):
    made = view.before_after(data["model"], data["update"], "w1 w90 w5", top=12)
    moved = [float(m) for m in re.findall(r"L\dH\d (\d\.\d+)", made.caption)]
    assert len(moved) == 12 and moved == sorted(moved, reverse=True)
    changes = np.array(made.panels[1].elements[0].props["attention"])[2::3]
    np.testing.assert_allclose(np.abs(changes).sum(-1).mean(-1) / 2, moved, atol=1e-3)


def test_grids_are_symmetric_around_zero_and_hold_the_means(data):
    scores = data["scores"]["head"]
    chart = view.grid(scores).panels[0].chart.to_dict()
    low, high = chart["encoding"]["color"]["scale"]["domain"]
    assert low == -high == pytest.approx(-float(scores.mean().abs().max()), rel=1e-4)
    found = {r["label"]: r["value"] for r in chart["data"]["values"]}
    assert found == {
        label: pytest.approx(v, rel=1e-4)
        for label, v in zip(scores.components.labels, scores.mean().tolist(), strict=True)
    }
    assert {r["label"] for r in rows(view.grid(data["scores"]["mlp"]).panels[0].chart)} == {"L0MLP", "L1MLP", "L2MLP"}


def test_small_scores_keep_their_digits(data):
    scores = Scores.from_array(np.full(12, 1.23456e-9), data["scores"]["head"].components)
    assert {r["value"] for r in rows(view.grid(scores).panels[0].chart)} == {1.2346e-9}
    view.grid(Scores.from_array(np.zeros(12), data["scores"]["head"].components)).picture().to_dict()


def test_density_counts_every_neuron_once(data):
    counts, shares = (rows(panel.chart) for panel in view.density(data["scores"]["neuron"], top=0.1).panels)
    assert sum(r["n"] for r in counts) == 144
    assert sum(r["n"] for r in counts if r["layer"] == 1) == 48
    assert sum(r["share"] for r in shares) == pytest.approx(1, abs=1e-3)
    best = data["scores"]["neuron"].top(14).component
    assert shares[2]["share"] == pytest.approx(sum(c.startswith("L2") for c in best) / 14, abs=1e-4)


def test_overlap_counts_parameters(data):
    neurons = data["model"].components("neuron")
    a = locus.Mask(neurons, torch.arange(144) < 60)
    b = locus.Mask(neurons, (torch.arange(144) >= 40) & (torch.arange(144) < 80))
    found = rows(view.overlap({"a": a, "b": b}).panels[0].chart)
    one = next(r for r in found if (r["a"], r["b"]) == ("a", "b"))
    assert one["jaccard"] == pytest.approx(20 / 80)
    assert one["chance"] == pytest.approx((60 * 40 / 144) / (60 + 40 - 60 * 40 / 144), rel=1e-4)


def test_a_circuit_stands_in_the_order_of_the_computation():
    made = view.circuit({"nodes": ["L3H0"], "edges": [dict(source=a, target=b, score=s) for a, b, s in EDGES]})
    layers = made.panels[0].chart.to_dict()["layer"]
    place = {r["name"]: r["y"] for r in layers[1]["data"]["values"]}
    order = ["input", "L0H1", "L0MLP", "L1H2", "L2MLP", "L3H0", "logits"]
    assert [place[name] for name in order] == sorted(place[name] for name in order) and place["L1H2"] == place["L1H3"]
    assert len(set(place.values())) == 7
    lines = layers[0]["data"]["values"]
    assert {r["edge"] for r in lines} == {f"{a} → {b}" for a, b, _ in EDGES}
    assert [r["size"] for r in lines] == sorted(r["size"] for r in lines)


# ------------------------------------------------------------------------------------------------ result objects


def test_results_say_what_they_are_and_show_a_picture(data):
    from locus.study import Table

    measured = evaluate(data["model"], data["split"])
    study = Table(synthetic_study({"NPO": [0.01, 0.02, 0.03]}))
    results = [*data["scores"].values(), data["mask"], data["update"], measured, study]
    for result in results:
        said = repr(result)
        assert len(said) < 700 and "\n" not in said and "tensor(" not in said, said
        shown = result._repr_mimebundle_()
        assert '<img class="locus-picture"' in shown["text/html"] and shown["text/plain"].startswith("View(")
        assert shown["image/svg+xml"].startswith("<svg") and "</text>" in shown["image/svg+xml"]
    assert "forget (6 facts) probability 0.9" in repr(measured)
    assert "study of synthetic on made up: 3 seeds" in repr(study) and "oracle 0." in repr(study)
    assert type(study[study.seed == 0]).__name__ == "DataFrame" and "<table" in study[study.seed == 0]._repr_html_()


def test_results_with_nothing_to_draw_are_text(data):
    import dataclasses

    from locus.study import Table

    assert dataclasses.replace(data["update"], history=())._repr_mimebundle_() is None
    empty = evaluate(data["model"], data["split"], parts=("other",))
    assert empty._repr_mimebundle_() is None and repr(empty) == "Evaluation of small: "
    nothing = synthetic_study({"NPO": [0.01]}).query("metric == 'utility'")
    assert Table(nothing)._repr_mimebundle_() is None and "<table" in Table(nothing)._repr_html_()


def test_words_survive(data):
    assert _literal("<bos>") == "<\u2060bos>" and _literal("Paris") == "Paris"
    made = view.neurons(data["model"], "w1 w2", ["L0N0"])
    assert json.loads(json.dumps(made.panels[0].elements[0].props))["tokens"] == ["w1", "w2"]


def test_a_trace_of_one_fact_is_its_own(data):
    traced = data["traced"]
    drawn = view.trace(traced, fact=3)
    expected = traced.effect[3][traced.effect[3].isfinite()].tolist()
    cells = drawn.panels[0].chart.to_dict()["data"]["values"]
    assert [cell["value"] for cell in cells] == pytest.approx(expected, rel=1e-3)
    assert traced.facts[3] in drawn.caption and f"m(clean) {float(traced.clean[3]):.3g}" in drawn.caption
