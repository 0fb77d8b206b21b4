"""TLS contexts of clients and servers, whose connections use the certificates that are on disk now.

A context here stands for the one that was made of the files last: each connection looks, once a second
at most, whether they have changed, and a renewed certificate so needs no restart. Files that do not fit
together (one of two is written yet) leave the last good ones in use. TLS 1.3 only; names are always
checked by clients. The one other case: ``https`` without any setting, through a proxy of others, is
Python's default context.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stoker_wire.errors import StartError, TlsError
from stoker_wire.tls.failures import EXPIRED, FailureLog, client_failure
from stoker_wire.tls.files import MUTUAL, TlsFiles, check_complete, check_private

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
PEER: ContextVar[str] = ContextVar("PEER", default="")
"""The address of the client whose connection is being made, for the log."""
LOOK_S = 1.0
"""The pause between two looks at the files."""


class TlsConnection(ssl.SSLObject):
    """The TLS of one connection, with the buffers that it was made with."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO | None = None
    failures: FailureLog | None = None
    peer: str = ""
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Shake hands; of a failure the log is told, and the client why: servers of asyncio tell neither."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            if self.failures is not None:
                self.failures.note(error, self.peer)
            if self.server_side and self.outgoing is not None and self.outgoing.pending:
                self._failure = error
                raise ssl.SSLWantReadError from None  # which has the alert sent
            raise


class RenewedContext(ssl.SSLContext):
    """A context that makes each connection by the one that ``build`` made of ``files`` last."""

    _build: Callable[[], ssl.SSLContext]
    _files: tuple[str, ...]
    _current: ssl.SSLContext
    _stamps: tuple[object, ...]
    _look_at_s: float
    _failures: FailureLog | None

    def follow(
        self,
        build: Callable[[], ssl.SSLContext],
        files: tuple[str, ...],
        failures: FailureLog | None = None,
    ) -> RenewedContext:
        """Set what to follow, and make the first context. StartError says what is wrong with a file."""
        self._build, self._files, self._failures = build, files, failures
        self._stamps = _stamps(files)
        self._current = build()
        self._look_at_s = time.monotonic() + LOOK_S
        return self

    def current(self) -> ssl.SSLContext:
        """Return the context of the files as they are."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            stamps = _stamps(self._files)
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    self._current = self._build()
                except StartError as error:
                    _log.warning("the old certificate stays in use: %s", error.one_line)
                else:
                    _log.info("took the certificate of %s", self._files[0])
        return self._current

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any
    ) -> TlsConnection:
        """Return the TLS of a connection of an event loop."""
        made = self.current().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(made, TlsConnection)
        made.incoming, made.outgoing, made.failures = incoming, outgoing, self._failures
        made.peer = PEER.get()
        return made

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """Return a socket that speaks TLS."""
        return self.current().wrap_socket(*args, **kwargs)


def _stamps(files: tuple[str, ...]) -> tuple[object, ...]:
    stamps: list[object] = []
    for path in files:
        try:
            status = os.stat(path)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(stamps)


@lru_cache(maxsize=8)
def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of this process's listeners. StartError names the setting at fault."""
    check_complete(files)
    context = RenewedContext(ssl.PROTOCOL_TLS_SERVER)
    return context.follow(lambda: _server(files), files.all, FailureLog())


@lru_cache(maxsize=8)
def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of this process's connections. StartError names the setting at fault."""
    if not files.all:
        return ssl.create_default_context()
    return RenewedContext(ssl.PROTOCOL_TLS_CLIENT).follow(lambda: _client(files), files.all)


def context_for(url: str, files: TlsFiles) -> ssl.SSLContext | None:
    """Return the context for connections to ``url``, None for plain ones; TlsError if TLS is asked for."""
    if url[:6].lower() == "https:":
        return client_context(files)
    if files.is_on:
        raise TlsError(
            f"{url} is an address without TLS, and STOKER_TLS={files.mode}\n"
            "write it with https://, or unset STOKER_TLS"
        )
    return None


def tls_error(error: BaseException, doing: str, url: object) -> TlsError | None:
    """Return the error of a client whose ``doing`` failed for TLS, with its fix; None for other causes."""
    why = client_failure(error, urlsplit(str(url)).hostname or "")
    return TlsError(f"{doing} failed: no trusted TLS\n{why}") if why else None


def _server(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    # A ticket could lie in the buffers of a connection that a channel takes over, and nobody resumes.
    context.num_tickets = 0
    if files.mode == MUTUAL:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, files)
    if not files.ca:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslobject_class = TlsConnection
    if files.ca:
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ssl.SSLError) as error:
            raise StartError(
                f"cannot read the CA's certificate {files.ca}\n{_reason(error)}\n"
                "set STOKER_TLS_CA to its ca.pem (stoker certs init)"
            ) from None
    if not files.cert:
        return
    try:
        check_private(files.key)
        context.load_cert_chain(files.cert, files.key or None, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"cannot use the certificate {files.cert}\n{_reason(error)}\n"
            "set STOKER_TLS_CERT and STOKER_TLS_KEY to a certificate and its key without a passphrase "
            "(stoker certs issue)"
        ) from None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        words = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
        return "the key is another certificate's" if words == "key values mismatch" else words
    return error.strerror or str(error)


def check_listener(name: str, host: str, files: TlsFiles) -> None:
    """Raise StartError if clients of ``host`` could not trust this process's listener: shake hands with it.

    Better at the start than in the logs of all who cannot connect later.
    """
    server, client = server_context(files), client_context(files)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        _silent(server).wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLError as error:
        why = _own_failure(error, host)
        raise StartError(
            f"{name} will not listen with the certificate {files.cert}\n{why}"
        ) from None


def _silent(context: ssl.SSLContext) -> ssl.SSLContext:
    return context.current() if isinstance(context, RenewedContext) else context


def _own_failure(error: ssl.SSLError, host: str) -> str:
    code = getattr(error, "verify_code", 0)
    if code == EXPIRED:
        return "it has expired\nrenew it: stoker certs renew NAME"
    why = client_failure(error, host) or str(error)
    return why.replace("the server's certificate", "it").replace(" there", "")
