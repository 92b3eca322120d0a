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
    Figure,
    areas,
    interval,
    layer_maps,
    layer_scatter,
    summary,
    tradeoffs,
    whole_runs,
)
from locus.evaluate import DIRECTION
from locus.folder import write
from locus.verdict import Verdict, localization_effect, verdict

MAIN = ["aues", "forget_at_95", "utility", "drift", "update_norm", "learning_rate", "n_parameters"]


def report(run: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path.

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
    settings: what settings.json holds; `verdict rule` gives the bound, `tuning` the rates tried
    """
    settings = settings or {}
    rule = settings.get("verdict rule") or {}
    judged, sentence = _judge(table, rule)
    whole = whole_runs(table)
    blocks = [(name, value) for name, value in settings.items() if name != "tuning" and isinstance(value, dict)]
    blocks += [("other", rest)] if (rest := {k: v for k, v in settings.items() if not isinstance(v, dict)}) else []
    effect = localization_effect(scan) if scan is not None and len(scan) else None
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["spec"] = _spec
    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=" · ".join(str(v) for name in ("model", "facts") for v in _values(table, name)) or "empty table",
        sentence=sentence,
        bound=judged.bound if judged else None,
        verdicts=_verdict_rows(judged) if judged else [],
        tradeoffs=[*tradeoffs(table)],
        arms=[*areas(table)],
        effect=effect,
        effect_rows=[] if effect is None else list(effect.r2.round(3).itertuples()),
        scatter=None if effect is None else layer_scatter(scan),
        heat=[] if effect is None else layer_maps(scan),
        results=_results(whole, [m for m in MAIN if m in set(whole.metric)]),
        everything=_results(whole, sorted(set(whole.metric) - set(MAIN))),
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
    try:
        judged = verdict(table, bound=float(rule.get("bound", 0.02)), metric=str(rule.get("metric", "aues")))
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
                "what": " · ".join(str(row[name]) for name in ("localizer", "objective", "budget") if name in row),
                "verdict": row["verdict"],
                "difference": f"{row['difference']:+.3f}" if math.isfinite(row["difference"]) else "–",
                "interval90": interval(row["low90"], row["high90"], "+.3f"),
                "interval95": interval(row["low95"], row["high95"], "+.3f"),
                "n": row["n"],
                "rank": f"above {row['above']} of {row['of']}",
                "wilcoxon": f"{wilcoxon:.3f}" if math.isfinite(wilcoxon) else "–",
                "need": " / ".join(f"{n:.0f}" for n in need) if all(map(math.isfinite, need)) else "–",
            }
        )
    return rows


def _results(whole: pd.DataFrame, metrics: list[str]) -> dict[str, Any]:
    """Mean and 95% interval over the seeds (draws averaged within a seed first), one arm a row."""
    rows = whole[whole.metric.isin(metrics)]
    if rows.empty:
        return {}
    key = ["objective", "localizer", "arm"]
    seeds = rows.groupby([*key, "seed", "metric"], sort=False).value.mean().reset_index()
    cells = seeds.groupby([*key, "metric"], sort=False).value.agg(summary).to_dict()
    draws = rows.groupby(key, sort=False).draw.nunique().to_dict()
    lines = []
    for objective, localizer, arm in sorted(
        draws, key=lambda k: (k[0], k[1], list(ARMS).index(k[2]) if k[2] in ARMS else 9)
    ):
        own = [cells.get((objective, localizer, arm, metric)) for metric in metrics]
        n = max((cell[0] for cell in own if cell), default=0)
        lines.append(
            {
                "arm": ARMS.get(arm, arm),
                "localizer": localizer or "–",
                "objective": objective or "–",
                "n": n,
                "draws": draws[objective, localizer, arm],
                "cells": [_cell(cell) for cell in own],
            }
        )
    words = {"higher": ("↑", "higher is better"), "lower": ("↓", "lower is better")}
    heads = [(m.replace("_", " "), *words.get(DIRECTION.get(m, ""), ("", "no better direction"))) for m in metrics]
    return {"heads": heads, "rows": lines}


def _cell(cell: tuple[int, float, float, float] | None) -> tuple[str, str]:
    if cell is None or not cell[0]:
        return "–", ""
    _, mean, low, high = cell
    shape = ",.0f" if abs(mean) >= 1000 else ".3g" if abs(mean) < 0.01 and mean else ".3f"
    return f"{mean:{shape}}", interval(low, high, shape) if low != high else ""


def _statuses(whole: pd.DataFrame) -> dict[str, Any]:
    """How many runs ended how, by arm."""
    runs = whole[whole.arm != "none"].drop_duplicates(["objective", "localizer", "arm", "seed", "draw"])
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
            grid = found.get("grid", {}) if isinstance(found, dict) else {}
            chosen = found.get("chosen") if isinstance(found, dict) else None
            tried = [
                (
                    f"{float(rate):.3g}",
                    f"{value:.3f}" if isinstance(value, float) else str(value),
                    float(rate) == chosen,
                )
                for rate, value in grid.items()
            ]
            rows.append({"objective": objective, "kind": kind, "tried": tried, "edge": bool(found.get("at edge"))})
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
