"""A GPU that was left comes back when its memory is free, and is quarantined when it is not."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_nodelet.core import LeaseTerms, Outbox, Policy, State, WorkKind, step
from stoker_nodelet.core.commands import (
    AnnounceLease,
    ForkWorker,
    ReadGpus,
    RefuseLease,
    ReportGpus,
)
from stoker_nodelet.core.events import (
    Event,
    GpuReading,
    GpuReleased,
    GpusRead,
    LeaseRequested,
    NodeRegistered,
    Ticked,
    WorkerExited,
    WorkerRegistered,
)
from stoker_nodelet.core.state import GpuEntry

STUCK = {4711: int(9.1 * (1 << 30)), 4712: 1 << 20}
LIMIT_S = 10.0


def a_state() -> State:
    return State(
        policy=Policy(warm_workers=0, gpu_free_s=LIMIT_S), gpus={0: GpuEntry(), 1: GpuEntry()}
    )


@dataclass
class Node:
    """A node of two GPUs, on which 99 runs since before there were leases."""

    state: State = field(default_factory=a_state)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.feed(NodeRegistered(incarnation=1))
        self.read({99: 1 << 30})

    def feed(self, event: Event) -> Outbox:
        commands = step(self.state, event)
        assert self.state.violations() == [], event
        return commands

    def ask(self, lease_id: str, gpus: dict[int, float]) -> Outbox:
        terms = LeaseTerms(
            lease_id=lease_id, job_id="job_1", kind=WorkKind.TASK, node_incarnation=1, gpus=gpus
        )
        return self.feed(
            LeaseRequested(
                at_s=self.at_s,
                lease=terms,
                epoch=1,
                env_key="",
                applicable_after_fork=True,
                worker_id=f"w_{lease_id}",
            )
        )

    def start(self, lease_id: str, gpus: dict[int, float]) -> None:
        assert isinstance(self.ask(lease_id, gpus)[0], ForkWorker)
        event = WorkerRegistered(at_s=self.at_s, worker_id=f"w_{lease_id}", pid=7)
        assert isinstance(self.feed(event)[0], AnnounceLease)

    def end(self, lease_id: str) -> Outbox:
        return self.feed(WorkerExited(at_s=self.at_s, worker_id=f"w_{lease_id}"))

    def read(self, processes: dict[int, int], index: int = 0, **more: object) -> Outbox:
        reading = GpuReading(processes=processes, **more)  # type: ignore[arg-type]
        return self.feed(GpusRead(at_s=self.at_s, readings={index: reading}))

    def why(self, index: int = 0) -> str:
        return self.state.gpus[index].quarantine


def test_the_next_lease_waits_until_the_memory_is_free_and_others_do_not_count() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    assert node.read({99: 1 << 30, 7: 1 << 33}) == [], "its own worker uses it"
    assert node.end("l_1") == [ReadGpus()]
    assert node.ask("l_2", {0: 1.0}) == []
    assert node.read({99: 1 << 30, 7: 1 << 33}) == []
    (forked,) = node.read({99: 1 << 30})
    assert isinstance(forked, ForkWorker), "the last of it is gone"


def test_a_measurement_that_began_before_the_end_proves_nothing() -> None:
    node = Node(at_s=5.0)
    node.start("l_1", {0: 1.0})
    node.end("l_1")
    node.ask("l_2", {0: 1.0})
    node.at_s = 4.9
    assert node.read({}) == []
    node.at_s = 5.1
    assert isinstance(node.read({})[0], ForkWorker)


def test_a_gpu_that_another_lease_shares_is_not_looked_at() -> None:
    node = Node()
    node.start("l_1", {0: 0.5})
    node.start("l_2", {0: 0.5})
    assert node.end("l_1") == []
    assert node.end("l_2") == [ReadGpus()]


def test_what_could_not_be_measured_says_nothing() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    node.read({}, ecc_errors=4)
    node.end("l_1")
    assert node.ask("l_2", {0: 1.0}) == []
    unknown = GpuReading(processes=None, xids=(43,))
    assert node.feed(GpusRead(at_s=node.at_s, readings={0: unknown})) == [], (
        "its memory is not free"
    )
    node.read({}, ecc_errors=4)
    assert node.why() == "", "a count that was not read for once has not risen"


def test_the_pid_of_a_process_that_used_it_before_counts_once_another_has_it() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    node.read({})
    node.end("l_1")
    node.ask("l_2", {0: 1.0})
    assert node.read({99: 1 << 30}) == [], "99 was there before, but is another one now"


def test_memory_that_stays_quarantines_the_gpu_until_it_is_free() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    node.end("l_1")
    node.ask("l_2", {0: 0.5})
    node.at_s = LIMIT_S
    assert node.read(STUCK) == []
    node.at_s += 1.0
    report, refused = node.feed(Ticked(at_s=node.at_s))
    assert report == ReportGpus()
    assert isinstance(refused, RefuseLease), "it would wait for ever"
    assert node.why() == "9.1 GiB are still allocated by pid 4711 and 1 more"
    assert node.why() in refused.message
    (refused,) = node.ask("l_3", {0: 1.0})
    assert isinstance(refused, RefuseLease) and "GPU 0 is quarantined" in refused.message
    node.start("l_4", {1: 1.0})
    assert node.read({}) == [ReportGpus()]
    assert node.why() == ""
    node.start("l_5", {0: 1.0})


def test_without_an_answer_of_the_driver_nobody_gets_the_gpu() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    node.end("l_1")
    assert node.feed(Ticked(at_s=LIMIT_S + 1)) == [ReportGpus()]
    assert "nobody can tell" in node.why()


def test_a_gpu_that_was_never_measured_is_free_at_once() -> None:
    node = Node()
    node.start("l_1", {1: 1.0})
    assert node.end("l_1") == []
    node.start("l_2", {1: 1.0})


def test_an_error_of_the_gpu_stays_until_an_operator_releases_it() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    assert node.read({}, xids=(13, 43)) == [], "a fault of the program"
    assert node.read({}, xids=(31, 79)) == [ReportGpus()]
    assert node.why() == "the driver reported XID 79"
    assert node.end("l_1") == []
    assert node.read({}) == [], "free memory does not heal it"
    assert node.feed(GpuReleased(at_s=0.0, index=0)) == [ReportGpus()]
    assert node.feed(GpuReleased(at_s=0.0, index=0)) == [], "it is in use"
    node.start("l_2", {0: 1.0})


def test_ecc_errors_count_from_the_start_on_and_a_lost_gpu_is_named() -> None:
    node = Node()
    assert node.read({}, index=1, ecc_errors=2) == []
    assert node.read({}, index=1, ecc_errors=2) == []
    assert node.read({}, index=1, ecc_errors=3) == [ReportGpus()]
    assert node.why(1) == "uncorrectable ECC errors rose from 2 to 3"
    assert node.read({}, lost="GPU is lost") == [ReportGpus()]
    assert node.why() == "the driver has lost it (GPU is lost)"


def test_what_an_operator_releases_may_keep_its_processes() -> None:
    node = Node()
    node.start("l_1", {0: 1.0})
    node.end("l_1")
    node.at_s = LIMIT_S + 1
    assert node.read(STUCK) == [ReportGpus()]
    node.feed(GpuReleased(at_s=node.at_s, index=0))
    node.start("l_2", {0: 1.0})
    node.end("l_2")
    assert node.read(STUCK) == []
    node.start("l_3", {0: 1.0})
