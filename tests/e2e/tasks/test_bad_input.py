"""Bad input end to end: each mistake has one clear error at the right place, and nothing is left."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import (
    BadRequestError,
    RuntimeEnvSetupError,
    SerializationError,
    StokerError,
    TaskError,
    UnauthorizedError,
    UnknownOptionError,
)
from tests.e2e.conftest import Flags, get

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.usefixtures("cluster")


@stoker.remote
def same(value: Any) -> Any:
    return value


class Holder:
    def __init__(self) -> None:
        self.config = {"locks": [1, threading.Lock()]}


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"num_cpu": 1}, "num_cpus"),
        ({"num_gpu": 1}, "num_gpus"),
        ({"retries": 1}, "max_retries"),
        ({"time_out": 1}, "timeout"),
        ({"runtime_environment": {}}, "runtime_env"),
        ({"label_selectors": {}}, "label_selector"),
    ],
)
def test_an_unknown_option_names_the_nearest(options: dict[str, Any], near: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"did you mean '{near}'"):
        stoker.remote(**options)(lambda: None)
    with pytest.raises(UnknownOptionError, match=f"did you mean '{near}'"):
        same.options(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_cpus": -1},
        {"num_cpus": "two"},
        {"num_gpus": 1.5},
        {"num_returns": -1},
        {"num_returns": "many"},
        {"max_retries": -2},
        {"timeout": -1},
        {"resources": {"CPU": 1}},
        {"resources": {"disk": -1}},
        {"resources": ["disk"]},
        {"scheduling_strategy": "SPRAED"},
        {"on_infeasible": "shrug"},
        {"label_selector": {"zone": 5}},
        {"retry_exceptions": ["ValueError"]},
        {"num_cpus": float("nan")},
        {"num_cpus": float("inf")},
    ],
    ids=str,
)
def test_a_wrong_value_names_its_option(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(BadRequestError, match=name):
        same.options(**options).remote(1)


def test_remote_of_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="function or a class"):
        stoker.remote(5)  # type: ignore[call-overload]


@pytest.mark.parametrize("written", ["matches(x)", "in(a,, b)", "??==zone!", "in(", "!", ""])
def test_a_label_selector_that_cannot_be_read_fails_where_it_is_given(written: str) -> None:
    for give in (same.options, lambda **options: stoker.remote(**options)(Holder)):
        with pytest.raises(ValueError, match=r"(?s)label_selector.*zone=.*'!in\(a,b\)'"):
            give(label_selector={"zone": written})


def test_a_request_names_256_resources_at_most_a_node_thousands(driver: Callable[..., Any]) -> None:
    many = {f"r{i}": 1.0 for i in range(300)}
    for give in (same.options, lambda **options: stoker.remote(**options)(Holder)):
        with pytest.raises(ValueError, match=r"'resources'.* 300 names") as caught:
            give(resources=many)
        assert len(str(caught.value)) < 500
    done = driver(
        """
        import stoker
        names = {f"resource_{i}": i % 6 + 1 for i in range(10_000)}  # longer than an argument may be
        stoker.init(num_cpus=5, resources=names, log_to_driver=False)
        def f(): return 1
        refs = []
        for k in range(20):
            some = {f"resource_{i}": names[f"resource_{i}"] for i in range(k, 10_000, 50)}
            g = stoker.remote(resources=some)(f)
            refs += [g.remote() for _ in range(3)]
        print("ran", sum(stoker.get(refs, timeout=60)))
        """
    )
    assert "ran 60" in done.stdout, done.stdout + done.stderr


# -- calls -------------------------------------------------------------------------------------------


def test_calling_a_remote_function_directly_says_how_to_call_it() -> None:
    with pytest.raises(TypeError, match=r"same\.remote\(") as caught:
        same(1)
    assert "same.function" in str(caught.value)
    assert same.function(1) == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [((), {}, "missing"), ((1, 2), {}, "too many"), ((1,), {"other": 2}, "other")],
)
def test_wrong_arguments_fail_at_the_call(args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        same.remote(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: threading.Lock(), r"arguments of same\[0\]\[0\]"),
        (lambda: {"a": [threading.Lock()]}, r"\['a'\]\[0\]"),
        (lambda: Holder(), r"\.config\['locks'\]\[1\]"),
        (lambda: (x for x in ()), "generator"),
        (lambda: functools.partial(print, threading.Lock()), "partial"),
    ],
    ids=["itself", "nested", "attribute", "generator", "partial"],
)
def test_an_argument_that_does_not_pickle_names_the_members_path(
    make: Callable[[], Any], path: str
) -> None:
    with pytest.raises(SerializationError, match=path):
        same.remote(make())


def test_a_large_function_is_warned_of_once_and_its_largest_variable_named() -> None:
    large, small = bytes(11 << 20), b"small"

    @stoker.remote
    def closes_over() -> int:
        return len(large) + len(small)

    class Large:
        table = large

        def size(self) -> int:
            return len(self.table)

    with pytest.warns(
        UserWarning, match=r"closes_over is 11,.* bytes .*'large' alone has 11,534,336"
    ):
        assert get(closes_over.remote()) == (11 << 20) + 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get(closes_over.remote())
    with pytest.warns(UserWarning, match=r"class .*Large is .*'table'"):
        actor = stoker.remote(Large).remote()
    assert get(actor.size.remote()) == 11 << 20


def test_a_function_that_does_not_pickle_names_what_it_closes_over() -> None:
    lock = threading.Lock()

    @stoker.remote
    def locked() -> bool:
        return lock.locked()

    with pytest.raises(SerializationError, match="<closure lock>"):
        locked.remote()


def test_a_result_that_does_not_pickle_names_the_members_path() -> None:
    @stoker.remote
    def bad() -> Any:
        return {"fine": 1, "inner": [threading.Lock()]}

    with pytest.raises(SerializationError, match=r"result of .*bad\['inner'\]\[0\]"):
        get(bad.remote())


def test_put_of_what_does_not_pickle_names_the_members_path() -> None:
    with pytest.raises(SerializationError, match=r"value\['x'\]"):
        stoker.put({"x": threading.Lock()})


class Trap:
    """Pickles, and cannot be made again."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return _spring, (self.where,)


