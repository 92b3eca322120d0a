"""A run folder as one self-contained page: the verdict, the charts, the table, the settings.

The page asks nothing of the network: the scripts that draw its charts are written into it once, and its
content security policy forbids all else. Charts are functions of the table; nothing here computes a model.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import pandas as pd
import vl_convert
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

MAIN = [
    *("aues", "forget_at_95", "mu95", "forget_quality", "utility", "drift", "distance_to_retained"),
    *("distance_to_planted", "update_norm", "learning_rate", "n_parameters"),
]
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
    pairs = judged if controlled and judged and judged.rows.difference.notna().any() else None
    blocks = [(name, value) for name, value in settings.items() if name != "tuning" and isinstance(value, dict)]
    blocks += [("other", rest)] if (rest := {k: v for k, v in settings.items() if not isinstance(v, dict)}) else []
    effect = localization_effect(scan) if scan is not None and len(scan) else None
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["spec"] = _spec
    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=" · ".join(str(v) for name in ("model", "facts") for v in _values(table, name)) or "empty table",
        controlled=controlled,
        sentence=sentence,
        judged=judged,
        verdicts=_verdict_rows(judged) if judged else [],
        paired=[differences(pairs), *paired_seeds(table, pairs)] if pairs else [],
        secondary=_secondary(contrasts(table, metric=pairs.metric)) if pairs else [],
        strengths=_strengths(whole) if controlled else {},
        recovery=_recovery(everything),
        tradeoffs=[*tradeoffs(table)],
        arms=[*areas(table)],
        effect=effect,
        effect_rows=[] if effect is None else list(effect.r2.round(3).itertuples()),
        scatter=None if effect is None else layer_scatter(scan),
        heat=[] if effect is None else layer_maps(scan),
        results=_results(whole, [m for m in MAIN if m in set(whole.metric)]),
        everything=_results(whole, sorted({m for m in set(whole.metric) - set(MAIN) if "recovery" not in m})),
        statuses=_statuses(whole),
        tuning=_tuning(settings.get("tuning") or {}),
        settings=[(name, [(k, _plain(v)) for k, v in value.items()]) for name, value in blocks],
        script=_script(),
    )


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


def _verdict_rows(judged: Verdict) -> list[dict[str, Any]]:
    rows = []
    for row in judged.rows.to_dict("records"):
        wilcoxon = row["p_wilcoxon"]
        need = [row["n_if_none"], row["n_if_observed"]]
        rows.append(
            {
                "what": " · ".join(
                    str(row[name]) for name in ("localizer", "objective", "budget") if name in row and row[name] != ""
                ),
                "verdict": row["verdict"],
                "difference": f"{row['difference']:+.3f}" if math.isfinite(row["difference"]) else "–",
                "interval90": interval(row["low90"], row["high90"], "+.3f"),
                "interval95": interval(row["low95"], row["high95"], "+.3f"),
                "n": row["n"],
                "tests": [
                    _test(name, row[f"p_{column}"], row[f"level_{column}"])
                    for name, column in (("none", "equivalent"), ("some", "different"))
                ],
                "rank": f"above {row['above']} of {row['of']}",
                "wilcoxon": f"{wilcoxon:.3f}" if math.isfinite(wilcoxon) else "–",
                "need": " / ".join(f"{n:.0f}" for n in need) if all(map(math.isfinite, need)) else "–",
            }
        )
    return rows


def _test(name: str, p: float, level: float) -> str:
    """A p-value beside the level that it had to be below, after Holm's method and the looks."""
    return f"{name}: {p:.2g} {'<' if p < level else '≥'} {level:.2g}" if math.isfinite(p) else ""


