"""The hash of a function changes with all that it refers to in its module, and with nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from stoker.api.function_digest import digest_of

MODULE = """
    import enum, functools, math, re
    import numpy as np

    FACTOR = 3
    TABLE = {"a": [1, 2.5], "b": frozenset({"x", "y"})}
    WEIGHTS = np.arange(4.0)
    HANDLERS = {"double": lambda x: x + x}
    PATTERN = re.compile("a+")
    UNUSED = 1

    class Base:
        offset = 1
        def step(self, x):
            return x + self.offset

    class Step(Base):
        @staticmethod
        def twice(x):
            return 2 * x

    class Mode(enum.Enum):
        FAST = 1

    def leaf(x):
        return x - 1

    @functools.lru_cache
    def helper(x):
        return leaf(x) + FACTOR

    def rest(x, seen=(1,)):
        # a comment
        return [HANDLERS["double"](y) for y in TABLE["a"] if x in {"p", "q", "r"}], PATTERN, Mode.FAST

    def f(x):
        return helper(x), Step().step(x), WEIGHTS, rest(x), math.pi, f
"""


def digest(source: str) -> bytes:
    """The hash of ``f`` in a module of this source."""
    module: dict[str, Any] = {"__name__": "work"}
    exec(textwrap.dedent(source), module)
    return digest_of(module["f"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 3", "FACTOR = 4"),
        ("FACTOR = 3", "FACTOR = 3.0"),
        ("2.5", "2.25"),
        ("np.arange(4.0)", "np.arange(1, 5.0)"),
        ("x + x", "x * 2"),
        ('"a+"', '"a*"'),
        ("offset = 1", "offset = 2"),
        ("x + self.offset", "self.offset + x"),
        ("return 2 * x", "return 3 * x"),
        ("FAST = 1", "FAST = 2"),
        ("return x - 1", "return x - 2"),
        ("seen=(1,)", "seen=(2,)"),
        ('"p", "q"', '"p", "s"'),
    ],
)
def test_whatever_a_function_refers_to_in_its_module_counts(old: str, new: str) -> None:
    assert MODULE.count(old) == 1
    assert digest(MODULE) != digest(MODULE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("UNUSED = 1", "UNUSED = 2"),
        ("# a comment", "# another"),
        ("def leaf", "\n    def leaf"),
        ('frozenset({"x", "y"})', 'frozenset({"y", "x"})'),
    ],
)
def test_what_a_function_does_not_refer_to_does_not_count(old: str, new: str) -> None:
    assert MODULE.count(old) == 1
    assert digest(MODULE) == digest(MODULE.replace(old, new))


def test_what_a_function_closes_over_counts_whatever_it_is() -> None:
    def adding(amount: Any) -> Any:
        return lambda x: x + amount

    class Amount:
        def __init__(self, value: int) -> None:
            self.value = value

    assert digest_of(adding(1)) == digest_of(adding(1)) != digest_of(adding(2))
    assert digest_of(adding(Amount(1))) != digest_of(adding(Amount(2)))
    large = [bytearray(1 << 20), bytearray(b"1" * (1 << 20))]
    assert digest_of(adding(large[0])) != digest_of(adding(large[1]))


def test_a_hash_does_not_depend_on_the_process() -> None:
    program = f"""
        import sys
        from stoker.api.function_digest import digest_of
        module = {{"__name__": "work"}}
        exec({textwrap.dedent(MODULE)!r}, module)
        print(digest_of(module["f"]).hex())
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_values_that_contain_themselves_and_large_ones_are_hashed() -> None:
    source = """
        import threading
        LOCK = threading.Lock()
        LOOP = [{loop}]
        LOOP.append(LOOP)
        LARGE = list(range({length}))
        def f(x):
            return LOCK, LOOP, LARGE
    """
    first = digest(source.format(loop=1, length=200_000))
    assert first == digest(source.format(loop=1, length=200_000))
    assert first != digest(source.format(loop=2, length=200_000))
    assert first != digest(source.format(loop=1, length=200_001))


def test_what_is_no_function_has_a_hash_too() -> None:
    assert digest_of(len) == digest_of(len) != digest_of(abs)
