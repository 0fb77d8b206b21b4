"""Values, exceptions and options as data: what goes in comes out, and what cannot says why."""

from __future__ import annotations

import threading
import types
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.api.options import (
    ActorOptions,
    NodeAffinity,
    TaskOptions,
    check_options,
    merged,
    resources_of,
    strategy_of,
)
from stoker.exceptions import (
    BadRequestError,
    GetTimeoutError,
    ObjectLostError,
    SerializationError,
    TaskError,
    UnknownOptionError,
    WorkerDiedError,
)
from stoker.runtime.objects.values import ValueStore
from stoker.runtime.serialization.exceptions import error_of, failed_by, failed_with, info_of
from stoker.runtime.serialization.pickling import pack, unpack
from stoker_wire.errors import DeadlineExceededError, StokerError, error_for
from stoker_wire.messages.data import Stored

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


# -- serialization and the arena -----------------------------------------------------------------------


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    packed = pack(value, what="value")
    assert unpack(packed.data, packed.buffers, what="value") == value


class Node:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def looped() -> Any:
    node = Node(None)
    node.inner = [node, threading.Lock()]
    return node


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: threading.Lock(), "value cannot"),
        (lambda: [1, {"k": threading.Lock()}], r"value\[1\]\['k'\]"),
        (lambda: Node(Node((1, threading.Lock()))), r"value\.inner\.inner\[1\]"),
        (looped, r"value\.inner\[1\]"),
    ],
    ids=["itself", "nested", "attributes", "loop"],
)
def test_the_member_at_fault_is_named_by_its_path(make: Any, path: str) -> None:
    with pytest.raises(SerializationError, match=path):
        pack(make(), what="value")


# -- failures ------------------------------------------------------------------------------------------


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
        first = error_of(failed_by(raised(first)))
        assert isinstance(first, (type(error), TaskError))
        assert isinstance(first, type(error))
        assert first.args == error.args
    assert str(first).count("remote traceback") == 1
    home = "" if type(error).__module__ == "builtins" else f"{type(error).__module__}."
    assert info_of(failed_by(first)).message.startswith(home + type(error).__qualname__)


def test_an_error_of_ours_keeps_its_class_text_and_facts() -> None:
    died = WorkerDiedError("killed", extra={"signal": 9})
    back = error_of(failed_with(died))
    assert type(back) is WorkerDiedError
    assert (back.message, back.extra) == ("killed", {"signal": 9})
    assert type(error_of(failed_by(raised(died)))) is WorkerDiedError


def test_an_error_of_ours_stands_for_its_code_whoever_derives_from_it() -> None:
    class Derived(BadRequestError):
        pass

    assert type(error_for("bad_request", "x")) is BadRequestError
    error_of(failed_by(raised(ValueError())))
    assert type(error_for("task_failed", "x")) is TaskError
    assert Derived("x").code == "bad_request"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_the_reader_arrives_as_a_plain_error(error: BaseException) -> None:
    back = error_of(failed_by(raised(error)))
    assert type(back) is TaskError
    assert type(error).__name__ in str(back)


# -- options -------------------------------------------------------------------------------------------


def test_options_are_checked_by_name_and_type() -> None:
    made = check_options(TaskOptions, {"num_cpus": 2, "timeout": 1.5}, what="f")
    assert (made.num_cpus, made.timeout, made.max_retries) == (2, 1.5, 3)
    assert merged(made, {"num_cpus": 3}, what="f").timeout == 1.5
    with pytest.raises(UnknownOptionError, match="did you mean 'max_restarts'"):
        check_options(ActorOptions, {"max_restart": 1}, what="class A")
    with pytest.raises(BadRequestError, match="option 'max_retries' of f is -2"):
        check_options(TaskOptions, {"max_retries": -2}, what="f")
    with pytest.raises(BadRequestError, match="'dynamic'; of texts it takes 'streaming'"):
        check_options(TaskOptions, {"num_returns": "dynamic"}, what="f")
    with pytest.raises(BadRequestError, match="takes 'detached' or 'non_detached'"):
        check_options(ActorOptions, {"lifetime": "x"}, what="class A")


class _Grouped:
    @stoker.method(concurrency_group="io")
    def read(self) -> None: ...


def test_a_methods_unknown_concurrency_group_is_an_error_at_the_decorator() -> None:
    with pytest.raises(BadRequestError, match=r"_Grouped\.read names the concurrency group 'io'"):
        stoker.remote(concurrency_groups={"compute": 1})(_Grouped)
    later = stoker.remote(_Grouped)  # its groups may still come
    with pytest.raises(BadRequestError, match=r"it has \['compute'\]"):
        later.options(concurrency_groups={"compute": 1})
    later.options(concurrency_groups={"io": 1})


def test_a_remote_class_has_no_subclasses_and_says_how_to_have_them() -> None:
    made = stoker.remote(_Grouped)
    with pytest.raises(TypeError, match=r"_Grouped is a remote class.*derive from _Grouped\.cls"):
        type("Child", types.resolve_bases((made,)), {})
    assert issubclass(type("Child", (made.cls,), {}), _Grouped)


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        ({}, {"CPU": 1.0}),
        ({"num_cpus": 0}, {}),
        ({"num_gpus": 0.5}, {"CPU": 1.0, "GPU": 0.5}),
        (
            {"memory": 100, "resources": {"disk": 2, "tape": 0}},
            {"CPU": 1, "memory": 100, "disk": 2},
        ),
    ],
    ids=str,
)
def test_options_become_resources(options: dict[str, Any], resources: dict[str, float]) -> None:
    made = check_options(TaskOptions, options, what="f")
    assert resources_of(made, default_cpus=1.0) == resources


@pytest.mark.parametrize(
    "options",
    [{"num_gpus": 1.5}, {"resources": {"GPU": 1}}, {"num_cpus": float("inf")}],
    ids=str,
)
def test_amounts_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        resources_of(check_options(TaskOptions, options, what="f"), default_cpus=1.0)


def test_strategies_are_names_or_affinities() -> None:
    assert strategy_of(NodeAffinity(node_id="n_1", soft=True)).node_id == "n_1"
    assert strategy_of(None) == strategy_of("DEFAULT")
    with pytest.raises(BadRequestError, match="SPREAD"):
        strategy_of("spread")


# -- values on another machine -----------------------------------------------------------------------


class FarAway:
    """Stands for a node whose memory is not ours and that is silent, and for all that leads to it."""

    def __init__(self) -> None:
        self.node = self
        self.url = "http://near:1"
        self.asked: list[tuple[str, float]] = []

    def arena_of(self, node_id: str) -> None:
        return None

    def read(self, object_id: str) -> None:
        raise ObjectLostError("not in this arena")

    def client_of(self, url: str) -> FarAway:
        return self

    def call(self, method: str, path: str, body: Any, *, reply: Any, timeout_s: float) -> str:
        return path

    def run(self, work: str, timeout_s: float) -> None:
        self.asked.append((work, timeout_s))
        raise DeadlineExceededError("a call passed its deadline")


def test_a_get_with_a_timeout_bounds_the_fetch_and_names_the_node() -> None:
    far = cast("Any", FarAway())
    values = ValueStore(far, far, far, far, far, far, inline_max_bytes=1, reclaim=lambda: False)
    location = Stored(5_000_000, "n_far", "http://far:1", (), "o_1")
    with pytest.raises(GetTimeoutError, match=r"(?s)o_1 .*5000000 bytes .* node n_far"):
        values.load(location, "o_1", 0.25)
    [(path, timeout_s)] = far.asked
    assert path == "/v1/objects/o_1/pull"
    assert 0 < timeout_s <= 0.25