def _secondary(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Secondary contrasts as words: what minus what, in which metric, and the difference with its interval."""
    named = [name for name in ("localizer", "objective", "attack") if name in rows]
    found = []
    for row in rows.to_dict("records"):
        better = DIRECTION.get(row["metric"], "")
        found.append(
            {
                "what": f"{ARMS.get(row['arm'], row['arm'])} − {ARMS.get(row['control'], row['control'])}",
                "where": " · ".join(str(row[name]) for name in named if row[name]),
                "metric": row["metric"].replace("_", " ") + {"higher": " ↑", "lower": " ↓"}.get(better, ""),
                "difference": f"{row['difference']:+.3f}",
                "interval": interval(row["low95"], row["high95"], "+.3f") or "–",
                "n": row["n"],
                "draws": row["draws"],
            }
        )
    return found


def _strengths(whole: pd.DataFrame) -> dict[str, Any]:
    """How well θ_p, θ_r and θ_o know each part of the facts, and what planting cost: θ_r − θ_o of the same seed."""
    rows = whole[whole.arm.isin(STAGES) & whole.metric.isin(STRENGTHS)]
    wide = rows.pivot_table(index="seed", columns=["arm", "metric"], values="value")
    stages = [(name, wide[arm], (0.0, 1.0)) for arm, name in STAGES.items() if arm in wide]
    if not stages:
        return {}
    if {"retain", "none"} <= set(rows.arm):
        stages.append(("θ_r − θ_o", wide["retain"] - wide["none"], (-1.0, 1.0)))
    metrics = [m for m in STRENGTHS if m in set(rows.metric)]
    return {
        "heads": [m.removesuffix("_extraction_strength") for m in metrics],
        "n": len(wide),
        "rows": [
            (name, [_cell(summary(found[m], within)) if m in found else ("–", "") for m in metrics])
            for name, found, within in stages
        ],
    }


def _recovery(whole: pd.DataFrame) -> dict[str, Any]:
    """What came back under attack, by arm and attack."""
    attacked = whole[(whole.attack != "") | whole.metric.str.startswith("recovery")]
    metrics = sorted(set(attacked.metric), key=lambda m: (not m.startswith("recovery"), m))
    return _results(attacked, metrics, by="attack")


def _results(whole: pd.DataFrame, metrics: list[str], *, by: str | None = None) -> dict[str, Any]:
    """Mean and 95% interval over the seeds (draws averaged within a seed first), one arm a row."""
    rows = whole[whole.metric.isin(metrics)]
    if rows.empty:
        return {}
    rows = rows.assign(more=rows[by] if by else "")
    key = ["objective", "localizer", "arm", "more"]
    seeds = rows.groupby([*key, "seed", "metric"], sort=False).value.mean().reset_index()
    found = seeds.groupby([*key, "metric"], sort=False).value
    cells = {where: summary(values, limits(str(where[-1]))) for where, values in found}
    draws = rows.groupby(key, sort=False).draw.nunique().to_dict()
    lines = []
    for objective, localizer, arm, extra in sorted(draws, key=lambda k: (k[0], k[3], k[1], place(k[2]))):
        own = [cells.get((objective, localizer, arm, extra, metric)) for metric in metrics]
        n = max((cell[0] for cell in own if cell), default=0)
        lines.append(
            {
                "arm": ARMS.get(arm, arm),
                "localizer": localizer or "–",
                "objective": objective or "–",
                "n": n,
                "more": extra or "–",
                "draws": draws[objective, localizer, arm, extra],
                "cells": [_cell(cell) for cell in own],
            }
        )
    words = {"higher": ("↑", "higher is better"), "lower": ("↓", "lower is better")}
    heads = [(m.replace("_", " "), *words.get(DIRECTION.get(m, ""), ("", "no better direction"))) for m in metrics]
    return {"heads": heads, "rows": lines, "by": by}


def _cell(cell: tuple[int, float, float, float] | None) -> tuple[str, str]:
    if cell is None or not cell[0]:
        return "–", ""
    _, mean, low, high = cell
    shape = ",.0f" if abs(mean) >= 1000 else ".3g" if abs(mean) < 0.01 and mean else ".3f"
    return f"{mean:{shape}}", interval(low, high, shape) if low != high else ""


def _statuses(whole: pd.DataFrame) -> dict[str, Any]:
    """How many runs ended how, by arm."""
    runs = whole[~whole.arm.isin(UNEDITED)].drop_duplicates(["objective", "localizer", "arm", "seed", "draw"])
    runs = runs.assign(status=runs.status.where(runs.status != "", "unknown"))
    if runs.empty:
        return {}
    counts = runs.groupby(["arm", "status"]).size().unstack(fill_value=0)
    counts = counts.reindex([arm for arm in [*ARMS, *counts.index.difference(list(ARMS))] if arm in counts.index])
    bad = int((runs.status != "finished").sum())
    return {
        "sentence": f"{bad} of {len(runs)} runs did not simply finish." if bad else f"All {len(runs)} runs finished.",
        "heads": list(counts.columns),
        "rows": [(ARMS.get(arm, arm), row.tolist()) for arm, row in counts.iterrows()],
    }


def _tuning(tuning: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of (objective, type of arm): every rate tried with its AUES, and the chosen one."""
    rows = []
    for objective, kinds in tuning.items():
        for kind, found in kinds.items() if isinstance(kinds, dict) else ():
            grid = found.get("mean AUES by rate", {}) if isinstance(found, dict) else {}
            chosen = found.get("chosen") if isinstance(found, dict) else None
            tried = [
                (
                    f"{float(rate):.3g}",
                    f"{value:.3f}" if isinstance(value, float) else str(value),
                    float(rate) == chosen,
                )
                for rate, value in grid.items()
            ]
            rows.append({"objective": objective, "kind": kind, "tried": tried, "edge": bool(found.get("at the edge"))})
    return rows


@functools.cache
def _script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that defines `vegaEmbed`."""
    version = alt.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]
    bundle = vl_convert.javascript_bundle(vl_version=version)  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")


def _spec(figure: Figure) -> Markup:
    """The specification of a chart as JSON that cannot end the script element that holds it."""
    text = figure.chart.to_json(indent=None)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _values(table: pd.DataFrame, name: str) -> list[Any]:
    return table[name].dropna().unique().tolist() if name in table.columns else []


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
