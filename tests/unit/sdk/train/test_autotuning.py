"""The driver's side of measuring: what is kept of the trials, and how it goes on after a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker.exceptions import BadRequestError, TaskTimeoutError, WorkerDiedError
from stoker.train import autotuning
from stoker.train.autotuning import MAX_RESTARTS, SLACK_S, START_S, autotune
from stoker_wire.messages.common import KernelSpec, RuntimeEnv
from stoker_wire.messages.kernels import TunedKernel, kernel_set, tuning_key

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTS = {"device": "NVIDIA H200", "torch": "2.13", "triton": "3.7", "least_seconds": 0.5}


def trial(number: int, state: str, seconds: float = 0.0, kernel: str = "k") -> dict[str, Any]:
    return {
        "kernel": kernel, "key": {"columns": 4}, "config": {"BLOCK": number}, "number": number,
        "count": 3, "state": state, "seconds": seconds, "low_seconds": seconds,
        "high_seconds": seconds, "note": "", "identity": f"{kernel}{number}",
    }  # fmt: skip


def measured(*seconds: float) -> list[dict[str, Any]]:
    """One choice whose candidates took so long."""
    found = []
    for number, each in enumerate(seconds, 1):
        found += [trial(number, "begun"), trial(number, "measured", each)]
    return found


class Tasks:
    """Plays tasks that yield the given things; an error among them ends the task."""

    def __init__(self, *plays: list[Any]) -> None:
        self.plays = list(plays)
        self.asked: list[tuple[Any, ...]] = []
        self.bounds: list[dict[str, float]] = []

    def options(self, **bounds: float) -> Tasks:
        self.bounds.append(bounds)
        return self

    def remote(self, *arguments: Any) -> Iterator[Any]:
        self.asked.append(arguments)
        return iter(self.plays.pop(0))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, TunedKernel]:
    found: dict[str, TunedKernel] = {}

    def put(key: str, value: bytes, *, namespace: str) -> bool:
        assert namespace == "stoker.kernels"
        found[key] = msgspec.json.decode(value, type=TunedKernel)
        return True

    monkeypatch.setattr(autotuning.kv, "put", put)
    return found


def play(monkeypatch: pytest.MonkeyPatch, *plays: list[Any]) -> Tasks:
    tasks = Tasks(*plays)

    def get(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(autotuning, "get", get)
    monkeypatch.setattr(autotuning, "_task", lambda *_: tasks)
    return tasks


def test_the_fastest_is_kept_by_kernel_shape_and_device(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    play(monkeypatch, [FACTS, *measured(3.0, 2.0, 2.5)])
    (kept,) = autotune("op", dtype="float32", columns=4)
    assert stored == {"NVIDIA H200/k/columns=4": kept}
    assert (kept.config, kept.seconds, kept.default_seconds) == ({"BLOCK": 2}, 2.0, 3.0)
    assert (kept.op, kept.dtype, kept.sizes) == ("op", "float32", {"columns": 4})
    assert (kept.candidates, kept.measured, kept.torch, kept.triton) == (3, 3, "2.13", "3.7")


def test_a_gain_within_the_noise_keeps_the_launchers_own(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    play(monkeypatch, [FACTS, *measured(1.0, 0.99, 1.2)])
    (kept,) = autotune("op")
    assert kept.config == {"BLOCK": 1}


def test_a_candidate_that_takes_its_process_down_is_out_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    told: list[dict[str, Any]] = []
    crash = WorkerDiedError("illegal address\nmore")
    tasks = play(
        monkeypatch,
        [FACTS, *measured(3.0), trial(2, "begun"), crash],
        [FACTS, trial(3, "begun"), trial(3, "measured", 1.0)],
    )
    (kept,) = autotune("op", progress=told.append)
    assert kept.config == {"BLOCK": 3} and kept.measured == 2
    assert [asked[4] for asked in tasks.asked] == [(), ("k1", "k2")]
    (failed,) = [one for one in told if one["state"] == "failed"]
    assert failed["number"] == 2 and failed["note"] == "WorkerDiedError: illegal address."


def test_a_task_is_ended_when_it_hangs_and_is_given_up_when_it_gets_no_gpu(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    hangs = TaskTimeoutError("ran longer than its timeout")
    tasks = play(
        monkeypatch,
        [FACTS, *measured(3.0), trial(2, "begun"), hangs],
        [FACTS, trial(3, "late")],
    )
    (kept,) = autotune("op", time_limit=50.0)
    assert kept.config == {"BLOCK": 1}
    first, second = tasks.bounds
    assert 50.0 < first["timeout"] <= 50.0 + SLACK_S and second["timeout"] <= first["timeout"]
    assert first["start_deadline"] == second["start_deadline"] == START_S


def test_measurements_of_two_kinds_of_devices_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    other = {**FACTS, "device": "NVIDIA A100"}
    play(
        monkeypatch,
        [FACTS, *measured(3.0), trial(2, "begun"), WorkerDiedError("gone")],
        [other, trial(3, "begun"), trial(3, "measured", 1.0)],
    )
    with pytest.raises(BadRequestError, match=r"NVIDIA A100 after .* NVIDIA H200: name one with"):
        autotune("op")
    assert not stored


def test_an_error_outside_a_candidate_or_of_the_launchers_own_is_the_callers(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    for told in ([], [FACTS], [FACTS, trial(1, "begun")], [FACTS, *measured(1.0, 2.0)]):
        play(monkeypatch, [*told, WorkerDiedError("gone")])
        with pytest.raises(WorkerDiedError):
            autotune("op")
    assert not stored


def test_it_does_not_go_on_for_ever(
    monkeypatch: pytest.MonkeyPatch, stored: dict[str, TunedKernel]
) -> None:
    crash = [FACTS, trial(2, "begun"), WorkerDiedError("gone")]
    tasks = play(monkeypatch, *[crash] * (MAX_RESTARTS + 1))
    with pytest.raises(WorkerDiedError):
        autotune("op")
    assert len(tasks.asked) == MAX_RESTARTS + 1


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"op": 3}, "op"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_gpus": 0.5}, "num_gpus"),
        ({"num_gpus": 0}, "num_gpus"),
        ({"time_limit": 0}, "time_limit"),
        ({"columns": 0}, "columns"),
        ({"columns": True}, "columns"),
    ],
)
def test_nonsense_fails_at_the_call(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        autotune(**{"op": "op", **arguments})
    assert raised.value.field == field


def test_the_names_that_all_components_agree_on() -> None:
    assert tuning_key("A B", "k", {"rows": 1, "dtype": "float32"}) == "A B/k/dtype=float32,rows=1"
    plain = RuntimeEnv(kernels=(KernelSpec(op="a", sizes={"x": 1, "y": 2}),))
    same = RuntimeEnv(kernels=(KernelSpec(op="a", sizes={"y": 2, "x": 1}),), working_dir="h1")
    assert kernel_set(RuntimeEnv(working_dir="h")) == ""
    assert kernel_set(plain) == kernel_set(same)  # an op's code does not lie in the folder
    assert kernel_set(plain) != kernel_set(RuntimeEnv(kernels=(KernelSpec(op="a"),)))
    calls = [RuntimeEnv(kernels=(KernelSpec(call="m:f"),), working_dir=h) for h in ("h1", "h2")]
    assert kernel_set(calls[0]) != kernel_set(calls[1])  # a user's function does
