"""A run folder as one self-contained page: the verdict, the charts, the tables, the settings.

The page asks nothing of the network: the script that draws its charts is written into it once, and its
content security policy forbids all else. Charts are functions of the table; nothing here computes a model.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from locus.charts import (
    ARMS,
    UNEDITED,
    Figure,
    areas,
    differences,
    interval,
    layer_maps,
    layer_scatter,
    paired_seeds,
    place,
    summary,
    tradeoffs,
    unattacked,
    whole_runs,
)
from locus.evaluate import DIRECTION, limits
from locus.folder import write
from locus.sequential import Looks
from locus.verdict import Verdict, contrasts, localization_effect, primary_arm, verdict
from locus.view.show import Panel, View, script, template

# What the table of results shows, and what each column means.
MAIN = {
    "aues": "area under the trade-off: how much is forgotten at each retain strength that is kept; 0 to 1",
    "forget_at_95": "the most that is forgotten while 95% of the retain strength is kept",
    "mu95": "log10 of the best forget quality while 95% of the retain strength is kept",
    "forget_quality": "p-value of a Kolmogorov-Smirnov test: are the truth ratios of the forgotten facts those of a "
    "model that was never taught them? Higher is harder to tell apart",
    "utility": "harmonic mean of probability, extraction strength and 1 - truth ratio on the facts that are kept",
    "drift": "KL(original ‖ edited) per token of other text, in nats",
    "distance_to_retained": "L2 distance of the weights to those of θ_r, the model that was never taught the facts",
    "update_norm": "L2 norm of all changes of the weights",
    "learning_rate": "the rate that tuning chose",
    "n_parameters": "how many parameters may change",
}
STAGES = {
    "pretrained": "θ_p, before all teaching",
    "retain": "θ_r, taught what is kept",
    "none": "θ_o, then taught what is to be forgotten",
}
STRENGTHS = [f"{part}_extraction_strength" for part in ("forget", "retain", "holdout", "other")]


def report(run: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    A table with the arm "oracle" is a controlled study: its page has the true location against random regions seed by
    seed, how well each stage of the teaching knew its facts, the secondary contrasts and what came back under attack.

    run: a folder with table.parquet, and, where there are such, settings.json and layer_scan.parquet
    """
    run = Path(run)
    if not (run / "table.parquet").is_file():
        raise ValueError(
            f"report: {run} holds no table.parquet; expected the folder of a finished study. Run the study "
            "with the same settings to finish it, then make the report again."
        )
    table = _read(run / "table.parquet")
    scan = _read(run / "layer_scan.parquet") if (run / "layer_scan.parquet").is_file() else None
    settings: dict[str, Any] = {}
    if (run / "settings.json").is_file():
        try:
            settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"report: {run / 'settings.json'} is damaged ({error}); delete it or run again.") from None
    text = page(table, scan=scan, settings=settings)
    write(run / "report.html", lambda path: path.write_text(text, encoding="utf-8"))
    return run / "report.html"


