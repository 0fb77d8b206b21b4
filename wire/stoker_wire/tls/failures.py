"""The meaning of a handshake that failed: for the client an error with its fix, for the server a line.

OpenSSL says what it found, never which setting mends it. A client of TLS 1.3 has finished its handshake
before the server has looked at its certificate, so that it learns of a refusal as it reads.
"""

from __future__ import annotations

import logging
import ssl
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_LOG_PAUSE_S = 10.0
_DEPTH = 8

EXPIRED, _NOT_YET, _PURPOSE = 10, 9, 26
_OTHER_NAME = (62, 64)
_FOREIGN = (2, 7, 18, 19, 20, 21, 24)
"""Numbers of OpenSSL's ``X509_V_ERR_*``."""

_REFUSED_CLIENT = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server asks for a client certificate\n"
    "set STOKER_TLS_CERT and STOKER_TLS_KEY; `stoker certs issue NAME --client` makes one",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not know the CA of this process's certificate\n"
    "set STOKER_TLS_CERT to one that the cluster's CA has signed",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this process's certificate has expired\n"
    "renew STOKER_TLS_CERT: stoker certs renew NAME",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the server refuses this process's certificate\n"
    "set STOKER_TLS_CERT to one that the cluster's CA has signed",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the server refuses this process's certificate\n"
    "set STOKER_TLS_CERT to one that the cluster's CA has signed",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "this process's certificate is not one for clients\n"
    "issue it anew: stoker certs issue NAME",
    "WRONG_VERSION_NUMBER": "what listens there speaks no TLS\n"
    "write http://, or start the cluster with STOKER_TLS=server or mutual",
    "RECORD_LAYER_FAILURE": "what listens there speaks no TLS\n"
    "write http://, or start the cluster with STOKER_TLS=server or mutual",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the server does not speak TLS 1.3\nis it of Stoker?",
    "UNSUPPORTED_PROTOCOL": "the server does not speak TLS 1.3\nis it of Stoker?",
}
_SEEN_BY_SERVER = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "a client sent no certificate; it needs STOKER_TLS_CERT "
    "and STOKER_TLS_KEY (stoker certs issue NAME --client)",
    "TLSV1_ALERT_UNKNOWN_CA": "a client does not trust this server's certificate; give it the CA's "
    "as STOKER_TLS_CA",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "a client says that this server's certificate has expired; "
    "renew STOKER_TLS_CERT (stoker certs renew NAME)",
    "SSLV3_ALERT_BAD_CERTIFICATE": "a client refuses this server's certificate, perhaps for its "
    "name; issue one for the name by which it is reached (stoker certs issue NAME --host HOST)",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "a client refuses this server's certificate",
    "HTTP_REQUEST": "a client sent plain HTTP to a port of TLS; its address must begin with https://",
    "UNSUPPORTED_PROTOCOL": "a client does not speak TLS 1.3",
}


def client_failure(error: BaseException, host: str = "") -> str:
    """Return why TLS failed and the fix, each on a line; nothing if ``error`` was not TLS's."""
    cause = _ssl_error(error)
    if cause is None:
        return ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _refused_server(cause, host)
    return _REFUSED_CLIENT.get(_reason(cause), "")


def _refused_server(cause: ssl.SSLCertVerificationError, host: str) -> str:
    code = cause.verify_code
    if code == EXPIRED:
        return (
            "the server's certificate has expired\n"
            "renew it there (stoker certs renew NAME); a running service takes the new one by itself"
        )
    if code == _NOT_YET:
        return "the server's certificate is not valid yet\ncompare the clocks of both machines"
    if code in _OTHER_NAME:
        name = host or "the name by which it is reached"
        return (
            f"the server's certificate is not for {name}\n"
            f"issue one there that is: stoker certs issue NAME --host {host or 'HOST'}; or use a name "
            "that it has"
        )
    if code == _PURPOSE:
        return (
            "the server's certificate is one for clients only\n"
            "issue it without --client: stoker certs issue NAME --host HOST"
        )
    if code in _FOREIGN:
        return (
            "the server's certificate is signed by no CA that this process trusts\n"
            "set STOKER_TLS_CA to the ca.pem of its cluster"
        )
    return f"the server's certificate was refused: {cause.verify_message}\nsee docs/tls.md"


def server_failure(error: ssl.SSLError) -> str:
    """Return what a server's log says of a handshake that failed; nothing of one that was broken off."""
    if _reason(error) == "CERTIFICATE_VERIFY_FAILED":
        code = getattr(error, "verify_code", 0)
        if code == EXPIRED:
            return "a client's certificate has expired; renew it (stoker certs renew NAME)"
        if code == _PURPOSE:
            return (
                "a client's certificate is not one for clients; issue it anew (stoker certs issue)"
            )
        said = getattr(error, "verify_message", "") or "it cannot be verified"
        return f"a client's certificate is not of the CA in STOKER_TLS_CA: {said}"
    return _SEEN_BY_SERVER.get(_reason(error), "")


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's name of what happened; those that Python makes itself have none."""
    return getattr(error, "reason", None) or ""


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of TLS that is, or is behind, an error of a client's library."""
    seen: BaseException | None = error
    for _ in range(_DEPTH):
        # Those of aiohttp are errors of TLS by their class only, and have the real one.
        inner = getattr(seen, "certificate_error", None) or getattr(seen, "os_error", None)
        if isinstance(inner, BaseException):
            seen = inner
        elif seen is None or isinstance(seen, ssl.SSLError):
            return seen
        else:
            seen = seen.__cause__ or seen.__context__
    return None


class FailureLog:
    """The lines of a server's log about handshakes that failed: of each kind one in ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def note(self, error: ssl.SSLError, peer: str = "") -> None:
        """Log a failure, unless it was the peer's leaving or the same was logged just now."""
        text = server_failure(error)
        if not text:
            return
        now_s = self._clock()
        if now_s < self._next_s.get(text, 0.0):
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return
        self._next_s[text] = now_s + _LOG_PAUSE_S
        more = self._left_out.pop(text, 0)
        ending = f" (from {peer})" if peer else ""
        ending += f" ({more} times more before)" if more else ""
        _log.warning("TLS: %s%s", text, ending)
