"""Exceptions as data and back: types, attributes, notes, groups and tracebacks survive the way."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from stoker.exceptions import (
    ActorDiedError,
    BadRequestError,
    StokerError,
    TaskError,
    WorkerDiedError,
)
from stoker.runtime.serialization.exceptions import (
    decode_error,
    encode_error,
    encode_exception,
    error_info,
)
from stoker_wire.errors import error_for


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def sent(error: BaseException, *, task: str = "f") -> StokerError:
    """Return what the caller of a task gets that raised ``error``."""
    return decode_error(encode_exception(_raised(error), task=task))


class ReadOnlyArgs(Exception):
    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def args(self) -> Any:
        return (self._text,)


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, *, code: int) -> None:
        super().__init__("slotted")
        self.code = code


class BadReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("bad")
        self.total = a + b

    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class WrongReduce(Exception):
    """Its ``__reduce__`` pickles, but what comes of it is an error."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("wrong")
        self.total = a + b

    def __reduce__(self) -> Any:
        return WrongReduce, (1,)


class FileProblem(OSError):
    def __init__(self, *, path: str) -> None:
        super().__init__(2, "gone", path)
        self.path = path


class Registered(Exception):
    made: tuple[str, ...] = ()

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        Registered.made += (name,)


class MyExit(BaseException):
    pass


class Both(ValueError, MemoryError):
    pass


class MyGroup(ExceptionGroup[Exception]):
    def derive(self, excs: Any) -> MyGroup:
        return MyGroup(self.message, excs)


def _locked() -> Exception:
    error = ValueError("locked", threading.Lock())
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.code = 5  # type: ignore[attr-defined]
    return error