def _spring(where: str) -> None:
    raise RuntimeError(f"sprung {where}")


def test_a_result_that_the_driver_cannot_unpickle_says_why() -> None:
    @stoker.remote
    def trap() -> Trap:
        return Trap("at the driver")

    ref = trap.remote()
    with pytest.raises(SerializationError, match="RuntimeError: sprung at the driver") as caught:
        get(ref)
    assert ref.id in str(caught.value)
    assert get(same.remote(1)) == 1


def test_an_argument_that_the_worker_cannot_unpickle_says_why() -> None:
    for argument in (Trap("in the worker"), stoker.put([Trap("in the worker")])):
        with pytest.raises(SerializationError, match="RuntimeError: sprung in the worker"):
            get(same.remote(argument))
    assert get(same.remote(1)) == 1


def test_a_module_that_the_worker_lacks_is_named_with_the_way_out(tmp_path: Any) -> None:
    import importlib
    import sys

    (tmp_path / "only_here.py").write_text("def f():\n    return 1\nclass C: pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module("only_here")
        for call in (lambda: stoker.remote(module.f).remote(), lambda: same.remote(module.C())):
            with pytest.raises(SerializationError, match="only_here") as caught:
                get(call())
            assert "working_dir" in str(caught.value)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("only_here", None)


# -- runtime environments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"env_var": {"A": "b"}}, "env_vars"),
        ({"working_dir": "/no/such/folder"}, "/no/such/folder"),
        ({"py_modules": ["/no/such/module"]}, "/no/such/module"),
        ("working_dir", "runtime_env"),
    ],
    ids=str,
)
def test_a_wrong_runtime_env_fails_at_the_call(env: Any, said: str) -> None:
    with pytest.raises((BadRequestError, RuntimeEnvSetupError), match=said):
        same.options(runtime_env=env).remote(1)


