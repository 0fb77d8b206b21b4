"""Exceptions of tasks end to end: type, attributes, text and traceback arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, TaskError
from tests.e2e.conftest import get

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.usefixtures("cluster")


def test_an_exception_arrives_as_its_own_type_with_the_remote_traceback() -> None:
    @stoker.remote
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError) as caught:
        get(divide.remote(1, 0))
    assert isinstance(caught.value, TaskError)
    assert str(caught.value).startswith(f"task {divide.name} raised ZeroDivisionError: ")
    assert "remote traceback" in str(caught.value)
    assert "return a / b" in str(caught.value)
    assert "test_errors.py" in str(caught.value)
    assert "invocation.py" not in str(caught.value), "our own frames are left out"


class Strange(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.message = "mine"

    def __reduce__(self) -> Any:
        return _strange, (self.code, self.reason)


def _strange(code: int, reason: str) -> Strange:
    return Strange(code, reason=reason)


class Positional(Exception):
    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)
        self.first = first
        self.second = second


class Keyword(Exception):
    """Python's own pickling cannot bring this one back: ``__init__`` takes no positional argument."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.status = "mine"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    why: str
    when: int


class Quiet(OSError):
    pass


class MyExit(BaseException):
    """What a framework raises to leave all of the user's ``except Exception``."""


class ReadOnlyArgs(Exception):
    def __init__(self, message: str) -> None:
        self._message = message

    @property
    def args(self) -> Any:
        return (self._message,)


def check_exit(error: Any) -> None:
    assert error.args == ("out",) and type(error.cause) is MyExit


def check_read_only(error: Any) -> None:
    assert error.args == ("boom",) and type(error.cause) is ReadOnlyArgs


def check_strange(error: Any) -> None:
    assert (error.code, error.reason, error.message) == (418, "teapot", "mine")


def check_positional(error: Any) -> None:
    assert (error.first, error.second, error.args) == (1, "b", (1, "b"))


def check_keyword(error: Any) -> None:
    assert (error.code, error.status, error.args) == (7, "mine", ("code 7",))


def check_frozen(error: Any) -> None:
    assert (error.why, error.when) == ("because", 3)


def check_file(error: Any) -> None:
    assert (error.errno, error.filename, error.strerror) == (2, "/no/such", "No such file")


def check_unicode(error: Any) -> None:
    assert (error.encoding, error.object, error.start, error.end) == ("ascii", b"\xff", 0, 1)


def check_group(error: Any) -> None:
    assert [type(e) for e in error.exceptions] == [ValueError, KeyError]
    assert error.split(ValueError)[0] is not None


def check_import(error: Any) -> None:
    assert (error.name, error.path) == ("nothing_here", "somewhere")


def check_key(error: Any) -> None:
    assert error.args == ("the key",)


def check_stop(error: Any) -> None:
    assert error.value == 5


def check_syntax(error: Any) -> None:
    assert (error.filename, error.lineno) == ("f.py", 3)