def page(table: pd.DataFrame, *, scan: pd.DataFrame | None = None, settings: dict[str, Any] | None = None) -> str:
    """The page as HTML.

    table: tidy rows as of a study
    scan: columns layer, fact, effect, unlearning, or None
    settings: what settings.json holds; `verdict rule` gives the bound and, where seeds were added until it was
        decided, the `looks`; `tuning` the rates tried
    """
    settings = settings or {}
    rule = settings.get("verdict rule") or {}
    judged, sentence = _judge(table, rule)
    everything = whole_runs(table)
    whole = unattacked(everything)
    controlled = primary_arm(table) == "oracle"
    pairs = judged if judged and judged.rows.difference.notna().any() else None
    shown = [metric for metric in MAIN if metric in set(whole.metric)]
    blocks = [(name, value) for name, value in settings.items() if name != "tuning" and isinstance(value, dict)]
    blocks += [("other", rest)] if (rest := {k: v for k, v in settings.items() if not isinstance(v, dict)}) else []
    effect = localization_effect(scan) if scan is not None and len(scan) else None
    return template("report.html.jinja").render(
        title=" · ".join(str(v) for name in ("model", "facts") for v in _values(table, name)) or "empty table",
        seeds=_count(len(_values(table, "seed")), "seed"),
        controlled=controlled,
        sentence=sentence,
        judged=judged,
        verdicts=_verdicts(judged) if judged else None,
        tests=_tests(judged) if judged else None,
        forest=_view(differences(pairs)) if pairs else None,
        paired=_views(paired_seeds(table, pairs)) if pairs else [],
        secondary=_secondary(contrasts(table, metric=pairs.metric)) if pairs else None,
        strengths=_strengths(whole) if controlled else None,
        recovery=_recovery(everything),
        tradeoffs=_views(tradeoffs(table)),
        arms=_views(areas(table)),
        effect=effect,
        predictors=None if effect is None else _predictors(effect.r2),
        scatter=None if effect is None else _view(layer_scatter(scan)),
        heat=[] if effect is None else _views(layer_maps(scan)),
        results=_results(whole, shown),
        meanings=[(name.replace("_", " "), MAIN[name]) for name in shown],
        everything=_results(whole, sorted({m for m in set(whole.metric) - set(MAIN) if "recovery" not in m})),
        statuses=_statuses(whole),
        tuning=_tuning(settings.get("tuning") or {}),
        settings=[(name, [(k, _plain(v)) for k, v in value.items()]) for name, value in blocks],
        script=script(("vega",)),
    )


# A cell is a text, or a text with a smaller one below it; a head a text, or a text with an arrow and its meaning.
Cell = str | tuple[str, str]
Head = str | tuple[str, str, str]


@dataclass(frozen=True)
class Table:
    """A table of the page, its first column the names of the rows; after `words` columns the others are numbers."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[Cell]]
    words: int


def _view(figure: Figure) -> View:
    return View(figure.title, figure.caption, figure.alt, (Panel(figure.chart),))


def _views(figures: Iterable[Figure]) -> list[View]:
    return [_view(figure) for figure in figures]


def _read(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"report: {path} cannot be read ({str(error).splitlines()[0]}); run the study again."
        ) from None


def _judge(table: pd.DataFrame, rule: dict[str, Any]) -> tuple[Verdict | None, str]:
    given: dict[str, Any] = {name: rule[name] for name in ("arm", "control", "min_seeds", "min_draws") if name in rule}
    try:
        if looks := rule.get("looks"):
            given["looks"] = Looks(tuple(looks["at"]), looks["spending"])
        judged = verdict(table, bound=float(rule.get("bound", 0.02)), metric=str(rule.get("metric", "aues")), **given)
    except ValueError as error:
        return None, f"No verdict: {error}"
    return judged, judged.sentence


def _verdicts(judged: Verdict) -> Table:
    heads = ["comparison", "verdict", "difference", "95% interval", "90% interval", "seeds", "above random draws"]
    rows = []
    for name, row in zip(_names(judged), judged.rows.to_dict("records"), strict=True):
        rows.append(
            (
                name,
                Markup('<span class="word {0}">{0}</span>').format(row["verdict"]),
                f"{row['difference']:+.3f}" if math.isfinite(row["difference"]) else "–",
                interval(row["low95"], row["high95"], "+.3f") or "–",
                interval(row["low90"], row["high90"], "+.3f") or "–",
                str(row["n"]),
                f"{row['above']} of {row['of']}",
            )
        )
    return Table(heads, rows, words=2)


def _tests(judged: Verdict) -> Table:
    """P-values beside the levels they were held to, and how many seeds would decide what is undecided."""
    heads = ["comparison", "no difference: p", "some difference: p", "Wilcoxon p", "seeds to decide, if none"]
    heads += ["seeds to decide, if as observed"]
    rows = []
    for name, row in zip(_names(judged), judged.rows.to_dict("records"), strict=True):
        tests = [_test(row[f"p_{word}"], row[f"level_{word}"]) for word in ("equivalent", "different")]
        wilcoxon = f"{row['p_wilcoxon']:.3f}" if math.isfinite(row["p_wilcoxon"]) else "–"
        need = [f"{row[n]:.0f}" if math.isfinite(row[n]) else "–" for n in ("n_if_none", "n_if_observed")]
        rows.append((name, *tests, wilcoxon, *need))
    return Table(heads, rows, words=1)


def _names(judged: Verdict) -> list[str]:
    """Localizer and objective of each comparison, and its budget where there are several."""
    named = [name for name in ("localizer", "objective", "budget") if name in judged.rows]
    named = [name for name in named if name != "budget" or judged.rows.budget.nunique() > 1]
    return [
        " · ".join(str(row[name]) for name in named if row[name] != "") or "–" for row in judged.rows.to_dict("records")
    ]


def _test(p: float, level: float) -> str:
    """A p-value beside the level that it had to be below, after Holm's method and the looks."""
    return f"{p:.2g} {'<' if p < level else '≥'} {level:.2g}" if math.isfinite(p) else "–"


