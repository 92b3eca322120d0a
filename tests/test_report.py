import csv
import html
import json
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from browser import CHROMIUM, browser, opened
from synthetic import standard, synthetic_study

from locus import charts
from locus.report import page, report
from locus.verdict import verdict

NASTY = "</script><script>alert(1)</script> & “x”"


def table(n_seeds: int = 3, draws: int = 6, steps: int = 8, localizers=("A", "B"), objectives=("NPO",)):
    rng = np.random.default_rng(0)
    rows = []

    def run(localizer: str, arm: str, objective: str, seed: int, draw: int, area: float):
        head = dict(model="tiny", facts="biographies", localizer=localizer, arm=arm, kind="neuron", budget=0.05)
        head |= dict(objective=objective, seed=seed, draw=draw, status="finished")
        for step in range(steps if arm != "none" else 1):
            rows.append(head | dict(step=step, metric="forget_strength", value=1 - 0.7**step))
            rows.append(head | dict(step=step, metric="retain_strength", value=0.9 - 0.01 * step**2 * (1.6 - area)))
        numbers = dict(aues=area, drift=0.25, update_norm=1.5, n_parameters=12345, learning_rate=0.003)
        for metric, value in (numbers | dict(forget_probability=0.125, forget_quality=np.nan)).items():
            rows.append(head | dict(step=-1, metric=metric, value=value))

    for seed in range(n_seeds):
        run("", "none", "", seed, 0, 0.0)
        for objective in objectives:
            run("", "kind", objective, seed, 0, 0.5)
            run("", "all", objective, seed, 0, 0.45)
            for localizer in localizers:
                run(localizer, "top", objective, seed, 0, 0.6)
                run(localizer, "bottom", objective, seed, 0, 0.4)
                for draw in range(draws):
                    run(localizer, "random", objective, seed, draw, 0.6 + 0.01 * rng.normal())
    return pd.DataFrame(rows)


def scan(n_facts: int = 9, n_layers: int = 5, name: str = "fact"):
    rng = np.random.default_rng(1)
    rows = [
        (layer, f"{name} {i}", rng.normal(), layer + rng.normal()) for i in range(n_facts) for layer in range(n_layers)
    ]
    return pd.DataFrame(rows, columns=["layer", "fact", "effect", "unlearning"])


SETTINGS = {
    "settings": {"model": "tiny", "budget": 0.05, "localizers": ["A()", "B()"]},
    "verdict rule": {"bound": 0.04, "metric": "aues"},
    "tuning": {
        "NPO": {
            "masked": {"mean AUES by rate": {"0.001": 0.4, "0.003": 0.625}, "chosen": 0.003, "at the edge": True},
            "all": {"mean AUES by rate": {"0.0003": 0.5}, "chosen": 0.0003, "at the edge": False},
        }
    },
}


def folder(path, frame, scanned=None, settings=None):
    frame.to_parquet(path / "table.parquet")
    if scanned is not None:
        scanned.to_parquet(path / "layer_scan.parquet")
    if settings is not None:
        (path / "settings.json").write_text(json.dumps(settings))
    return path


def words(text: str) -> str:
    """What a reader sees, without scripts and styles."""
    text = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", text, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))