def check_none(error: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "kind", "check"),
    [
        (lambda: Strange(418, reason="teapot"), Strange, check_strange),
        (lambda: Positional(1, "b"), Positional, check_positional),
        (lambda: Frozen("because", 3), Frozen, check_frozen),
        (lambda: Keyword(code=7), Keyword, check_keyword),
        (lambda: FileNotFoundError(2, "No such file", "/no/such"), FileNotFoundError, check_file),
        (lambda: Quiet(2, "No such file", "/no/such"), Quiet, check_file),
        (lambda: b"\xff".decode("ascii"), UnicodeDecodeError, check_unicode),
        (
            lambda: ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
            ExceptionGroup,
            check_group,
        ),
        (
            lambda: ModuleNotFoundError("no", name="nothing_here", path="somewhere"),
            ModuleNotFoundError,
            check_import,
        ),
        (lambda: KeyError("the key"), KeyError, check_key),
        (lambda: StopIteration(5), StopIteration, check_stop),
        (lambda: SyntaxError("bad", ("f.py", 3, 1, "x =")), SyntaxError, check_syntax),
        (lambda: stoker.exceptions.BadRequestError("by the user"), BadRequestError, check_none),
        (lambda: asyncio.CancelledError("stop"), TaskError, check_none),
        (lambda: GeneratorExit("stop"), TaskError, check_none),
        (lambda: SystemExit(3), TaskError, check_none),
        (lambda: MyExit("out"), MyExit, check_exit),
        (lambda: ReadOnlyArgs("boom"), ReadOnlyArgs, check_read_only),
        (lambda: KeyboardInterrupt(), TaskError, check_none),
        (lambda: TimeoutError("mine"), TimeoutError, check_none),
        (lambda: RecursionError("deep"), RecursionError, check_none),
        (lambda: MemoryError("big"), MemoryError, check_none),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_exceptions_of_all_shapes_keep_their_type_and_attributes(
    make: Callable[[], BaseException], kind: type[BaseException], check: Callable[[Any], None]
) -> None:
    @stoker.remote(max_retries=0)
    def fail() -> None:
        raise make()

    with pytest.raises(kind) as caught:
        get(fail.remote())
    check(caught.value)
    assert isinstance(caught.value, Exception)
    again = get(stoker.put([caught.value]))[0]
    assert isinstance(again, kind)
    check(again)


def test_an_exception_that_does_not_pickle_arrives_without_what_does_not() -> None:
    @stoker.remote
    def fail() -> None:
        error = ValueError("with a lock inside")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(ValueError, match=r"ValueError: with a lock inside") as caught:
        get(fail.remote())
    assert ".lock" in str(caught.value) and "builtins." not in str(caught.value)


def test_an_exception_that_the_driver_cannot_unpickle_arrives_with_its_name_and_text() -> None:
    @stoker.remote
    def fail(driver: int) -> None:
        class Trap(Exception):
            def __reduce__(self) -> Any:
                return eval, (f"1 / (__import__('os').getpid() - {driver})",)

        raise Trap("cannot come back")

    with pytest.raises(TaskError, match="cannot come back") as caught:
        get(fail.remote(os.getpid()))
    assert "could not be read back" in str(caught.value)


def test_a_huge_message_is_cut_and_keeps_its_type() -> None:
    @stoker.remote
    def fail() -> None:
        raise ValueError("x" * 3_000_000)

    with pytest.raises(ValueError, match=r"x{100}") as caught:
        get(fail.remote())
    assert len(str(caught.value)) < 100_000


def test_an_exception_whose_str_raises_arrives() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    @stoker.remote
    def fail() -> None:
        raise Rude

    with pytest.raises(Rude):
        get(fail.remote())


def test_endless_recursion_is_an_error_of_the_task_and_the_worker_lives() -> None:
    @stoker.remote(max_retries=0)
    def dive() -> int:
        def deeper(n: int) -> int:
            return deeper(n + 1)

        return deeper(0)

    with pytest.raises(RecursionError):
        get(dive.remote())


def test_a_nested_error_shows_both_tracebacks() -> None:
    @stoker.remote
    def inner() -> None:
        raise KeyError("lost")

    @stoker.remote
    def outer() -> None:
        stoker.get(inner.remote())

    with pytest.raises(KeyError) as caught:
        get(outer.remote())
    text = str(caught.value)
    assert 'raise KeyError("lost")' in text
    assert "stoker.get(inner.remote())" in text
    assert "api/calls.py" not in text and "objects/store.py" not in text


def test_get_of_many_raises_the_error_of_one() -> None:
    @stoker.remote
    def maybe(i: int) -> int:
        if i == 2:
            raise ValueError("number two")
        return i

    refs = [maybe.remote(i) for i in range(4)]
    with pytest.raises(ValueError, match="number two"):
        get(refs)
    assert get([refs[0], refs[3]]) == [0, 3]
