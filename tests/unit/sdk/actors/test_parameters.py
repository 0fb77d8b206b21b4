"""What a method takes: the quick check decides as a call does, for every kind of parameter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stoker.runtime.actors.parameters import parameters_of


class Kinds:
    def nothing(self) -> None: ...
    def plain(self, a: int, b: int = 2) -> None: ...
    def only(self, a: int, /, b: int = 2) -> None: ...
    def only_and_names(self, a: int, /, **names: int) -> None: ...
    def named(self, a: int, *, b: int, c: int = 3) -> None: ...
    def rest(self, a: int, *rest: int, b: int = 2) -> None: ...
    def all(self, *rest: int, **names: int) -> None: ...
    def defaults(self, a: int = 1, /, b: int = 2, *, c: int = 3, **names: int) -> None: ...

    @staticmethod
    def static(a: int, b: int = 2) -> None: ...

    @classmethod
    def of_class(cls, a: int, *, c: int) -> None: ...


NAMES = [name for name in vars(Kinds) if not name.startswith("_")]
CALLS = [
    (args, dict.fromkeys(names, 0))
    for args in ((), (1,), (1, 2), (1, 2, 3))
    for count in range(4)
    for names in itertools.combinations("abcz", count)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_check_decides_as_a_call_does(name: str) -> None:
    parameters = parameters_of(Kinds, name)
    assert parameters is not None
    for args, kwargs in CALLS:
        right = takes(getattr(Kinds(), name), args, kwargs)
        assert parameters.fits(args, kwargs) is right, (args, kwargs)
        if not kwargs:
            assert (parameters.min_positional <= len(args) <= parameters.max_positional) is right, (
                args
            )
        if not right:
            with pytest.raises(TypeError, match="it takes"):
                parameters.check(args, kwargs, "call")


def takes(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        method(*args, **kwargs)
    except TypeError:
        return False
    return True


def test_a_descriptor_of_its_own_is_not_checked() -> None:
    class Adds:
        def __get__(self, instance: Any, owner: Any) -> Any:
            return lambda *args: args

    class Has:
        added = Adds()
        measured = len

    assert parameters_of(Has, "added") is None
    assert parameters_of(Has, "measured") is not None