@pytest.mark.logs(r"forkserver.*Traceback")
def test_a_preload_that_does_not_exist_fails_the_task(flags: Flags) -> None:
    with pytest.raises(StokerError, match="no_such_module_here"):
        get(same.options(runtime_env={"preload": ["no_such_module_here"]}, max_retries=0).remote(1))


# -- every wrong use -----------------------------------------------------------------------------------


@stoker.remote
class Idle:
    @stoker.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        return 1, 2


WRONG_USES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "get of a value": (lambda r: stoker.get(5), TypeError, "refs"),
    "get of text": (lambda r: stoker.get("o_1"), TypeError, "refs"),
    "get of None": (lambda r: stoker.get(None), TypeError, "refs"),
    "get of a list of values": (lambda r: stoker.get([r, 5]), TypeError, "refs[1]"),
    "get of lists in lists": (lambda r: stoker.get([[r]]), TypeError, "refs[0]"),
    "get for text": (lambda r: stoker.get(r, timeout="1"), TypeError, "timeout"),
    "get for True": (lambda r: stoker.get(r, timeout=True), TypeError, "timeout"),
    "get before now": (lambda r: stoker.get(r, timeout=-1), ValueError, "timeout"),
    "get for nan": (lambda r: stoker.get(r, timeout=float("nan")), ValueError, "timeout"),
    "wait of a ref": (lambda r: stoker.wait(r), TypeError, "refs"),
    "wait of nothing": (lambda r: stoker.wait([]), ValueError, "num_returns"),
    "wait of twice the same": (lambda r: stoker.wait([r, r]), ValueError, "refs"),
    "wait of a value": (lambda r: stoker.wait([r, None]), TypeError, "refs[1]"),
    "wait for none": (lambda r: stoker.wait([r], num_returns=0), ValueError, "num_returns"),
    "wait for more": (lambda r: stoker.wait([r], num_returns=2), ValueError, "num_returns"),
    "wait for half": (lambda r: stoker.wait([r], num_returns=0.5), TypeError, "num_returns"),
    "wait for text": (lambda r: stoker.wait([r], num_returns="1"), TypeError, "num_returns"),
    "wait before now": (lambda r: stoker.wait([r], timeout=-0.1), ValueError, "timeout"),
    "wait until text": (lambda r: stoker.wait([r], timeout="soon"), TypeError, "timeout"),
    "put of a ref": (lambda r: stoker.put(r), TypeError, "value"),
    "put of a lock": (lambda r: stoker.put(threading.Lock()), TypeError, ""),
    "a lock as an argument": (lambda r: same.remote(threading.Lock()), TypeError, ""),
    "cancel of a value": (lambda r: stoker.cancel(5), TypeError, "ref"),
    "cancel of a list": (lambda r: stoker.cancel([r]), TypeError, "ref"),
    "cancel of what was put": (lambda r: stoker.cancel(r), ValueError, "ref"),
    "kill of a ref": (lambda r: stoker.kill(r), TypeError, "actor"),
    "kill of a name": (lambda r: stoker.kill("actor"), TypeError, "actor"),
    "kill of a class": (lambda r: stoker.kill(Idle), TypeError, "actor"),
    "get_actor without a name": (lambda r: stoker.get_actor(None), TypeError, "name"),
    "get_actor of ''": (lambda r: stoker.get_actor(""), ValueError, "name"),
    "get_actor of blanks": (lambda r: stoker.get_actor("  "), ValueError, "name"),
    "get_actor of nobody": (lambda r: stoker.get_actor("nobody"), LookupError, "name"),
    "get_actor in ''": (lambda r: stoker.get_actor("a", namespace=""), ValueError, "namespace"),
    "get_actor in 5": (lambda r: stoker.get_actor("a", namespace=5), TypeError, "namespace"),
    "an actor in ''": (lambda r: Idle.options(namespace="").remote(), ValueError, "namespace"),
    "CPUs as text": (lambda r: same.options(num_cpus="1"), TypeError, "num_cpus"),
    "fewer CPUs than none": (lambda r: same.options(num_cpus=-1), ValueError, "num_cpus"),
    "1.5 GPUs": (lambda r: same.options(num_gpus=1.5).remote(1), ValueError, "num_gpus"),
    "resources as a list": (lambda r: same.options(resources=["x"]), TypeError, "resources"),
    "CPU as a resource": (
        lambda r: same.options(resources={"CPU": 1}).remote(1), ValueError, "resources",
    ),
    "an unknown option": (lambda r: same.options(num_cpu=1), TypeError, "num_cpu"),
    "retries of -2": (lambda r: same.options(max_retries=-2), ValueError, "max_retries"),
    "what to retry": (
        lambda r: same.options(retry_exceptions=[3]).remote(1), ValueError, "retry_exceptions",
    ),
    "a strategy": (
        lambda r: same.options(scheduling_strategy="PACKED").remote(1),
        ValueError,
        "scheduling_strategy",
    ),
    "a blank name": (lambda r: Idle.options(name=" "), ValueError, "name"),
    "a lifetime": (lambda r: Idle.options(lifetime="ever"), ValueError, "lifetime"),
    "no concurrency": (lambda r: Idle.options(max_concurrency=0), ValueError, "max_concurrency"),
    "a group that is not there": (
        lambda r: Idle.remote().two.options(concurrency_group="x"), ValueError, "concurrency_groups",
    ),
    "a constructor's arguments": (lambda r: Idle.remote(1), TypeError, ""),
    "too few arguments": (lambda r: same.remote(), TypeError, ""),
    "an option of a method": (lambda r: stoker.method(num_return=1), TypeError, "num_return"),
    "init twice": (lambda r: stoker.init(), RuntimeError, ""),
}  # fmt: skip