def specs(text: str) -> list[dict]:
    return [json.loads(html.unescape(s)) for s in re.findall(r"data-panel='(.*?)'", text, re.S)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> str:
    out = folder(tmp_path_factory.mktemp("run"), table(), scan(), SETTINGS)
    path = report(out)
    assert path == out / "report.html" and path.stat().st_size < 6e6
    assert sorted(p.name for p in out.iterdir()) == [
        "layer_scan.parquet",
        "report.html",
        "settings.json",
        "table.parquet",
    ]
    return path.read_text(encoding="utf-8")


def test_the_page_says_what_the_study_found(made):
    text = words(made)
    assert text.index("Editing the located components against random ones") < text.index("Forgetting against keeping")
    assert "is equivalent within ± 0.04" in text  # the bound that the study fixed beforehand
    assert "Spearman correlation of" in text and "adjusted R²" in text
    assert "All 54 runs finished" in text
    assert "0.001: 0.400 · 0.003: 0.625 (chosen)" in text and "best at the edge of the grid" in text
    assert "12,345" in text and "update norm" in text
    assert re.search(r"drift ↓ lower is better", text) and re.search(r"aues ↑ higher is better", text)
    assert "forget probability ↓ lower is better" in text and "update norm no better direction" in text
    assert "KL(original ‖ edited) per token" in text and "mu95" not in text  # the columns that there are, explained
    assert "localizers" in text and '["A()", "B()"]' in text


def test_the_page_asks_nothing_of_the_network(made):
    outside = re.sub(r"<script>.*?</script>", "", made, flags=re.S)
    outside = re.sub(r'"\$schema": ?"[^"]*"', "", outside)
    outside = outside.replace("img-src data: blob:", "").replace('href="#', "")
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?:", outside)
    assert "default-src 'none'" in made
    assert made.count("DecompressionStream") == 1 and made.count("<script>") == 2


def test_each_chart_has_data_words_and_a_caption(made):
    found = specs(made)
    assert len(found) == 1 + 2 + 2 + 1 + 1 + 2  # differences, seeds, trade-offs, areas, scatter, heat maps
    assert all(layer["data"]["values"] for spec in found for layer in spec.get("layer", [spec]))
    captions = re.findall(r"<figcaption.*?>(.*?)</figcaption>", made, re.S)
    assert len(captions) == len(found)
    assert all("n = " in c and "seed" in c and "interval" in c for c in captions)
    assert made.count('role="img" aria-label="') == len(found)


def test_curves_are_means_over_seeds():
    frame = table(n_seeds=2)
    spare = (frame.arm == "top") & (frame.step == 2) & (frame.metric == "forget_strength")
    frame.loc[spare & (frame.seed == 0), "value"] = 0.2
    frame.loc[spare & (frame.seed == 1), "value"] = 0.4
    # A run that ends early takes the end of its line with it, not the mean of the other seed.
    frame = frame[~((frame.arm == "bottom") & (frame.step > 4) & (frame.seed == 1))]
    figure = next(charts.tradeoffs(frame))
    random, arms, original = (layer["data"]["values"] for layer in figure.chart.to_dict()["layer"])
    point = next(row for row in arms if row["line"] == "top0" and row["step"] == 2)
    assert point["forget_strength"] == pytest.approx(0.3) and point["seeds"] == 2
    assert max(row["step"] for row in arms if row["line"] == "bottom0") == 4
    assert {row["draw"] for row in random} == set(range(6)) and len(original) == 1


def test_areas_show_the_interval_over_seeds():
    frame = table(n_seeds=3)
    where = (frame.arm == "top") & (frame.metric == "aues") & (frame.localizer == "A")
    frame.loc[where, "value"] = [0.5, 0.6, 0.7]
    figure = next(charts.areas(frame))
    bars = figure.chart.to_dict()["layer"][1]["data"]["values"]
    top = next(row for row in bars if row["row"] == "A: located (top)")
    assert (top["low"], top["high"]) == (
        pytest.approx(0.6 - 4.3027 * 0.1 / 3**0.5, abs=1e-4),
        pytest.approx(0.848414, abs=1e-4),
    )
    assert "before unlearning has 0.000" in figure.caption
    assert charts.summary(pd.Series([0.5, 0.7, np.nan]))[:2] == (2, pytest.approx(0.6))


def test_names_are_escaped():
    frame = table().assign(model=NASTY, facts=NASTY).replace({"localizer": {"A": NASTY}, "objective": {"NPO": NASTY}})
    frame.loc[frame.arm == "bottom", "status"] = NASTY
    text = page(frame, scan=scan(name=NASTY), settings={"settings": {NASTY: NASTY}, NASTY: 3, "tuning": {NASTY: {}}})
    assert "<script>alert" not in text and NASTY in words(text)
    assert any(NASTY in json.dumps(spec, ensure_ascii=False) for spec in specs(text))


@pytest.mark.parametrize(
    "frame, expected",
    [
        (table().iloc[:0], "No verdict"),
        (table()[lambda t: t.arm == "top"], "No verdict: verdict compares arm 'top' with 'random'"),
        (table()[lambda t: t.step >= 0], "No verdict"),
        (table()[lambda t: t.step == -1], "holds no trajectory"),
        (table().assign(value=np.nan), "no complete pair of runs"),
        (table(n_seeds=1), "descriptive: too few seeds"),
        (table(draws=3), "descriptive: too few draws"),
        (table().drop(columns=["status", "model", "budget", "facts", "kind"]), "is equivalent"),
        (table().replace({"status": {"finished": "diverged"}}), "54 of 54 runs did not simply finish"),
    ],
    ids=[
        "empty",
        "one arm",
        "no runs",
        "no curves",
        "nan",
        "one seed",
        "few draws",
        "few columns",
        "diverged",
    ],
)
def test_little_or_broken_tables_still_make_a_page(frame, expected):
    text = page(frame)
    assert expected in words(text)
    assert "no scan of single layers" in words(text) and "No settings.json" in words(text)


def test_a_scan_with_holes():
    frame = scan()
    frame.loc[0, "effect"], frame.loc[1, "unlearning"] = np.nan, np.inf
    assert "2 left out" in words(page(table(), scan=frame))
    assert "no scan" in words(page(table(), scan=frame.iloc[:0]))
    assert "Too few" in words(page(table(), scan=frame.assign(unlearning=0.5)))


def test_folders_that_are_no_study(tmp_path):
    with pytest.raises(ValueError, match="no table.parquet; expected the folder of a finished study"):
        report(tmp_path)
    (tmp_path / "table.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot be read"):
        report(tmp_path)
    folder(tmp_path, table())
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="settings.json is damaged"):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()