CASES: dict[str, tuple[Callable[[], BaseException], Callable[[Any], bool]]] = {
    "read-only args": (lambda: ReadOnlyArgs("boom"), lambda e: e.args == ("boom",)),
    "slots": (lambda: Slotted(code=4), lambda e: e.code == 4),
    "__reduce__ raises": (lambda: BadReduce(1, 2), lambda e: e.total == 3),
    "__reduce__ is wrong": (lambda: WrongReduce(1, 2), lambda e: e.total == 3),
    "an OSError with an __init__": (
        lambda: FileProblem(path="/p"),
        lambda e: (e.errno, e.filename, e.path) == (2, "/p", "/p"),
    ),
    "__init_subclass__ with needs": (lambda: Registered("r"), lambda e: e.args == ("r",)),
    "a BaseException": (lambda: MyExit(3), lambda e: e.args == (3,)),
    "layouts of two": (lambda: Both("b"), lambda e: e.args == ("b",)),
    "attributes that do not pickle": (_locked, lambda e: e.code == 5 and e.args[0] == "locked"),
    "a group of what pickles badly": (
        lambda: MyGroup("g", [Slotted(code=1), BadReduce(1, 1)]),
        lambda e: [e.exceptions[0].code, e.exceptions[1].total] == [1, 2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_exception_of_any_shape_arrives_as_its_own_type(case: str) -> None:
    make, is_right = CASES[case]
    error: Any = sent(make())
    for _ in range(3):
        assert isinstance(error, type(make())) and isinstance(error, TaskError)
        assert is_right(error) and is_right(error.cause)
        assert type(error.cause) is type(make())
        error = pickle.loads(cloudpickle.dumps(error))
    again = sent(sent(error))
    assert isinstance(again, type(make())) and is_right(again)
    assert str(again).count("remote traceback") == 1
    assert Registered.made == ()


def test_what_was_left_behind_is_named() -> None:
    assert "left behind, as it cannot be pickled: .lock" in str(sent(_locked()))


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt("now"), GeneratorExit(), asyncio.CancelledError("stop")],
    ids=lambda error: type(error).__name__,
)
def test_what_would_end_the_reader_is_a_plain_task_error_with_its_cause(
    error: BaseException,
) -> None:
    found = sent(error)
    for _ in range(2):
        assert type(found) is TaskError
        assert type(found.cause) is type(error) and found.cause.args == error.args
        found = pickle.loads(pickle.dumps(found))
    assert type(sent(found)) is TaskError


def test_notes_arrive_once_whoever_pickles() -> None:
    class Strange(Exception):
        def __reduce__(self) -> Any:
            return Strange, ()

    for error in (ValueError("v"), Slotted(code=1), Strange()):
        error.add_note("look here")
        found = sent(sent(error))
        assert found.__notes__ == ["look here"]
        assert pickle.loads(cloudpickle.dumps(found)).__notes__ == ["look here"]
        assert str(found).count("look here") == 1, "in the remote traceback"


def test_a_group_splits_and_is_caught_in_parts() -> None:
    found = sent(MyGroup("several", [ValueError("a"), KeyError("b")]))
    seen: list[BaseException] = []
    try:
        raise found
    except* ValueError as group:
        seen += group.exceptions
    except* KeyError as group:
        seen += group.exceptions
    assert [type(one) for one in seen] == [ValueError, KeyError]
    matching, rest = found.split(ValueError)  # type: ignore[attr-defined]
    assert type(matching) is MyGroup and matching.message == "several"
    assert [type(one) for one in rest.exceptions] == [KeyError]


def test_a_group_that_holds_what_would_end_the_reader_keeps_it_as_its_cause() -> None:
    found = sent(BaseExceptionGroup("g", [ValueError("v"), KeyboardInterrupt()]))
    assert type(found) is TaskError
    assert isinstance(found.cause, BaseExceptionGroup)


def test_the_text_is_one_sentence_then_the_users_frames() -> None:
    def compute() -> float:
        return 1 / 0

    try:
        compute()
    except ZeroDivisionError as error:
        found = decode_error(encode_exception(error, task="divide"))
    text = str(found)
    assert text.startswith("task divide raised ZeroDivisionError: division by zero.\n\n")
    assert "return 1 / 0" in text and "builtins." not in text
    assert str(pickle.loads(pickle.dumps(found))) == text


def test_frames_of_ours_are_left_out_also_in_the_middle_and_in_causes() -> None:
    from stoker.runtime.serialization.pickling import unpack

    class Trap:
        def __reduce__(self) -> Any:
            return eval, ("1/0",)

    def user() -> None:
        try:
            unpack(cloudpickle.dumps(Trap()), (), what="value")
        except StokerError as error:
            raise KeyError("outer") from error

    try:
        user()
    except KeyError as error:
        text = str(decode_error(encode_exception(error)))
    assert "in user" in text and "outer" in text and "ZeroDivisionError" in text
    assert "serialization.py" not in text


def test_package_folders_are_shown_relative_to_the_working_dir() -> None:
    folder = f"/tmp/session/packages/{'0a' * 32}"
    code = compile(
        "def inner():\n    raise ValueError('x')\ninner()", f"{folder}/lib/mod.py", "exec"
    )
    try:
        exec(code, {})
    except ValueError as error:
        text = str(decode_error(encode_exception(error)))
    assert 'File "lib/mod.py", line 2, in inner' in text
    assert "0a0a" not in text


def test_an_exception_without_frames_of_users_has_no_empty_traceback() -> None:
    assert "Traceback" not in str(decode_error(encode_exception(ValueError("plain"))))


def test_an_error_of_ours_that_a_task_saw_is_that_error() -> None:
    assert type(sent(ActorDiedError("dead"))) is ActorDiedError


class Own(StokerError):
    """A user's error that derives from ours."""


@pytest.mark.parametrize(
    "error",
    [ValueError("a", 1), KeyError("k"), OSError(5, "io", "f"), Own("own"), RuntimeError()],
    ids=repr,
)
def test_a_users_exception_keeps_its_type_through_any_number_of_hops(error: Exception) -> None:
    first: BaseException = error
    for _ in range(4):
        first = decode_error(encode_exception(_raised(first)))
        assert isinstance(first, (type(error), TaskError))
        assert isinstance(first, type(error))
        assert first.args == error.args
    assert str(first).count("remote traceback") == 1
    home = "" if type(error).__module__ == "builtins" else f"{type(error).__module__}."
    assert error_info(encode_exception(first)).message.startswith(home + type(error).__qualname__)


def test_an_error_of_ours_keeps_its_class_text_and_facts() -> None:
    died = WorkerDiedError("killed", extra={"signal": 9})
    back = decode_error(encode_error(died))
    assert type(back) is WorkerDiedError
    assert (back.message, back.extra) == ("killed", {"signal": 9})
    assert type(decode_error(encode_exception(_raised(died)))) is WorkerDiedError


def test_an_error_of_ours_stands_for_its_code_whoever_derives_from_it() -> None:
    class Derived(BadRequestError):
        pass

    assert type(error_for("bad_request", "x")) is BadRequestError
    decode_error(encode_exception(_raised(ValueError())))
    assert type(error_for("task_failed", "x")) is TaskError
    assert Derived("x").code == "bad_request"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_the_reader_arrives_as_a_plain_error(error: BaseException) -> None:
    back = decode_error(encode_exception(_raised(error)))
    assert type(back) is TaskError
    assert type(error).__name__ in str(back)
