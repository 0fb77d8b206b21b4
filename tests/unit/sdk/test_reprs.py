"""What users see when they print what ``@remote`` made."""

from __future__ import annotations

import stoker
from stoker.api.options import MethodOptions
from stoker.runtime.actors.handle import ActorHandle, HandleInfo, MethodInfo


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
