"""Every error keeps its class, message, field and facts over pickle and over a real connection."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import aiohttp
import pytest

from stoker_wire import errors
from stoker_wire.errors import StokerError, error_for
from stoker_wire.http.error_pages.page import PAGES, page_of, summary_of
from stoker_wire.http.problems import error_of

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Request
    from tests.unit.wire.conftest import Cluster


def _all(cls: type[StokerError]) -> list[type[StokerError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        if vars(errors).get(sub.__name__) is sub:
            found += _all(sub)
    return found


CLASSES = list(dict.fromkeys(_all(StokerError)))

BUILTINS: dict[type[StokerError], tuple[type[Exception], ...]] = {
    errors.BadRequestError: (ValueError,),
    errors.WrongTypeError: (TypeError, ValueError),
    errors.UnknownOptionError: (TypeError, ValueError),
    errors.UnauthorizedError: (PermissionError,),
    errors.ForbiddenError: (PermissionError,),
    errors.NotFoundError: (LookupError, ValueError),
    errors.ConflictError: (RuntimeError,),
    errors.NameTakenError: (RuntimeError, ValueError),
    errors.FencedError: (RuntimeError,),
    errors.NotLeaderError: (RuntimeError,),
    errors.IdempotencyError: (RuntimeError,),
    errors.ProtocolError: (RuntimeError,),
    errors.CompactedError: (LookupError,),
    errors.InfeasibleError: (RuntimeError,),
    errors.JobFinishedError: (RuntimeError,),
    errors.PlacementGroupRemovedError: (RuntimeError,),
    errors.RuntimeEnvSetupError: (RuntimeError,),
    errors.PayloadTooLargeError: (ValueError,),
    errors.UnsupportedEncodingError: (ValueError,),
    errors.RateLimitedError: (RuntimeError,),
    errors.PendingCallsLimitError: (RuntimeError,),
    errors.UnavailableError: (ConnectionError,),
    errors.NotReadyError: (ConnectionError,),
    errors.ForeignPortError: (ConnectionError,),
    errors.TlsError: (ConnectionError,),
    errors.DeadlineExceededError: (TimeoutError,),
    errors.GetTimeoutError: (TimeoutError,),
    errors.ArenaFullError: (MemoryError,),
    errors.StartError: (RuntimeError,),
    errors.PortInUseError: (RuntimeError, OSError),
    errors.OpenBindError: (RuntimeError, ValueError),
    errors.DatabaseError: (RuntimeError,),
    errors.InternalError: (RuntimeError,),
    errors.SerializationError: (TypeError,),
    errors.TaskCancelledError: (RuntimeError,),
    errors.TaskTimeoutError: (TimeoutError,),
    errors.PreemptedError: (ConnectionError,),
    errors.WorkerDiedError: (ConnectionError,),
    errors.OutOfMemoryError: (ConnectionError, MemoryError),
    errors.ActorError: (ConnectionError,),
    errors.ActorDiedError: (ConnectionError,),
    errors.ActorUnavailableError: (ConnectionError,),
    errors.ObjectLostError: (LookupError,),
    errors.OwnerDiedError: (LookupError, ConnectionError),
    errors.ObjectFreedError: (LookupError,),
    errors.NodeDiedError: (ConnectionError,),
    errors.ObjectNodeDiedError: (LookupError, ConnectionError),
}
NO_BUILTINS = {
    StokerError: "the root",
    errors.WorkFailedError: "the root of what can happen to work",
    errors.TaskError: "it is the user's own type",
}


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in CLASSES]
    assert sorted(codes) == sorted(set(codes))
    assert all("code" in vars(cls) for cls in CLASSES), "no class travels as another"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_an_error_is_the_builtin_that_a_programmer_expects(cls: type[StokerError]) -> None:
    expected = BUILTINS.get(cls, ())
    assert bool(expected) != (cls in NO_BUILTINS)
    kinds = (ValueError, TypeError, LookupError, RuntimeError, OSError, MemoryError)
    found = {kind for kind in kinds if issubclass(cls, kind)}
    assert found == {kind for kind in kinds if any(issubclass(e, kind) for e in expected)}
    assert all(issubclass(cls, kind) for kind in expected)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_the_text_of_an_error_begins_with_a_sentence(cls: type[StokerError]) -> None:
    assert str(cls("no such thing")) == "no such thing."
    assert str(cls("what came:\n  evidence")) == "what came:\n  evidence"
    assert str(cls("it ended\n  evidence")) == "it ended.\n  evidence"
    assert str(cls("why? who knows.")) == "why? who knows."
    assert str(cls()) == ""


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.code)
def test_an_error_survives_pickle(cls: type[StokerError]) -> None:
    error = error_for(cls.code, "what", field="a.b", explain="/v1/x", extra={"n": [1]})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) is cls
    assert (str(copy), copy.field, copy.explain, copy.extra) == (
        "what.", "a.b", "/v1/x", {"n": [1]},
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(copy)).message == copy.message == "what"


async def test_every_error_is_raised_again_at_the_client(cluster: Cluster) -> None:
    service = cluster.service()

    async def fail(req: Request) -> None:
        raise error_for(
            req.path["code"], "what went wrong", field="f", explain="/v1/why", extra={"n": 1}
        )

    service.route("POST", "/v1/fail/{code}", fail, summary="Fails.")
    client = cluster.client(await cluster.start(service))
    for cls in CLASSES:
        with pytest.raises(StokerError) as caught:
            await client.call("POST", f"/v1/fail/{cls.code}", retry=False)
        error = caught.value
        assert type(error) is cls
        assert (error.message, error.field, error.explain) == ("what went wrong", "f", "/v1/why")
        assert error.extra == {"n": 1}


async def test_a_problem_document_has_all_its_members(cluster: Cluster) -> None:
    service = cluster.service()

    async def fail(req: Request) -> None:
        raise errors.UnavailableError("not now", explain="/v1/why")

    service.route("GET", "/v1/fail", fail, summary="Fails.")
    client = cluster.client(await cluster.start(service))
    session = client.session
    async with session.get(f"{service.url}/v1/fail", headers={"X-Request-Id": "mine-1"}) as reply:
        assert (reply.status, reply.content_type) == (503, "application/problem+json")
        assert (reply.headers["Retry-After"], reply.headers["X-Request-Id"]) == ("1", "mine-1")
        assert await reply.json(content_type=None) == {
            "type": "urn:stoker:error:unavailable",
            "title": "Unavailable",
            "status": 503,
            "detail": "not now",
            "code": "unavailable",
            "docs": "/errors/unavailable",
            "retryable": True,
            "explain": "/v1/why",
            "request_id": "mine-1",
        }


async def test_a_problem_document_leads_to_a_page_that_needs_no_token(cluster: Cluster) -> None:
    service = await cluster.start(cluster.service())
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{service.url}/v1/secret") as refused:
            problem = await refused.json(content_type=None)
        assert (refused.status, problem["docs"]) == (401, "/errors/unauthorized")
        async with session.get(f"{service.url}{problem['docs']}") as page:
            assert (page.status, page.content_type) == (200, "text/plain")
            assert (await page.text()).startswith("# unauthorized\n")
        async with session.get(f"{service.url}/errors/no_such_code") as missing:
            assert missing.status == 404


def test_every_code_has_a_page_with_all_its_parts() -> None:
    assert set(PAGES) == {cls.code for cls in CLASSES} | {StokerError.code}
    for code, texts in PAGES.items():
        page = page_of(code)
        assert all(f"\n## {part}\n" in page for part in ("Cause", "Fix", "Example"))
        assert texts.cause.endswith(".")
        assert texts.fix.endswith(".")
        assert summary_of(code).endswith((".", ":", ";")), code


@pytest.mark.parametrize(
    ("status", "expected"), [(502, errors.UnavailableError), (500, errors.InternalError)]
)
def test_a_proxys_page_becomes_an_error_that_quotes_it(
    status: int, expected: type[StokerError]
) -> None:
    error = error_of(b"<h1>Bad gateway</h1>", status=status, source="GET http://x/")
    assert type(error) is expected
    assert "Bad gateway" in str(error)


def test_a_code_from_the_future_is_still_an_error() -> None:
    assert (
        type(error_of(b'{"code":"from_2050","detail":"d"}', status=400, source="s")) is StokerError
    )