@pytest.mark.parametrize("use", WRONG_USES)
def test_a_wrong_use_is_the_builtin_error_and_names_its_field(use: str) -> None:
    wrong, kind, field = WRONG_USES[use]
    with pytest.raises(kind) as caught:
        wrong(stoker.put(1))
    assert not isinstance(caught.value, TimeoutError)
    if field:
        assert isinstance(caught.value, StokerError) and caught.value.field == field
    assert len(str(caught.value)) > 20


# -- init --------------------------------------------------------------------------------------------


def test_init_twice_says_what_to_do(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="ignore_reinit_error"):
        stoker.init()
    assert stoker.init(ignore_reinit_error=True).job_id == cluster.info.job_id


def test_mistakes_of_init_and_after_shutdown(cluster: Cluster, driver: Callable[..., Any]) -> None:
    done = driver(
        """
        import sys
        import stoker

        def says(*args, **kwargs):
            try:
                stoker.init(*args, **kwargs)
            except stoker.exceptions.StokerError as error:
                print("said:", type(error).__name__, error.one_line)

        says(sys.argv[1], token="wrong" * 8)
        says(sys.argv[1], token=sys.argv[2], num_cpus=2)
        says("http://127.0.0.1:9", token=sys.argv[2])
        says("auto")
        says("ftp://somewhere")
        says(num_cpus=-1)
        stoker.shutdown()
        stoker.init(num_cpus=1, num_gpus=0)
        ref = stoker.put(1)
        stoker.shutdown()
        for use in (lambda: stoker.get(ref), lambda: stoker.put(2)):
            try:
                use()
            except stoker.exceptions.StokerError as error:
                print("after:", error)
        stoker.init(num_cpus=1, num_gpus=0)
        print("again", stoker.get(stoker.remote(lambda: 5).remote(), timeout=40))
        """,
        cluster.info.address,
        cluster.info.token,
        timeout_s=90,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    assert len(said) == 6, done.stdout
    assert UnauthorizedError.__name__ in said[0]
    assert "num_cpus" in said[1]
    assert "127.0.0.1:9" in said[2]
    assert "stoker start" in said[3]
    assert "ftp" in said[4]
    assert "num_cpus" in said[5]
    assert done.stdout.count("after: stoker.shutdown() was called") == 2
    assert "again 5" in done.stdout


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (TypeError, {"memory": "1GB"}),
        (TypeError, {"num_cpus": True}),
        (TypeError, {"port": "x"}),
        (TypeError, {"resources": ["x"]}),
        (TypeError, {"resources": {"x": "1"}}),
        (TypeError, {"labels": {"zone": 5}}),
        (ValueError, {"memory": 1.5}),
        (ValueError, {"num_gpus": 1.5}),
        (ValueError, {"port": 70_000}),
        (ValueError, {"resources": {"x": -1}}),
        (ValueError, {"resources": {"x": float("nan")}}),
        (ValueError, {"resources": {"CPU": 1}}),
        (ValueError, {"labels": {f"l{i}": "" for i in range(300)}}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_of_init_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], given: dict[str, Any]
) -> None:
    monkeypatch.setattr(stoker.runtime.current.CURRENT, "runtime", None)
    monkeypatch.setattr("stoker.local.cluster.spawn_local", None)
    (name,) = given
    with pytest.raises(BadRequestError, match=name) as caught:
        stoker.init(**given)
    assert isinstance(caught.value, kind)
    assert caught.value.field == name


