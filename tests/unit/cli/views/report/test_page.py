"""The report of a job as a page: whole, without requests, and with no text of a user's as a tag."""

from __future__ import annotations

from html.parser import HTMLParser

from stoker.cli.views.report.charts import STEPS
from stoker.cli.views.report.facts import Cause, Facts, alike
from stoker.cli.views.report.page import page
from stoker_wire.http.dashboard.figures import (
    CostPart,
    Durations,
    FunctionSummary,
    JobCost,
    Lane,
    TaskSummary,
    Timeline,
    Usage,
)
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.control import Explanation
from stoker_wire.messages.events import Story, StoryLine
from stoker_wire.messages.work import Job, JobAttempt, JobState

EVIL = "<script>alert('x')</script>\x1b[31m\x07"
SECRET = "hunter2"
VOID = {"meta"}


class Page(HTMLParser):
    """Tags and attributes of a page; fails where they are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def facts(*, spans: int = 3) -> Facts:
    job = Job(
        job_id="job_1", name=EVIL, entrypoint=EVIL, state=JobState.FAILED, submitted=True, namespace=EVIL,
        runtime_env=RuntimeEnv(env_vars={"PASSWORD": SECRET}), metadata={EVIL: EVIL}, resources={"CPU": 1.0},
        created_at_s=100.0, started_at_s=101.0, ended_at_s=161.0, exit_code=1, message=f"{EVIL}\n{EVIL}",
        attempt=2, attempts=(JobAttempt(attempt=1, started_at_s=101.0, ended_at_s=110.0, cause=EVIL),),
    )  # fmt: skip
    times = Durations(count=1, p50=1.0, p90=1.0, p99=1.0)
    function = FunctionSummary(
        key=EVIL, count=1, states={"FAILED": 1}, failures={EVIL: 1}, run_s=times, wait_s=Durations()
    )
    step_s = 60 / spans
    starts = [101.0 + i * step_s for i in range(spans)]
    lanes = (
        Lane(
            node_id="n", worker_id=EVIL, actor_id="", count=spans,
            spans=tuple((at, at + step_s, 0, 3 + i % 2, "t_1", 0) for i, at in enumerate(starts)),
        ),
        Lane(node_id="n", worker_id="w", actor_id="", count=1, busy=(0.0, 0.5, 1.0)),
    )  # fmt: skip
    states = ("WAITING", "QUEUED", "RUNNING", "FINISHED", "FAILED", "CANCELLED")
    return Facts(
        job=job,
        made_at_s=200.0,
        story=Story(id="job_1", kind="job", lines=(StoryLine(101.0, "job", "job_1", EVIL, EVIL),)),
        explanation=Explanation(subject="job_1", state="FAILED", summary=EVIL, remedy=EVIL),
        tasks=TaskSummary(items=(function,), states={"FAILED": 1}, total=1),
        cost=JobCost(
            job_id="job_1", cpu_s=7200.0, gpu_s=1800.0,
            parts=(CostPart(kind="function", id="", name=EVIL, cpu_s=7200.0, gpu_s=1800.0),),
        ),
        causes=[Cause("task", EVIL, "task_failed", f"{EVIL}\n  {EVIL}", "t_1", 3)],
        timeline=Timeline(101.0, 161.0, 20.0, 101.0, 161.0, lanes, (EVIL,), states),
        usage=Usage(
            step_s=30, at_s=(101.0, 131.0, 161.0),
            series={"cpu_used": (1.0, None, 2.0), "cpu_total": (4.0, 4.0, 4.0), "gpu_used": (0.0, 0.0, 0.0)},
        ),
        output=[EVIL, "see http://example.test"],
        actors={"DEAD": 1},
    )  # fmt: skip


def test_no_text_of_a_job_becomes_a_tag_and_nothing_is_loaded() -> None:
    text = page(facts())
    shown = Page(text)
    assert "script" not in shown.tags and "<script>alert" in shown.text
    assert not {name for name, _ in shown.attributes} & {
        "src",
        "href",
        "onclick",
        "onload",
        "srcset",
    }
    assert not any("url(" in value for _, value in shown.attributes) and "@import" not in text
    assert "\x1b" not in text and "\x07" not in text
    assert "default-src 'none'" in text


def test_values_of_environment_variables_are_left_out() -> None:
    assert SECRET not in page(facts())


def test_each_part_is_there() -> None:
    text = Page(page(facts())).text
    for title in (
        "Failures", "Explanation", "Attempts", "Tasks by function", "What workers ran",
        "The cluster meanwhile", "CPUs in use", "Cost", "0.5 GPU-hours, 2 CPU-hours",
        "Story", "Last lines of the driver",
    ):  # fmt: skip
        assert title in text
    assert "GPUs in use" not in text, "there are none"
    assert "(3 times)" in text and "1m00s" in text


def test_a_job_with_very_many_attempts_is_a_small_page() -> None:
    text = page(facts(spans=100_000))
    assert text.count("<rect") <= STEPS + 3


def test_a_job_of_which_little_is_known_has_a_page() -> None:
    full = facts()
    empty = Facts(
        job=Job(
            job_id="job_1", name="", entrypoint="x", state=JobState.RUNNING, submitted=False, namespace="d",
            runtime_env=RuntimeEnv(), metadata={}, resources={}, created_at_s=1.0,
        ),
        made_at_s=2.0, story=Story(id="job_1", kind="job"),
        explanation=Explanation(subject="job_1", state="RUNNING", summary=""),
        tasks=TaskSummary(items=(), states={}, total=0), causes=[],
        cost=JobCost(job_id="job_1", cpu_s=0.0, gpu_s=0.0, parts=()),
        timeline=Timeline(1.0, 2.0, 1.0, 1.0, 2.0, (), (), full.timeline.states),
        usage=None, output=[], actors={},
    )  # fmt: skip
    assert "its driver ran by itself" in Page(page(empty)).text


def test_failures_with_one_first_line_are_one() -> None:
    found = alike(
        Cause("task", name, "task_failed", f"{why}\n{i}", f"t_{i}")
        for i, (name, why) in enumerate([("f", "a"), ("g", "a"), ("g", "a"), ("g", "b")])
    )
    assert [(one.name, one.message[0], one.count) for one in found] == [
        ("g", "a", 2), ("f", "a", 1), ("g", "b", 1),
    ]  # fmt: skip
