"""Headless Chromium for tests of pages: no network, and every request, console message and error is kept."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Opened:
    """A page in the browser, and what it did."""

    tab: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def text(self) -> str:
        """What a reader sees, the labels within drawings included."""
        return self.tab.evaluate(
            "document.body.innerText + [...document.querySelectorAll('svg text')].map(t => t.textContent).join(' ')"
        )

    def drawn(self, n: int, seconds: float = 20) -> None:
        """Wait until n views are drawn."""
        self.tab.wait_for_function(f"window.locusViews && window.locusViews.drawn >= {n}", timeout=seconds * 1000)


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def opened(running: Any, path: Path, *, dark: bool = False, width: int = 1000) -> Iterator[Opened]:
    """Open a file in a tab of its own, without a network."""
    context = running.new_context(
        offline=True, color_scheme="dark" if dark else "light", viewport={"width": width, "height": 800}
    )
    page = Opened(context.new_page())
    page.tab.on("request", lambda r: page.requests.append(r.url))
    page.tab.on("console", lambda m: page.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.tab.on("pageerror", lambda e: page.errors.append(str(e)))
    try:
        page.tab.goto(path.as_uri())
        yield page
    finally:
        context.close()