def _secondary(rows: pd.DataFrame) -> Table | None:
    """Secondary contrasts as words: what minus what, in which metric, and the difference with its interval."""
    named = [name for name in ("localizer", "objective", "attack") if name in rows]
    heads = ["contrast", " · ".join(named), "metric", "difference", "95% interval", "seeds", "draws"]
    found = [
        (
            f"{ARMS.get(row['arm'], row['arm'])} − {ARMS.get(row['control'], row['control'])}",
            " · ".join(str(row[name]) for name in named if row[name]),
            " ".join(_head(row["metric"])[:2]).strip(),
            f"{row['difference']:+.3f}",
            interval(row["low95"], row["high95"], "+.3f") or "–",
            str(row["n"]),
            str(row["draws"]),
        )
        for row in rows.to_dict("records")
    ]
    return Table(heads, found, words=3) if found else None


def _strengths(whole: pd.DataFrame) -> dict[str, Any] | None:
    """How well θ_p, θ_r and θ_o know each part of the facts, and what planting cost: θ_r − θ_o of the same seed."""
    rows = whole[whole.arm.isin(STAGES) & whole.metric.isin(STRENGTHS)]
    wide = rows.pivot_table(index="seed", columns=["arm", "metric"], values="value")
    stages = [(name, wide[arm], (0.0, 1.0)) for arm, name in STAGES.items() if arm in wide]
    if not stages:
        return None
    if {"retain", "none"} <= set(rows.arm):
        stages.append(("θ_r − θ_o", wide["retain"] - wide["none"], (-1.0, 1.0)))
    metrics = [m for m in STRENGTHS if m in set(rows.metric)]
    lines = [
        (name, *(_cell(summary(found[m], within)) if m in found else "–" for m in metrics))
        for name, found, within in stages
    ]
    heads = ["stage", *(m.removesuffix("_extraction_strength") for m in metrics)]
    return {"n": len(wide), "table": Table(heads, lines, words=1)}


def _predictors(r2: pd.DataFrame) -> Table:
    rows = [
        ({"both": "layer × effect"}.get(str(row[0]), str(row[0])), *(f"{value:.3f}" for value in row[1:]))
        for row in r2.itertuples()
    ]
    return Table(["predictor", "R²", "adjusted R²", "R² on facts not fitted"], rows, words=1)


def _recovery(whole: pd.DataFrame) -> Table | None:
    """What came back under attack, by arm and attack."""
    attacked = whole[(whole.attack != "") | whole.metric.str.startswith("recovery")]
    metrics = sorted(set(attacked.metric), key=lambda m: (not m.startswith("recovery"), m))
    return _results(attacked, metrics, by=("attack",))