# ------------------------------------------------------------------------------------------------ controlled


CONTROLLED = {"NPO": standard(0.05, 0.02, 8), "WGA": standard(0.0, 0.01, 8)}
RULE = {
    "settings": {"model": "synthetic"},
    "verdict rule": {"bound": 0.03, "looks": {"at": [4, 8, 12], "spending": "obrien-fleming"}},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict:
    """A report of each kind of study, and how many figures it has."""
    compared, planted = tmp_path_factory.mktemp("compared"), tmp_path_factory.mktemp("planted")
    return {
        "compared": (report(folder(compared, table(), scan(name=NASTY), SETTINGS)), 9),
        "controlled": (report(folder(planted, synthetic_study(CONTROLLED), settings=RULE)), 11),
    }


@pytest.fixture(scope="module")
def controlled(reports) -> str:
    return reports["controlled"][0].read_text(encoding="utf-8")


def test_the_page_of_a_controlled_study(controlled):
    text = words(controlled)
    assert "Does the true location help?" in text and "single layers" not in text
    assert "Editing the true location (oracle) against random regions of the same size apart from it: NPO" in text
    assert "is equivalent within ± 0.03" in text and "NPO is better" in text
    assert "After 8 of at most 12 seeds (look 2 of 3; tests and intervals are corrected for the looks) all is" in text
    assert "corrected for the looks" in text and "looks at 4, 8, 12 seeds (obrien-fleming spending" in text
    assert re.search(r"no difference: p some difference: p .* NPO \S+ ≥ \S+ \S+ < \S+", text)
    assert "Other contrasts" in text and "true location (oracle) − set back (revert)" in text
    assert "located (top) − true location (oracle) A · WGA aues ↑" in text
    found = specs(controlled)
    # A forest of the differences, seeds and areas of each objective, and trade-offs: without and with each localizer.
    assert len(found) == 1 + 2 + 2 + 2 * 3
    assert all(layer["data"]["values"] for spec in found for layer in spec["layer"])
    captions = re.findall(r"<figcaption.*?>(.*?)</figcaption>", controlled, re.S)
    assert len(captions) == len(found) and all("n = " in c and "seed" in c and "interval" in c for c in captions)


def test_what_each_stage_knew(controlled):
    text = words(controlled)
    # θ_r holds 0.98 of the holdout and θ_o 0.90 to 0.97: planting cost 0.045 on average over eight seeds.
    half = 2.3646 * np.std(0.01 * np.arange(8), ddof=1) / 8**0.5
    cost = f"θ_r − θ_o -0.850 0.045 [{0.045 - half:.3f}, {0.045 + half:.3f}]"
    assert "stage forget holdout" in text and cost in text
    assert "θ_p, before all teaching 0.100 0.100" in text
    some = synthetic_study(CONTROLLED, localizers=())
    some = words(page(some[some.arm != "pretrained"]))
    assert "θ_r, taught what is kept" in some and "θ_p, before" not in some
    none = synthetic_study(CONTROLLED, localizers=())
    assert "at each stage" not in words(page(none[~none.metric.str.endswith("extraction_strength")]))


def test_what_came_back(controlled):
    text = words(controlled)
    assert "What came back under attack" in text
    start = text.index("What came back under attack")
    start = text.index("What came back under attack", start + 1)  # after the contents
    rows = text[start : text.index("Results", start)]
    assert "recovery best" in rows and rows.index("recovery best") < rows.index("attacked best")
    assert "true location (oracle) NPO any 8 1 0.335 [0.315, 0.355]" in rows
    assert "random, same size NPO full 8 1 0.200" in rows and "never taught them (θ_r) – lora 8 1 – – 0.200" in rows
    assert "What came back" not in words(page(synthetic_study(CONTROLLED, attacks=(), localizers=())))
    # An attack's own steps are no part of the trade-off.
    lines = next(charts.tradeoffs(synthetic_study(CONTROLLED))).chart.to_dict()["layer"][1]["data"]["values"]
    oracle = next(row for row in lines if row["line"] == "oracle0" and row["step"] == 2)
    assert oracle["forget_strength"] == pytest.approx(1 - 0.6**2)


def test_a_table_that_was_written_as_csv_is_drawn_alike(tmp_path):
    frame = synthetic_study({"NPO": standard(0.03, 0.01, 4)})
    frame.to_csv(tmp_path / "table.csv", index=False)
    read = pd.read_csv(tmp_path / "table.csv")
    for drawn in (charts.areas, charts.tradeoffs):
        pairs = zip(drawn(read), drawn(frame), strict=True)
        assert all((a.title, a.caption, a.alt) == (b.title, b.caption, b.alt) for a, b in pairs)
    assert words(page(read)) == words(page(frame)) and "nan" not in words(page(read))


def test_seeds_are_paired_with_their_own_draws():
    frame = synthetic_study(CONTROLLED)
    judged = verdict(frame)
    figures = list(charts.paired_seeds(frame, judged))
    assert [figure.title for figure in figures] == ["Seed by seed, NPO", "Seed by seed, WGA"]
    draws, lines, points = (layer["data"]["values"] for layer in figures[0].chart.to_dict()["layer"])
    assert len(draws) == 8 * 3 and len(points) == 8 * 2
    assert [line["difference"] for line in lines] == pytest.approx(CONTROLLED["NPO"], abs=2e-5)
    assert "mean difference +0.050" in figures[0].caption and "3 random draws" in figures[0].caption
    above = (CONTROLLED["WGA"] > 0).sum()
    assert f"{above} of 8 seeds are above" in figures[1].caption
    forest = charts.differences(judged).chart.to_dict()
    ends = forest["layer"][0]["data"]["values"][0]
    assert (ends["low"], ends["high"]) == (-0.02, 0.02)
    row = forest["layer"][2]["data"]["values"][1]
    assert row["row"] == "WGA" and row["low95"] == pytest.approx(judged.rows.low95[1], abs=1e-5)


@pytest.mark.parametrize(
    "frame, expected",
    [
        (
            synthetic_study(CONTROLLED, localizers=()).query("arm == 'oracle'"),
            "No verdict: verdict compares arm 'oracle'",
        ),
        (synthetic_study({"NPO": [0.1]}), "descriptive: too few seeds"),
        (synthetic_study(CONTROLLED, localizers=()).assign(value=np.nan), "no complete pair of runs"),
        (synthetic_study(CONTROLLED, localizers=()).query("step >= 0"), "No verdict"),
        (synthetic_study(CONTROLLED, localizers=()).query("step == -1"), "holds no trajectory"),
        (
            synthetic_study(CONTROLLED, localizers=())
            .drop(columns=["attack", "status", "kind"])
            .query("metric == 'aues'"),
            "NPO is",
        ),
        (synthetic_study({"NPO": standard(0.0, 0.03, 4), "WGA": [0.0]}), "WGA is"),
    ],
    ids=["one arm", "one seed", "nan", "no runs", "no curves", "few columns", "an objective behind"],
)
def test_little_or_broken_controlled_tables_still_make_a_page(frame, expected):
    assert expected in words(page(frame))


def test_a_plan_of_looks_that_the_table_has_passed():
    rule = {"verdict rule": {"looks": {"at": [4, 6], "spending": "pocock"}}}
    assert "No verdict: Looks were planned at (4, 6) seeds" in words(
        page(synthetic_study(CONTROLLED, localizers=()), settings=rule)
    )


def test_a_rate_is_marked_however_it_was_written():
    found = {"mean AUES by rate": {"0.00012": 0.5}, "chosen": 0.00012 - 1e-20, "at the edge": False}
    assert "0.00012: 0.500 (chosen)" in words(page(table(), settings={"tuning": {"NPO": {"all": found}}}))


# ------------------------------------------------------------------------------------------------ in the browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as in Debian's package chromium")


@pytest.fixture(scope="module")
def running():
    with browser() as started:
        yield started


KINDS = pytest.mark.parametrize("study", ["compared", "controlled"])
CONTRAST = """(() => {
  const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
  };
  const words = "p, h1, h2, h3, th, td, small, dt, a, button, summary, .word, figcaption, svg text";
  const shown = (node) => node.checkVisibility() && node.textContent.trim();
  return Math.min(...[...document.querySelectorAll(words)].filter(shown).map((node) => {
    const style = getComputedStyle(node), ink = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()"""


@needs_browser
@KINDS
@pytest.mark.parametrize("dark, width", [(False, 1280), (True, 390)])
def test_every_figure_is_drawn_and_the_page_is_quiet(running, reports, study, dark, width):
    path, n = reports[study]
    assert path.stat().st_size < 6e6
    with opened(running, path, dark=dark, width=width) as shown:
        shown.drawn(n)
        assert shown.tab.evaluate("locusViews.errors") == [] == shown.errors
        assert [r for r in shown.requests if not r.startswith(("data:", "blob:"))] == [path.as_uri()]
        figures = shown.tab.locator("figure [role=img][aria-label] svg")
        assert figures.count() == n and min(f.bounding_box()["width"] for f in figures.all()) > 250
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= width
        assert shown.tab.evaluate(CONTRAST) > 4.5
        ground = shown.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 150) == dark
        text = shown.text()
        assert "located (top)" in text and "retain strength (higher is better)" in text and "seed" in text
        # The words that stand for a figure have made way for it, and names are text.
        assert shown.tab.locator(".locus-picture").count() == 0 and shown.tab.locator("main script").count() == 0
        assert (NASTY in shown.tab.content().replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")) == (
            study == "compared"
        )


