import html
import json
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

from locus import charts
from locus.report import page, report

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
            "masked": {"grid": {"0.001": 0.4, "0.003": 0.625}, "chosen": 0.003, "at edge": True},
            "all": {"grid": {"0.0003": 0.5}, "chosen": 0.0003, "at edge": False},
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
    return [
        json.loads(s) for s in re.findall(r'<script type="application/json" class="spec">(.*?)</script>', text, re.S)
    ]


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
    assert "localizers" in text and '["A()", "B()"]' in text


def test_the_page_asks_nothing_of_the_network(made):
    outside = re.sub(r"<script>.*?</script>", "", made, flags=re.S)  # vega's own code names its homepage in strings
    outside = re.sub(r'"\$schema": ?"[^"]*"', "", outside)
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?:", outside.replace("img-src data: blob:", ""))
    assert "default-src 'none'" in made
    assert made.count("vegaEmbed=") + made.count("vegaEmbed =") == 1


def test_each_chart_has_data_words_and_a_caption(made):
    found = specs(made)
    assert len(found) == 2 + 1 + 1 + 2  # trade-offs, areas, scatter, heat maps
    assert all(layer["data"]["values"] for spec in found for layer in spec.get("layer", [spec]))
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", made, re.S)
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
    assert "original model has 0.000" in figure.caption
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


def test_a_browser_draws_every_chart(tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    path = report(folder(tmp_path, table(), scan(name=NASTY), SETTINGS))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--virtual-time-budget=20000", "--dump-dom"]
    dom = subprocess.run([browser, *flags, path.as_uri()], capture_output=True, text=True, timeout=120).stdout
    assert dom.count("<svg") >= 6 and dom.count('class="mark-rect') >= 2
    assert "located (top)" in dom and "alert(1)</script>" not in dom.split("<main>")[1].split("</main>")[0]
