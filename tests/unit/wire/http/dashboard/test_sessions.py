"""Cookies and CSRF tokens as nobody sends them who means well."""

from __future__ import annotations

import pytest

from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http.dashboard.sessions import CSRF_HEADER, Sessions
from stoker_wire.http.principals import ROOT
from stoker_wire.http.server.tokens import TokenSigner

ODD = b"\xff\xfe".decode(errors="surrogateescape")
"""Bytes that are no text, as the HTTP server gives them."""


def test_bytes_that_are_no_text_are_no_session_and_no_proof() -> None:
    sessions = Sessions(TokenSigner("s" * 40))
    session = sessions.begin(ROOT)
    name, _, _ = sessions.cookie(session.token, secure=False).partition("=")
    with pytest.raises(UnauthorizedError):
        sessions.check({"Cookie": f"{name}={ODD}"}, "GET")
    with pytest.raises(UnauthorizedError):
        sessions.of_bearer(ODD)
    with pytest.raises(ForbiddenError, match="CSRF"):
        sessions.check({"Cookie": f"{name}={session.token}", CSRF_HEADER: ODD}, "POST")