@needs_browser
@KINDS
def test_the_contents_lead_to_every_section(running, reports, study):
    path, n = reports[study]
    with opened(running, path) as shown:
        shown.drawn(n)
        links = shown.tab.locator("nav a")
        assert links.count() == 1 + shown.tab.locator("main > section").count() >= 7
        for link in links.all():
            shown.tab.locator(link.get_attribute("href")).wait_for(state="visible")
        assert links.nth(1).inner_text() == shown.tab.locator("main h2").first.inner_text()


@needs_browser
def test_a_click_sorts_a_table_by_its_numbers(running, reports):
    path, _ = reports["controlled"]
    with opened(running, path) as shown:
        results = shown.tab.get_by_role("region", name="Results by arm")

        def column(name: str) -> list[str]:
            heads = results.locator("thead th").evaluate_all("all => all.map(th => th.textContent)")
            (at,) = [i for i, head in enumerate(heads) if head.startswith(name)]
            cells = results.locator(f"tbody tr > :nth-child({at + 1})")
            return cells.evaluate_all("all => all.map(cell => cell.firstChild.textContent.trim())")

        before = column("mu95 ↑")
        assert before != sorted(before, key=float)
        for turn in (1, -1):
            results.get_by_role("button", name="mu95").click()
            assert column("mu95 ↑") == sorted(before, key=lambda x: turn * float(x))
        assert results.locator("[aria-sort=descending]").inner_text().startswith("mu95 ↑")
        results.get_by_role("button", name="arm").press("Enter")
        assert column("arm") == sorted(column("arm"), key=str.lower) and results.locator("[aria-sort]").count() == 1
        # What is missing comes last, whichever way.
        attacks = shown.tab.get_by_role("region", name="Recovery by arm and attack")
        for _ in range(2):
            attacks.get_by_role("button", name="recovery best").click()
            assert attacks.locator("tbody tr").last.locator("td").nth(4).inner_text() == "–"


