"""One request and its reply as a client sees them: headers, bodies, query texts, errors and pauses.

Both clients are made of these parts, the asyncio one (:mod:`stoker_wire.http.client.client`) and the
synchronous one of the sdk, so that they send the same and raise the same. No HTTP library is imported
here: a command line tool cannot spend the time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker_wire.errors import DeadlineExceededError, InternalError, StokerError
from stoker_wire.http.codec import BYTES, JSON, MSGPACK, Codec, encode_json, encode_msgpack
from stoker_wire.http.problems import error_of
from stoker_wire.version import PROTOCOL_HEADER, PROTOCOL_TEXT, VERSION

TIMEOUT_HEADER = "Stoker-Timeout-S"
REPLICAS_HEADER = "Stoker-Replicas"
"""Says that the caller asks another replica when this one is silent."""


AUTHORIZATION = "Authorization"


def client_headers(peer: str, *, replicas: int = 1) -> dict[str, str]:
    """Return the headers of every request of a client beside its token; ``peer`` is what it calls itself.

    ``replicas`` is the number of URLs among which it chooses.
    """
    several = {REPLICAS_HEADER: str(replicas)} if replicas > 1 else {}
    return several | {
        "User-Agent": f"stoker/{VERSION}",
        "Stoker-Peer": peer,
        PROTOCOL_HEADER: PROTOCOL_TEXT,
    }


def encode_request(
    method: str, body: object, *, encoding: str, accept: str, key: str
) -> tuple[bytes | None, dict[str, str]]:
    """Return the bytes of a request's body and the headers that are its own.

    ``body`` is None, bytes that are sent as they are, or a message in ``encoding`` (MSGPACK or
    JSON). ``key`` is the Idempotency-Key of a POST.
    """
    headers = {"Accept": accept}
    data: bytes | None = None
    if isinstance(body, (bytes, bytearray, memoryview)):
        data, headers["Content-Type"] = bytes(body), BYTES
    elif body is not None:
        data = encode_msgpack(body) if encoding == MSGPACK else encode_json(body)
        headers["Content-Type"] = MSGPACK if encoding == MSGPACK else JSON
    if method == "POST":
        headers["Idempotency-Key"] = key
    return data, headers


def query_texts(query: Mapping[str, object]) -> dict[str, str]:
    """Return the members of a query as text; those that are None are left out."""
    return {name: _text(value) for name, value in query.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)


NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions by which a decoder of msgspec refuses its input."""


class ReplyReader:
    """The decoders of replies; a decoder is built once per type."""

    def __init__(self) -> None:
        self._codecs: dict[Any, Codec[Any]] = {}

    def decode(
        self, content: bytes, content_type: str, reply: Any, *, method: str, url: object
    ) -> Any:
        """Return the body of a success as ``reply``; InternalError if it is none."""
        codec = self._codecs.get(reply)
        if codec is None:
            codec = self._codecs[reply] = Codec(reply)
        try:
            return codec.decode_reply(content, content_type)
        except NOT_DECODED as error:
            raise unreadable_reply(error, reply, method=method, url=url) from None


def unreadable_reply(error: Exception, reply: object, *, method: str, url: object) -> InternalError:
    """Return the error of an answer, or an item of a stream, that cannot be decoded as ``reply``."""
    return InternalError(
        f"{method} {url} answered what is no {reply!r}\n"
        f"{error}\n"
        "are both sides of the same version?"
    )


def check_status(status: int, content: bytes, *, method: str, url: object) -> None:
    """Raise the error that a reply carries, unless ``status`` is a success."""
    if status >= 300:
        raise error_of(content, status=status, source=f"{method} {url}")


def retry_pause_s(tries: int, *, initial_s: float, max_s: float) -> float:
    """Return the pause after ``tries`` tries: uniform up to a bound that doubles (full jitter)."""
    return random.uniform(0.0, min(max_s, initial_s * 2.0 ** min(tries - 1, 20)))


def deadline_error(
    method: str, url: object, timeout_s: float, tries: int, cause: BaseException | None
) -> DeadlineExceededError:
    """Return the error of a call that passed its deadline; ``cause`` is what failed last."""
    last = f"\nlast cause: {cause}" if cause is not None else "\nno answer came"
    return DeadlineExceededError(
        f"{method} {url} passed its deadline of {timeout_s:g} s after {tries} "
        f"{'try' if tries == 1 else 'tries'}{last}",
        explain=cause.explain if isinstance(cause, StokerError) else None,
    )
