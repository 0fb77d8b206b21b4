"""Remote classes and handles: what they refuse, and how they print."""

from __future__ import annotations

import types

import pytest

import stoker
from stoker.exceptions import BadRequestError
from stoker.runtime.actors.handle import ActorHandle, HandleInfo, MethodInfo
from stoker.runtime.options.actor_options import MethodOptions


@stoker.remote
def square(x: int) -> int:
    return x * x


@stoker.remote
class Counter:
    def add(self) -> None:
        pass


def test_functions_and_classes_say_what_they_are() -> None:
    assert repr(square) == "<stoker.remote function square>"
    assert repr(square.options(name="other")) == "<stoker.remote function other>"
    assert repr(Counter) == "<stoker.remote class Counter>"
    info = HandleInfo(
        "a_1", "Counter", {"add": MethodInfo(MethodOptions(), generates=False)}, 0, -1
    )
    handle = ActorHandle[object](info)
    assert repr(handle) == "Actor(Counter, a_1)"
    assert repr(handle.add) == "<stoker.remote method Counter.add of a_1>"


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
