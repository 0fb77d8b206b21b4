"""Imports of a large package without what it loads for uses that Stoker does not have.

Entry points call this before anything imports the package; a process that imports it first by other
ways gets the same, slower and larger. Needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
import ssl
import sys
from collections.abc import Callable
from typing import Any


def import_aiohttp() -> None:
    """Import aiohttp, which makes two TLS contexts, without reading the machine's certificates.

    They are read when one of the contexts is first used. Saves 30 to 55 ms of 120 to 200, and 2.5 MB
    a process, in each start of a local cluster.
    """
    if "aiohttp" in sys.modules:
        return
    calls: list[tuple[Any, Callable[..., None], tuple[Any, ...]]] = []
    plain: Any = ssl.SSLContext
    original = plain.load_default_certs
    inherited = plain.set_default_verify_paths
    plain.load_default_certs = lambda context, *purpose: calls.append((context, original, purpose))
    plain.set_default_verify_paths = lambda context: calls.append((context, inherited, ()))
    try:
        importlib.import_module("aiohttp")
    finally:
        plain.load_default_certs = original
        del plain.set_default_verify_paths
    for context, read, how in calls:
        context.read_certificates = read, how
        context.__class__ = _LateContext


class _LateContext(ssl.SSLContext):
    """A TLS context that reads the machine's certificates at the first handshake."""

    read_certificates: tuple[Callable[..., None], tuple[Any, ...]] | None

    def wrap_bio(self, *args: Any, **how: Any) -> ssl.SSLObject:
        self._read()
        return super().wrap_bio(*args, **how)

    def wrap_socket(self, *args: Any, **how: Any) -> ssl.SSLSocket:
        self._read()
        return super().wrap_socket(*args, **how)

    def _read(self) -> None:
        if self.read_certificates is not None:
            read, how = self.read_certificates
            read(self, *how)
            self.read_certificates = None
