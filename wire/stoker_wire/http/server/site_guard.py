"""The checks of a request's Host and Origin, which keep web pages away from what listens on this machine.

All that serves HTTP asks here before it looks at anything else: services and the processes that run users'
code. A page that rebinds its own name to this machine talks to us with the browser as its agent.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker_wire.errors import ForbiddenError
from stoker_wire.http import auth

if TYPE_CHECKING:
    from stoker_wire.settings import Settings


class SiteGuard:
    """The names of one listener, fixed once it is known where it listens."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._any_address = False
        self._names: set[str] = set()
        self.listens_on(None)

    def listens_on(self, host: str | None) -> None:
        """Set the names that requests may use; ``host`` is None for a Unix socket alone."""
        self._any_address = host is not None and not auth.is_loopback(host)
        names = {"localhost", host or "", self._settings.advertise_host}
        names.update(self._settings.allowed_hosts)
        if host is not None and not auth.is_loopback(host):
            names.add(socket.gethostname())
        self._names = {name.lower().strip("[]") for name in names if name}

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise ForbiddenError for a request to a name that is not ours, or from another site's page."""
        host = headers.get("Host", "")
        if not self._known(host):
            raise ForbiddenError(
                f"Host {host[:100]!r} is not a name of this service\n"
                "add it to STOKER_ALLOWED_HOSTS if it is meant to be one",
                field="Host",
            )
        origin = headers.get("Origin")
        if origin is not None and not self._same_site(origin, host):
            raise ForbiddenError(
                f"requests from the web origin {origin[:100]!r} are refused\n"
                "add its host to STOKER_ALLOWED_HOSTS if pages from there are meant to call",
                field="Origin",
            )

    def _same_site(self, origin: str, host: str) -> bool:
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return netloc == host.lower() or _name_of(netloc) in self._settings.allowed_hosts

    def _known(self, host: str) -> bool:
        name = _name_of(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A page can rebind a name, never an address: any literal is safe that leads here, as those of a
        # gateway or a forwarder do.
        return self._any_address or address.is_loopback


def _name_of(host: str) -> str:
    """Return the name in a ``name:port`` header, lower case and without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
