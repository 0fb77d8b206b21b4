"""A browser with the dashboard open, as its tests drive it."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.services import find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_MS = 60_000
PROBLEMS_OF_VIEW = Path(__file__).with_name("accessibility.js").read_text()


@functools.cache
def axe_core() -> str:
    """The script of axe-core, which checks a page; a wheel brings it."""
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed: make env")
    return (resources.files("axe_playwright_python") / "axe.min.js").read_text()


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """The browser; a test that wants it is skipped where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make env"
    )
    path = find_chromium()
    if path is None:
        pytest.skip("there is no chromium: `make test` installs Debian's where it runs as root")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Relay:
    """A way to the gcs that can be cut, with all connections on it, and mended."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._target = (where.hostname, where.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: set[socket.socket] = set()
        self._is_cut = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """End all connections; new ones end at once."""
        self._is_cut = True
        for end in list(self._ends):
            _shut(end)

    def mend(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def close(self) -> None:
        """Let nothing through any more."""
        _shut(self._listener)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._carry, args=(near,)))
                self._threads[-1].start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            self._ends |= {near, far}
            if self._is_cut:
                _shut(near)
            back = threading.Thread(target=_pump, args=(far, near))
            back.start()
            _pump(near, far)
            back.join()
            self._ends -= {near, far}


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    _shut(sink)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Screen:
    """A page of a browser, what went wrong on it, and whom it asked besides the gcs."""

    def __init__(self, browser: Any, url: str) -> None:
        self.url = url
        self.context = browser.new_context(viewport={"width": 1280, "height": 800})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.wrong: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _asked(self, request: Any) -> None:
        if urlsplit(request.url)[:2] != urlsplit(self.url)[:2] and request.url[:5] != "data:":
            self.strangers.append(request.url)

    def log_in(self, token: str) -> Screen:
        """Open the page by a link that has the token."""
        self.page.goto(f"{self.url}/#login={token}")
        self.page.wait_for_selector("main h1")
        self.live()
        return self

    def open(self, place: str) -> None:
        """Show a view, to its end; one that is open already is drawn anew."""
        if self.page.evaluate("place => location.hash === place", place):
            self._go("#/kernels" if place == "#/" else "#/")
        self._go(place)

    def _go(self, place: str) -> None:
        self.page.evaluate("place => { location.hash = place; }", place)
        self.page.wait_for_function(
            "place => document.querySelector('main .view')?.dataset.place === place", arg=place
        )

    def live(self) -> None:
        """Wait until the page hears of changes."""
        self.page.wait_for_selector(".connection.live")

    def text(self, selector: str = "main") -> str:
        """What can be read there."""
        return str(self.page.inner_text(selector))

    def see(self, text: str, selector: str = "main") -> None:
        """Wait until a text can be read there."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def problems(self) -> list[str]:
        """What of the view someone could not read, hear or reach, in both colour schemes."""
        found: list[str] = []
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            found += [f"{scheme}: {one}" for one in self.page.evaluate(PROBLEMS_OF_VIEW)]
            found += [f"{scheme}: {one}" for one in self._found_by_axe()]
        return found

    def _found_by_axe(self) -> list[str]:
        """What axe-core takes for serious, or worse."""
        if not self.page.evaluate("typeof axe === 'object'"):
            self.page.evaluate(axe_core())
        outcome = self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        return [
            f"axe: {one['id']}: {one['help']}: {node['html'][:200]}: {node['failureSummary'][:300]}"
            for one in outcome["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def save(self, path: Path) -> None:
        """Take a picture of the view, for the documentation."""
        self.page.emulate_media(color_scheme="light")
        self.page.screenshot(path=path)

    def close(self) -> None:
        """Close it, with its cookies."""
        self.context.close()


_NOTE_INTERACTIVE = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("main .view .tile") || !document.querySelector(".connection.live")) return;
  observer.disconnect();
  window.interactiveAt = performance.now();
}).observe(document, { childList: true, subtree: true, attributes: true });
"""


def interactive_ms(screen: Screen) -> float:
    """Load the overview in a tab of its own; return after how long it has figures and hears of changes."""
    page = screen.context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.add_init_script(_NOTE_INTERACTIVE)
    try:
        page.goto(f"{screen.url}/#/")
        page.wait_for_function("() => window.interactiveAt")
        return float(page.evaluate("window.interactiveAt"))
    finally:
        page.close()
