"""What every function of `locus.view` returns, and how it is shown: in a notebook, on a page, as a picture.

A view is a picture first: the chart of each panel is drawn without a browser, so a notebook shows it on a code host,
untrusted, or without a network. Where scripts run, the same panels become interactive: charts by Vega, attention and
tokens by CircuitsVis. The scripts are on a page once, compressed, and nothing is asked of the network.
"""

import base64
import functools
import gzip
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import altair as alt
import jinja2
import pandas as pd
import vl_convert
from markupsafe import Markup

from locus.charts import data
from locus.charts import wide as wide
from locus.folder import write

PICTURES = {".svg": "svg", ".png": "png", ".pdf": "pdf"}
# Zero is neutral; positive orange and negative blue can be told apart by the color-blind.
POSITIVE, NEGATIVE = "#B35806", "#2166AC"
# Of pictures of charts that are as wide as their place on a page.
PICTURE_WIDTH = 520


@dataclass(frozen=True, eq=False)
class Element:
    """An element of CircuitsVis with its properties, and a label before it."""

    name: Literal["AttentionHeads", "ColoredTokens"]
    props: dict[str, Any]
    label: str = ""


@dataclass(frozen=True, eq=False)
class Panel:
    """One drawing. With elements, these are drawn where scripts run, and the chart only where a picture is needed."""

    chart: Any
    elements: tuple[Element, ...] = ()


@dataclass(frozen=True, eq=False)
class View:
    """Something to look at. The last value of a notebook's cell shows by itself; `save` writes it to a file.

    title: what is shown, of which model
    caption: n, metric and method, and how to read it
    alt: words for those who cannot see it
    """

    title: str
    caption: str
    alt: str
    panels: tuple[Panel, ...]

    def __repr__(self) -> str:
        return f"View({self.title}: {self.alt})"

    def _repr_html_(self) -> str:
        return template("view.html.jinja").render(view=self, picture=_png(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """For a notebook: the HTML, and a picture with its words for hosts that show none, as code hosts do."""
        picture = vl_convert.vegalite_to_svg(self.picture().to_json(), vl_version=_vl_version())
        return {"text/html": self._repr_html_(), "image/svg+xml": picture, "text/plain": repr(self)}

    def picture(self) -> Any:
        """The view as one Altair chart with its title and caption, without scripts."""
        title = alt.TitleParams(
            text=textwrap.wrap(self.title, 78),
            subtitle=textwrap.wrap(self.caption, 96),
            anchor="start",
            frame="group",
            subtitleColor="#5f6368",
            offset=12,
        )
        return _joined(self).properties(title=title)

    def save(self, path: str | Path) -> Path:
        """Write .html (self-contained, interactive), .svg, .png or .pdf.

        Raises:
            ValueError: the name ends in something else.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind == ".html":
            text = page([self], title=self.title)
            write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        elif kind in PICTURES:
            chart, scale = self.picture(), 2 if kind == ".png" else 1
            write(path, lambda temporary: chart.save(str(temporary), format=PICTURES[kind], scale_factor=scale))
        else:
            raise ValueError(f"a view cannot be saved as {path.name!r}; end the name in .html, .svg, .png or .pdf")
        return path


class _Scripts:
    """The scripts of views, shown in a notebook."""

    def __repr__(self) -> str:
        return "the views of this notebook are interactive"

    def _repr_html_(self) -> str:
        return f"<script>{script(('circuitsvis', 'vega'))}</script><small>{self!r}</small>"


def notebook() -> Any:
    """Make the views of a notebook interactive: leave this in a cell of its own, and its output holds the scripts once.

    Without it views are pictures. 0.9 MB; the views themselves carry their numbers and no script.
    """
    return _Scripts()


def page(views: Sequence[View], *, title: str) -> str:
    """Views on one self-contained HTML page, with each script once and no request to the network.

    Raises:
        ValueError: there is no view, or something that is none.
    """
    if not views or not all(isinstance(view, View) for view in views):
        kinds = ", ".join(sorted({type(view).__name__ for view in views if not isinstance(view, View)})) or "no view"
        raise ValueError(f"a page needs a list of at least one View, and got {kinds}")
    drawn = {"circuitsvis" if panel.elements else "vega" for view in views for panel in view.panels}
    return template("page.html.jinja").render(views=views, title=title, script=script(tuple(sorted(drawn))))


def chart_of(frame: pd.DataFrame) -> alt.Chart:
    """A chart of rows that travel with it."""
    return alt.Chart(data(frame))


def diverging(largest: float) -> alt.Scale:
    """Colors of signed numbers, as far below 0 as above it."""
    largest = largest or 1.0
    return alt.Scale(scheme="blueorange", domain=[-largest, largest])


def _joined(view: View) -> Any:
    charts = [_nameless(_sized(panel.chart)) for panel in view.panels]
    joined = charts[0] if len(charts) == 1 else alt.vconcat(*charts).resolve_scale(color="independent")
    return joined.configure(background="white").configure_view(stroke="#dcdce0")


def _nameless(chart: Any) -> Any:
    """A copy whose tables have no names: those of several charts in one may be the same, which Vega refuses."""
    chart = chart.copy(deep=True)
    parts = [chart]
    for part in parts:
        for kind in ("layer", "hconcat", "vconcat", "concat"):
            inner = getattr(part, kind, alt.Undefined)
            parts += inner if isinstance(inner, list) else []
        if isinstance(part.data, alt.Data | alt.InlineData):
            part.data = part.data.copy()
            part.data.name = alt.Undefined
    return chart


def _sized(chart: Any) -> Any:
    if getattr(chart, "width", None) != "container":
        return chart
    fixed = chart.copy(deep=False)
    fixed.width, fixed.autosize = PICTURE_WIDTH, alt.Undefined
    return fixed


def _png(view: View) -> dict[str, Any]:
    image = vl_convert.vegalite_to_png(_joined(view).to_json(), vl_version=_vl_version(), scale=1.5)
    # A PNG says its width at its 16th byte.
    width = int.from_bytes(image[16:20], "big") * 2 // 3
    return {"data": base64.b64encode(image).decode(), "width": width}


def _vl_version() -> str:
    return alt.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]


def _attribute(panel: Panel) -> Markup:
    """What the script draws in a panel, as JSON within single quotes."""
    if panel.elements:
        spec: Any = [{"label": e.label, "name": e.name, "props": e.props} for e in panel.elements]
    else:
        spec = panel.chart.to_dict()
    text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;"))


@functools.cache
def _packed(name: str) -> str:
    """The script of a library, compressed, as base64."""
    if name == "vega":
        source = vl_convert.javascript_bundle(vl_version=_vl_version())  # type: ignore[call-arg]
    else:
        source = (files("circuitsvis") / "dist/cdn/iife.js").read_text(encoding="utf-8")
        source = source.rsplit("//# sourceMappingURL", 1)[0]
    return base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode()


def script(names: tuple[str, ...]) -> str:
    """What draws the views of a page, with the libraries "circuitsvis" and "vega" as named."""
    source = Path(__file__).with_name("view.js").read_text(encoding="utf-8")
    return source.replace("PACKED", json.dumps([_packed(name) for name in names]))


@functools.cache
def template(name: str) -> jinja2.Template:
    """A template of this folder: `base.html.jinja` is every page's skeleton, `figure.html.jinja` draws a view."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.FileSystemLoader(Path(__file__).parent)
    )
    environment.filters["attribute"] = _attribute
    return environment.get_template(name)
