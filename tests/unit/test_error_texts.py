"""What an error says: one complete sentence first, evidence and the fix on further lines.

Every place that makes an error of the tree is read off the syntax tree, so that a first line which
carries evidence is named with its file and line; what is put together at run time is made here.
"""

from __future__ import annotations

import ast
import functools
import itertools
import pickle
import re
import subprocess
import sys
import textwrap
import types
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import exceptions
from stoker.exceptions import (
    GetTimeoutError,
    InfeasibleError,
    StokerError,
    UnavailableError,
    WorkerDiedError,
)
from stoker.runtime.actors.calls import fail_creation
from stoker.runtime.net.clients import death_error, node_died
from stoker.runtime.objects.table import Entry, describe_wait
from stoker.runtime.serialization.exceptions import decode_error, encode_exception
from stoker.runtime.tasks.task_spec import cancelled_error, error_for_task, start_deadline_error
from stoker_scheduler.core import commands
from stoker_wire import errors
from stoker_wire.messages.cluster import Node, NodeState, WorkerExit
from tests.unit.scheduler.core_driver import POLICY, Core, of
from tests.unit.test_architecture import check, sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLASSES = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, StokerError)
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LONGEST = 120
"""Of a first line, with a letter for each thing that it names."""
_CAUSES = r"(error|why|cause|last|reason|problem|death|said|holders|\w+\.message)\b"


# -- what the source says --------------------------------------------------------------------------