def test_bytes_and_counts_may_be_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def spawn_local(**offer: Any) -> None:
        raise Started(offer["memory"], offer["num_gpus"])

    monkeypatch.setattr(stoker.runtime.current.CURRENT, "runtime", None)
    monkeypatch.setattr("stoker.local.cluster.spawn_local", spawn_local)
    with pytest.raises(Started) as caught:
        stoker.init(memory=2e9, num_gpus=2.0)
    assert repr(caught.value.args) == "(2000000000, 2)"


def test_a_forked_child_is_told_that_it_has_no_connection(driver: Callable[..., Any]) -> None:
    done = driver(
        """
        import os, sys
        import stoker

        stoker.init(num_cpus=1, num_gpus=0)
        ref = stoker.put(1)
        pid = os.fork()
        if pid == 0:
            try:
                stoker.get(ref)
            except stoker.exceptions.StokerError as error:
                print("child:", error, flush=True)
            sys.exit(0)
        os.waitpid(pid, 0)
        print("parent", stoker.get(stoker.remote(lambda: 7).remote(), timeout=40))
        """
    )
    assert "child: this process was forked" in done.stdout, done.stdout + done.stderr
    assert "parent 7" in done.stdout, done.stdout + done.stderr


# -- what user code does to its worker ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["sys.exit(3)", "raise KeyboardInterrupt", "exit()", "quit(2)"])
def test_user_code_that_wants_to_exit_fails_its_task_only(how: str) -> None:
    @stoker.remote(max_retries=0)
    def leave() -> None:
        import sys

        exec(how, {"sys": sys, "exit": sys.exit, "quit": sys.exit})

    with pytest.raises(TaskError, match=r"SystemExit|KeyboardInterrupt"):
        get(leave.remote())
    assert get(same.remote(1)) == 1


def test_user_code_that_closes_its_output_hurts_only_itself() -> None:
    @stoker.remote
    def close() -> int:
        import os
        import sys

        sys.stdout.close()
        os.close(0)
        return 1

    @stoker.remote
    def prints() -> int:
        return print("still here") or 2  # noqa: T201

    assert get(close.remote()) == 1
    assert get([same.remote(i) for i in range(20)]) == list(range(20))
    assert get([prints.remote() for _ in range(20)]) == [2] * 20


def test_user_code_that_handles_signals_can_still_be_cancelled(flags: Flags) -> None:
    @stoker.remote
    def stubborn() -> None:
        import signal
        import time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        flags.raise_("runs")
        time.sleep(60)

    ref = stubborn.remote()
    flags.wait("runs")
    stoker.cancel(ref, force=True)
    with pytest.raises(stoker.exceptions.TaskCancelledError):
        get(ref)
