"""A driver that waits says what for: once per cause, truly, on stderr, and when it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.e2e._cluster import environment, head
from tests.e2e.conftest import start_driver

if TYPE_CHECKING:
    from pathlib import Path

Run = "Callable[..., subprocess.CompletedProcess[str]]"


def notices(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("stoker: ")]


def test_what_waits_for_resources_is_said_once_per_cause(driver: Run) -> None:
    done = driver(
        """
        import asyncio, os, time, stoker
        stoker.init(num_cpus=2, num_gpus=0)

        @stoker.remote(num_cpus=1)
        class Trainer:
            def fit(self, x): return x

        @stoker.remote
        def later(x): return x

        @stoker.remote
        def slow(begun): open(begun, "w").close(); time.sleep(2); return 1

        def came(refs):  # in short waits, of which nothing is said however slow the machine is
            while stoker.wait(refs, num_returns=len(refs), timeout=0.2)[1]: pass
            return stoker.get(refs)

        # Longer than the notice takes, but it runs: nothing to say.
        begun = os.path.abspath("begun")
        running = slow.remote(begun)
        while not os.path.exists(begun): time.sleep(0.01)
        assert stoker.get(running) == 1
        holders = [Trainer.remote() for _ in range(2)]
        came([h.fit.remote(0) for h in holders])
        more = [Trainer.remote() for _ in range(4)]
        refs = [m.fit.remote(1) for m in more]
        try: stoker.get(refs, timeout=4)
        except TimeoutError: pass
        stoker.wait(refs, num_returns=4, timeout=2)  # the same cause is not said again
        async def one(): return await later.remote(later.remote(2))
        try: asyncio.run(asyncio.wait_for(one(), 4))
        except TimeoutError: pass
        for one in (*more, *holders): stoker.kill(one)
        print(*came([later.remote(3)]))
        """,
        STOKER_WAIT_NOTICE_S="1",
    )
    assert done.stdout == "3\n", done.stderr
    said = notices(done.stderr)
    assert len(said) == 2, done.stderr
    actors, task = said
    said_of_actors = r"stoker: get\(\) has waited \d s for 4 calls \(Trainer\.fit\): Trainer: needs"
    assert re.match(said_of_actors, actors), actors
    assert (
        "needs 1 CPU, 0 CPU of 2 CPU is free" in actors and ". More: stoker explain job_" in actors
    )
    said_of_task = r"stoker: await has waited \d s for task later: later: needs 1 CPU"
    assert re.match(said_of_task, task), task
    assert ". More: stoker explain t_" in task


def test_a_constructor_that_takes_long_is_said(driver: Run) -> None:
    done = driver(
        """
        import io, sys, time, stoker
        stoker.init(num_cpus=1, num_gpus=0)

        @stoker.remote
        class Slow:
            def __init__(self): time.sleep(1000)
            def f(self): pass

        ref = Slow.remote().f.remote()
        before, sys.stderr = sys.stderr, io.StringIO()
        heard = sys.stderr
        while "runs its constructor" not in heard.getvalue():
            try: stoker.get(ref, timeout=1)
            except TimeoutError: pass
        sys.stderr = before
        print(heard.getvalue())
        """,
        STOKER_WAIT_NOTICE_S="0.5",
    )
    assert any("runs its constructor" in said for said in notices(done.stdout)), done.stderr


def test_what_a_call_waits_behind_is_followed_to_its_cause(driver: Run) -> None:
    done = driver(
        """
        import io, sys, stoker
        stoker.init(num_cpus=1, num_gpus=0)

        @stoker.remote(num_cpus=1)
        class Holder: pass

        @stoker.remote(num_cpus=1)
        def first(): return 1

        @stoker.remote(num_cpus=0.5)
        def second(): return 2

        @stoker.remote
        class A:
            def __init__(self, x=0): pass
            def f(self, x=0): return x

        def until_told(ref, name):
            for _ in range(60):
                if f"for task {name}: {name}: needs" in heard.getvalue():
                    return
                try: stoker.get(ref, timeout=1)
                except TimeoutError: pass

        holder, up = Holder.remote(), A.remote()
        stoker.get([holder.ready(), up.ready()])
        before, sys.stderr = sys.stderr, io.StringIO()
        heard = sys.stderr
        made = A.remote(first.remote())
        until_told(made.f.remote(), "first")
        ahead = up.f.remote(second.remote())
        behind = up.f.remote()
        until_told(behind, "second")
        sys.stderr = before
        print(heard.getvalue())
        """,
        STOKER_WAIT_NOTICE_S="0.5",
    )
    said = notices(done.stdout)
    assert len(said) == 2, done.stdout + done.stderr
    assert "for task first: first: needs 1 CPU, 0 CPU of 1 CPU is free" in said[0]
    assert "for task second: second: needs 0.5 CPU, 0 CPU of 1 CPU is free" in said[1]


def test_notices_can_be_turned_off(driver: Run) -> None:
    done = driver(
        """
        import stoker
        stoker.init(num_cpus=1, num_gpus=0)
        @stoker.remote(num_cpus=1)
        class A:
            def f(self): return 1
        a = A.remote(); stoker.get(a.f.remote())
        b = A.remote()
        try: stoker.get(b.f.remote(), timeout=2)
        except TimeoutError: print("timed out")
        """,
        STOKER_WAIT_NOTICE_S="0",
    )
    assert (done.stdout, notices(done.stderr)) == ("timed out\n", []), done.stderr


def test_an_interrupted_wait_says_what_it_waited_for(tmp_path: Path) -> None:
    process = start_driver(
        tmp_path,
        """
        import sys, stoker
        stoker.init(num_cpus=1, num_gpus=0)
        @stoker.remote(num_cpus=1)
        class A:
            def f(self): return 1
        a = A.remote(); stoker.get(a.f.remote())
        b = A.remote()
        print("now", file=sys.stderr, flush=True)
        stoker.get([b.f.remote(), b.f.remote()])
        """,
        STOKER_WAIT_NOTICE_S="0.5",
    )
    try:
        said = []
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "now\n" in said and line.startswith("stoker: get() has waited"):
                break
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()
    assert "KeyboardInterrupt\nstoker: get() had waited" in text, "".join(said) + text
    assert "for 2 of 2 objects: " in text and "A.f" in text
    frames = [line for line in text.splitlines() if line.startswith("  File ")]
    assert len(frames) == 2, text


def test_job_submit_says_what_its_driver_waits_for(tmp_path: Path) -> None:
    with head(tmp_path, num_cpus=1) as cluster:
        command = ["job", "submit", "--num-cpus", "100", "--", "true"]
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker.cli", *command],
            env=environment(cluster, STOKER_WAIT_NOTICE_S="0.5"),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if line.startswith("stoker: "))
        finally:
            process.kill()
            process.communicate()
    assert " has waited 0.5 s for its driver to start: " in said
    assert "More: stoker explain job_" in said
