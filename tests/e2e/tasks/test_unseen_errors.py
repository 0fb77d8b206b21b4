"""An error that nobody got is told once, when the last ref to it goes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

PROGRAM = """
import contextlib, time
import stoker
from tests.services import until
stoker.init(num_cpus=2, num_gpus=0)

def open_tasks():
    pending = list(stoker.runtime.current.runtime().pending.by_id.values())
    return [task for task in pending if task.spec.name != "A.f"]

def has_told():
    unseen = stoker.runtime.current.runtime().objects.unseen
    return unseen._reported_at_s > 0 or not unseen._enabled

@stoker.remote(max_retries=0)
def bad(name):
    raise ValueError(name)

@stoker.remote
def after(x): return x

@stoker.remote
def nested():
    bad.options(name="inner").remote("of a task of a task")
    until(lambda: not open_tasks() and has_told(), 40, "this worker has told of it")

@stoker.remote(num_returns=2)
def two(): raise ValueError("of two refs")

@stoker.remote
class A:
    def f(self): time.sleep(60)

def told(): # what is to be told
    bad.options(name="dropped").remote("nobody looked")
    after.remote(bad.options(name="chain").remote("of an argument"))
    two.remote()
    [bad.options(name="many").remote("alike") for _ in range(20)]
    stoker.get(nested.remote())

def silent():
    for call in (
        lambda: stoker.get(bad.remote("silent")),
        lambda: stoker.get([bad.remote("silent") for _ in range(3)]),
        lambda: stoker.get(after.remote(bad.remote("silent"))),
        lambda: bad.remote("silent").future().result(),
        lambda: stoker.wait([bad.remote("silent")]),
    ):
        with contextlib.suppress(ValueError): call()
    refs = two.remote()
    with contextlib.suppress(ValueError): stoker.get(refs[1])
    hung = after.remote(A.remote().f.remote())
    stoker.cancel(hung)
    a = A.remote()
    killed = a.f.remote()
    stoker.kill(a)
    b = A.remote()
    stoker.get(b.ready())
    sent = b.f.remote()
    time.sleep(0.3)
    stoker.kill(b)

silent()
told()
held = bad.options(name="held").remote("until the end")
pending = A.remote().f.remote()
until(lambda: not open_tasks(), 40, "all that fails has failed")
time.sleep(0.5)
print("end")
"""


def test_each_error_that_nobody_got_is_told_once(
    driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = driver(PROGRAM)
    assert "end\n" in done.stdout, done.stderr
    lines: Any = [line for line in done.stderr.splitlines() if "stoker: task" in line]
    found = sorted({line.partition("stoker: task ")[2].split()[0] for line in lines})
    assert found == ["chain", "dropped", "held", "inner", "many", "two"], done.stderr
    by_name = {line.partition("stoker: task ")[2].split()[0]: line for line in lines}
    assert "ValueError: nobody looked" in by_name["dropped"]
    assert "STOKER_LOG_UNSEEN_ERRORS=0" in by_name["dropped"]
    many = [line for line in lines if "task many" in line]
    counts = [re.search(r" and (\d+) more\)", line) for line in many]
    assert sum(int(c[1]) + 1 if c else 1 for c in counts) == 20 and len(many) < 8, done.stderr
    assert len(lines) - len(many) == 5, done.stderr
    assert " pid=" in by_name["inner"], "a worker tells it on its stderr"
    assert "silent" not in done.stderr
    assert "ActorDiedError" not in done.stderr, "whoever killed an actor knows"


def test_it_can_be_turned_off(driver: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = driver(PROGRAM, STOKER_LOG_UNSEEN_ERRORS="0")
    assert "end\n" in done.stdout and "nobody got" not in done.stderr, done.stderr