@needs_browser
def test_figures_download_as_svg_and_their_data_as_csv(running, reports, tmp_path):
    path, n = reports["compared"]
    with opened(running, path, dark=True, width=390) as shown:
        shown.drawn(n)

        def saved(title: str, kind: str) -> str:
            with shown.tab.expect_download() as waiting:
                shown.tab.get_by_role("figure", name=title, exact=True).get_by_role("button", name=kind).click()
            name = waiting.value.suggested_filename
            waiting.value.save_as(tmp_path / name)
            return (tmp_path / name).read_text(encoding="utf-8"), name

        assert shown.tab.get_by_role("button", name="Picture of").count() == n
        text, name = saved("Trade-off, A · NPO", "Picture")
        assert name == "trade-off-a-npo.svg"
        root = ElementTree.fromstring(text)
        inside = "".join(root.itertext())
        assert root.tag.endswith("}svg") and "tiny · biographies" in inside and "n = 3 seeds" in inside
        # It stands alone: dark on white, also when it was made in the dark.
        assert "currentColor" not in text and 'fill="white"' in text and "#1c1c1e" in text
        text, name = saved("Trade-off, A · NPO", "Data")
        rows = list(csv.DictReader(text.splitlines()))
        drawn = specs(path.read_text(encoding="utf-8"))[3]["layer"]
        assert name == "trade-off-a-npo.csv" and len(rows) == sum(len(layer["data"]["values"]) for layer in drawn)
        assert {row["table"] for row in rows} == {"random draws", "arms", "not edited"}
        top = [row for row in rows if row["arm_name"] == "located (top)" and row["step"] == "2"]
        assert [float(row["forget_strength"]) for row in top] == [pytest.approx(1 - 0.7**2)]
        text, _ = saved("Causal effect by patching", "Data")
        rows = list(csv.DictReader(text.splitlines()))
        assert len(rows) == 45 and rows[0]["fact"] == f"{NASTY} 0"
        assert float(rows[0]["effect"]) == pytest.approx(scan().effect[0], rel=1e-4)
        assert shown.errors == []