def _results(whole: pd.DataFrame, metrics: list[str], *, by: tuple[str, ...] = ()) -> Table | None:
    """Mean and 95% interval over the seeds (draws averaged within a seed first), one arm a row."""
    rows = whole[whole.metric.isin(metrics)]
    if rows.empty:
        return None
    key = ["arm", "localizer", "objective", *by]
    seeds = rows.groupby([*key, "seed", "metric"], sort=False).value.mean().reset_index()
    found = seeds.groupby([*key, "metric"], sort=False).value
    cells = {where: summary(values, limits(str(where[-1]))) for where, values in found}
    draws = rows.groupby(key, sort=False).draw.nunique().to_dict()
    named = [i for i, name in enumerate(key) if name == "arm" or (rows[name] != "").any()]
    lines: list[list[Cell]] = []
    for where in sorted(draws, key=lambda k: (k[2], *k[3:], k[1], place(k[0]))):
        own = {metric: cells.get((*where, metric)) for metric in metrics}
        n = max((cell[0] for cell in own.values() if cell), default=0)
        words = [ARMS.get(where[0], where[0]), *(name or "–" for name in where[1:])]
        lines.append([*(words[i] for i in named), str(n), str(draws[where]), *(_cell(own[m], m) for m in metrics)])
    return Table([*(key[i] for i in named), "seeds", "draws", *map(_head, metrics)], lines, words=len(named))


def _head(metric: str) -> tuple[str, str, str]:
    """A metric's name, an arrow and words for its better direction."""
    words = {"higher": ("↑", "higher is better"), "lower": ("↓", "lower is better")}
    return metric.replace("_", " "), *words.get(DIRECTION.get(metric, ""), ("", "no better direction"))


def _cell(cell: tuple[int, float, float, float] | None, metric: str = "") -> Cell:
    """A mean over its interval, with as many decimals as its neighbors unless nothing were left of it."""
    if cell is None or not cell[0]:
        return "–"
    _, mean, low, high = cell
    small = 0 < abs(mean) < (0.1 if metric == "learning_rate" else 0.0005)
    shape = ",.0f" if abs(mean) >= 1000 else ".3g" if small else ".3f"
    return f"{mean:{shape}}", "" if math.isclose(low, high, rel_tol=1e-9) else interval(low, high, shape)


def _statuses(whole: pd.DataFrame) -> dict[str, Any] | None:
    """How many runs ended how, by arm."""
    runs = whole[~whole.arm.isin(UNEDITED)].drop_duplicates(["objective", "localizer", "arm", "seed", "draw"])
    runs = runs.assign(status=runs.status.where(runs.status != "", "unknown"))
    if runs.empty:
        return None
    counts = runs.groupby(["arm", "status"]).size().unstack(fill_value=0)
    counts = counts.reindex([arm for arm in [*ARMS, *counts.index.difference(list(ARMS))] if arm in counts.index])
    bad = int((runs.status != "finished").sum())
    rows = [(str(ARMS.get(arm, arm)), *map(str, row)) for arm, row in zip(counts.index, counts.to_numpy(), strict=True)]
    return {
        "sentence": f"{bad} of {len(runs)} runs did not simply finish." if bad else f"All {len(runs)} runs finished.",
        "table": Table(["arm", *counts.columns], rows, words=1),
    }


def _tuning(tuning: dict[str, Any]) -> Table | None:
    """Every rate tried with its AUES, by objective and type of arm, and the chosen one."""
    rows = []
    for objective, kinds in tuning.items():
        for kind, found in kinds.items() if isinstance(kinds, dict) else ():
            grid = found.get("mean AUES by rate", {}) if isinstance(found, dict) else {}
            chosen = found.get("chosen") if isinstance(found, dict) else None
            tried = [
                f"{float(rate):.3g}: {f'{value:.3f}' if isinstance(value, float) else value}"
                + " (chosen)" * (chosen is not None and math.isclose(float(rate), chosen, rel_tol=1e-4))
                for rate, value in grid.items()
            ]
            edge = "best at the edge of the grid" if found.get("at the edge") else ""
            rows.append((str(objective), str(kind), " · ".join(tried), edge))
    return Table(["objective", "type of arm", "rate: AUES", "note"], rows, words=4) if rows else None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}" if n else ""


def _values(table: pd.DataFrame, name: str) -> list[Any]:
    return table[name].dropna().unique().tolist() if name in table.columns else []


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
