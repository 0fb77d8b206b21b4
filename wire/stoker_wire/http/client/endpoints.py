"""The URLs of a service that has replicas, and the one of them that a client uses.

An address is one URL or several, separated by commas. The choice is sticky: a client stays where it is
answered, and moves when its URL refuses connections, breaks off, or is silent while another is ready.
Both clients share these rules (:mod:`stoker_wire.http.client.replicas` applies them on an event loop).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from stoker_wire.errors import BadRequestError

READY_PATH = "/readyz"
HEDGE_S = 0.4
"""After so long without an answer it is asked whether the replica is ready."""
PROBE_S = 0.5
"""A replica that has not said by then that it is ready counts as silent, if another one has."""
STEADY_S = 1.0
"""Between two such questions while nothing but long polls, streams and watches is under way."""


class Endpoints:
    """The URLs of one address. ``current`` is the one in use, which all threads of a client share."""

    __slots__ = ("current", "urls")

    def __init__(self, address: str) -> None:
        self.urls = urls_of(address)
        self.current = self.urls[0]

    @property
    def several(self) -> bool:
        """Whether there is another URL to move to."""
        return len(self.urls) > 1

    @property
    def others(self) -> tuple[str, ...]:
        """The URLs that are not in use, beginning with the one after it."""
        at = self.urls.index(self.current)
        return self.urls[at + 1 :] + self.urls[:at]

    def leave(self, url: str) -> bool:
        """Move on from ``url``, which failed, unless that was done; return whether there is another."""
        if self.several and self.current == url:
            self.current = self.others[0]
        return self.several

    def tried(self) -> str:
        """Return all URLs, for the text of an error."""
        return ", ".join(self.urls)


def urls_of(address: str) -> tuple[str, ...]:
    """Return the URLs of an address, each once and without a trailing slash."""
    urls = (url.strip().rstrip("/") for url in address.split(","))
    return tuple(dict.fromkeys(url for url in urls if url)) or (address,)


def checked_address(address: str) -> str:
    """Return an address whose URLs are complete (``host:port`` is taken as http); BadRequestError if not."""
    return ",".join(checked_url(url) for url in urls_of(address))


def checked_url(url: str) -> str:
    """Return ``url`` without a trailing slash; ``host:port`` is taken as http."""
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise BadRequestError(
            f"{url!r} is not an address of a cluster\n"
            "write it like http://127.0.0.1:7600, several of one cluster with commas between",
            field="address",
        )
    return url.rstrip("/")