@needs_browser
def test_the_page_follows_a_change_to_the_dark_and_prints_on_white(running, reports, tmp_path):
    path, n = reports["controlled"]
    with opened(running, path, dark=True) as shown:
        shown.drawn(n)
        label = "getComputedStyle(document.querySelector('figure svg text')).fill"
        assert shown.tab.evaluate(label) == "rgb(236, 236, 240)"
        shown.tab.emulate_media(media="print")
        assert shown.tab.evaluate(label) == "rgb(28, 28, 30)" and shown.tab.evaluate(CONTRAST) > 4.5
        assert not shown.tab.locator("nav").is_visible() and not shown.tab.locator(".locus-save").first.is_visible()
        assert len(shown.tab.pdf(format="A4")) > 1e5
        shown.tab.emulate_media(media="screen", color_scheme="light")
        assert shown.tab.evaluate(label) == "rgb(28, 28, 30)"


@needs_browser
def test_a_point_says_its_numbers_when_it_is_hovered(running, reports):
    path, n = reports["compared"]
    with opened(running, path) as shown:
        shown.drawn(n)
        shown.tab.locator("figure .mark-symbol path").first.hover()
        tip = shown.tab.locator("#vg-tooltip-element.visible").inner_text()
        assert "difference" in tip and "low95" in tip