def texts(node: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yield what a message may be, with ``{source}`` for what is put in; nothing for a call."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            for chosen in itertools.product(*(tuple(put_in(part, names)) for part in parts)):
                yield "".join(chosen)
        case ast.BinOp(left=left, op=ast.Add()):
            yield from texts(left, {})  # what is added is behind the first line
        case ast.IfExp(body=body, orelse=other):
            yield from texts(body, names)
            yield from texts(other, names)
        case ast.Name(id=name):
            for value in names.get(name, ()):
                yield from texts(value, {})


def put_in(part: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yield what a part of an f-string may be; of a variable also what it is set to."""
    if not isinstance(part, ast.FormattedValue):
        yield from texts(part, names)
        return
    yield f"{{{ast.unparse(part.value)}}}"
    if isinstance(part.value, (ast.Name, ast.IfExp)):
        yield from texts(part.value, names)


def assigned_around(call: ast.Call, functions: list[Any]) -> dict[str, list[ast.expr]]:
    """Return what the variables of the innermost function around a call are set to."""
    around = [one for one in functions if one.lineno <= call.lineno <= one.end_lineno]
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(max(around, key=lambda one: one.lineno)) if around else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def faults(text: str) -> list[str]:
    """Return what is wrong with the first line of a message."""
    first = text.partition("\n")[0]
    plain = re.sub(r"\{[^{}]*\}", "x", first)
    found = {
        "is empty": not plain.strip(),
        "has a second clause": "; " in plain,
        "has a second sentence": re.search(r"[a-z)]\. [A-Za-z]", plain) is not None,
        "nests colons": plain.count(": ") > 1,
        "ends with a colon": plain.rstrip().endswith(":"),
        "carries a cause": re.search(r"[:(,] ?\{" + _CAUSES, first) is not None,
        "carries 64 digits": re.search(r"\{(package|digest|blob_id)(!r)?\}", first) is not None,
        f"is longer than {LONGEST}": len(plain) > LONGEST,
    }
    return [fault for fault, there in found.items() if there]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("the node is gone", True),
        ("labels: write a mapping\nso: {why}; and more", True),
        ("get() waited {t} s for {n} objects: {why}", False),
        ("infeasible: x fits nowhere: no node", False),
        ("the token is wrong; compare it", False),
        ("it is gone. Start it again", False),
        ("what came:", False),
        ("x " * 80, False),
    ],
)
def test_the_rule_knows_a_sentence_from_a_story(text: str, is_good: bool) -> None:
    assert (not faults(text)) is is_good


def test_every_error_that_is_made_begins_with_one_short_sentence() -> None:
    broken: list[str] = []
    made: set[str] = set()
    for source in sources():
        functions = [one for one in ast.walk(source.tree) if isinstance(one, FUNCTION)]
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name not in CLASSES and name != "error_for":
                continue
            for text in texts(node.args[-1], assigned_around(node, functions)):
                if name == "error_for" and not text:
                    continue  # only to know the class
                made.add(name)
                broken += [f"{source.at(node)}: {name} {fault}: {text!r}" for fault in faults(text)]
    check(broken, "an error begins with one short sentence; evidence is for further lines")
    assert len(made) > 25, "the rule reads the source"


# -- what is put together at run time --------------------------------------------------------------


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def is_sentence(text: str) -> bool:
    return text.endswith(".") and not faults(text.removesuffix("."))


CLAUSES = st.text("abcdefghij xyz()'_0123456789", min_size=1, max_size=60).map(
    lambda text: text.strip() or "it broke"
)


@given(st.sampled_from(sorted(CLASSES)), CLAUSES, st.lists(CLAUSES, max_size=3))
def test_the_text_of_every_class_is_a_sentence_and_its_evidence(
    name: str, clause: str, evidence: list[str]
) -> None:
    error = CLASSES[name]("\n".join([clause, *evidence]))
    assert str(error).split("\n") == [f"{clause}.", *evidence]
    assert error.one_line == "; ".join([clause, *evidence])
    assert str(CLASSES[name](f"{clause}.")) == f"{clause}."


def task(name: str = "train") -> Any:
    options = types.SimpleNamespace(start_deadline=0.5)
    spec = types.SimpleNamespace(name=name, options=options)
    return types.SimpleNamespace(spec=spec, task_id="t_ab12")


def node() -> Node:
    return Node(
        node_id="n_1", incarnation=1, state=NodeState.DEAD, url="http://h:1", unix="", hostname="h",
        host_id="h", pid=1, resources={}, devices=(), labels={}, version="0.1", arena_dir="",
        session_dir="", registered_at_s=0.0, reason="no heartbeat for 5 s; it is dead: gone",
    )  # fmt: skip


def infeasible(*nodes: dict[str, float]) -> InfeasibleError:
    core = Core(*nodes)
    core.ask(CPU=1, GPU=2, name="train")
    core.wait(POLICY.infeasible_grace_s + 1)
    (reject,) = of(commands.Reject, core.wait(1)) or of(commands.Reject, core.out)
    return error_for_task(task(), InfeasibleError(reject.text))


def get_timeout(missing: int = 5) -> GetTimeoutError:
    producer: Any = types.SimpleNamespace(name="f", task_id="t_1", describe=lambda: "why: {no}")
    told = describe_wait([Entry(f"o_{i}", task=producer) for i in range(missing)])
    return GetTimeoutError(f"get() waited 1 s for {missing} of 9 objects\n{told}")


def killed() -> WorkerDiedError:
    return death_error(
        WorkerExit(
            worker_id="w_1", node_id="n_1", pid=7, cause="killed by SIGKILL", signal=9,
            last_log_lines=("one: two; three",),
        )
    )  # fmt: skip


def unborn() -> StokerError:
    link: Any = types.SimpleNamespace(name="A", dead=None)
    link.mark_dead = functools.partial(setattr, link, "dead")
    fail_creation(link, UnavailableError("the gcs does not answer\nit said: no; go away"))
    return decode_error(link.dead)


@pytest.mark.parametrize(
    ("make", "evidence"),
    [
        (lambda: infeasible({"CPU": 1}), ["  n_1: ", "to start it: "]),
        (lambda: infeasible({"CPU": 4}, {"CPU": 2, "GPU": 1}), ["  n_1: ", "to start it: "]),
        (get_timeout, ["o_0 of f (t_1): why: {no}", "o_2 of f", "and 2 more"]),
        (lambda: get_timeout(1), ["o_0 of f"]),
        (killed, ["peak memory: 0 MiB", "one: two; three"]),
        (lambda: node_died(node(), "w_1"), ["no heartbeat for 5 s; it is dead: gone"]),
        (lambda: start_deadline_error(task(), "it waits: x; y"), ["it waits: x; y"]),
        (lambda: cancelled_error(task()), []),
        (unborn, ["the gcs does not answer", "it said: no; go away"]),
    ],
)
def test_what_is_put_together_begins_with_a_sentence(
    make: Callable[[], StokerError], evidence: list[str]
) -> None:
    error = make()
    assert is_sentence(first_line(error)), error
    for words in evidence:
        assert words in str(error)


@given(CLAUSES, st.lists(CLAUSES, max_size=2))
def test_what_a_task_raised_begins_with_a_sentence(clause: str, more: list[str]) -> None:
    told = decode_error(encode_exception(ValueError("\n".join([clause, *more])), task="f"))
    assert first_line(told) == f"task f raised ValueError: {clause}."
    assert (
        first_line(decode_error(encode_exception(ValueError(), task="f")))
        == "task f raised ValueError."
    )


# -- the public name -------------------------------------------------------------------------------


def in_python(program: str, *args: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(program), *args]
    return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)


def test_every_class_has_its_public_name() -> None:
    assert set(exceptions.__all__) == set(CLASSES)
    for name, cls in CLASSES.items():
        assert getattr(exceptions, name) is cls
        assert repr(cls) == f"<class 'stoker.exceptions.{name}'>"


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_errors_go_to_processes_that_have_imported_nothing(dumps: Callable[[Any], bytes]) -> None:
    told = [cls("it ended\nhow", field="f", extra={"n": 1}) for cls in CLASSES.values()]
    there = in_python(
        """
        import pickle, sys
        classes, told = pickle.loads(sys.stdin.buffer.read())
        assert [type(one) for one in told] == classes
        assert {(str(one), one.field, one.extra["n"]) for one in told} == {("it ended.\\nhow", "f", 1)}
        sys.stdout.buffer.write(pickle.dumps((classes, told)))
        """,
        data=dumps((list(CLASSES.values()), told)),
    )
    assert there.returncode == 0, there.stderr.decode()
    classes, back = pickle.loads(there.stdout)
    assert classes == list(CLASSES.values())
    assert [(type(one), str(one)) for one in back] == [(type(one), str(one)) for one in told]


def test_errors_come_from_processes_that_have_not_imported_stoker() -> None:
    here = in_python(
        """
        import pickle, sys
        from stoker_wire.errors import GetTimeoutError
        assert "stoker" not in sys.modules
        sys.stdout.buffer.write(pickle.dumps((GetTimeoutError, GetTimeoutError("too late"))))
        """
    )
    assert here.returncode == 0, here.stderr.decode()
    cls, error = pickle.loads(here.stdout)
    assert cls is type(error) is GetTimeoutError and str(error) == "too late."


def test_an_uncaught_error_shows_its_public_name_and_its_lines() -> None:
    done = in_python(
        """
        import stoker
        raise stoker.exceptions.GetTimeoutError("get() waited 1 s for 1 of 1 objects\\no_1: it runs")
        """
    )
    assert done.stderr.decode().splitlines()[-2:] == [
        "stoker.exceptions.GetTimeoutError: get() waited 1 s for 1 of 1 objects.",
        "o_1: it runs",
    ]
