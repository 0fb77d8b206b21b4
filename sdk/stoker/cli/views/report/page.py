"""The report of a job as one HTML file that needs nothing else: no script, no request, all text escaped."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from stoker.cli.output import duration, hours, resources
from stoker.cli.views.report.charts import LANES, timeline_chart, usage_chart
from stoker.cli.views.report.facts import TAIL
from stoker.cli.views.report.markup import Markup, joined, table, tag

if TYPE_CHECKING:
    from stoker.cli.views.report.facts import Cause, Facts
    from stoker_wire.http.dashboard.figures import Durations

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: 2px 14px 2px 0; vertical-align: top; } th { color: var(--dim); }
pre { font-size: 12px; overflow-x: auto; background: #8881; padding: 8px; }
.dim { color: var(--dim); } .bad { color: #d33; } .good { color: #2a2; }
svg text { font: 10px monospace; fill: currentColor; }
.finished { fill: #3a9; } .running { fill: #48c; } .failed { fill: #d33; } .cancelled { fill: #999; }
.axis { stroke: var(--line); } polyline { fill: none; stroke-width: 1.5; }
.used { stroke: #3a9; } .most { stroke: var(--dim); stroke-dasharray: 4; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_GOOD = ("SUCCEEDED", "FINISHED", "RUNNING")
_BAD = ("FAILED", "DEAD", "INFEASIBLE")
PARTS = 30
"""Parts of the cost that are shown, those with the most GPUs."""
_CHARTS = (
    ("CPUs in use", "cpu_used", "cpu_total"),
    ("GPUs in use", "gpu_used", "gpu_total"),
    ("Tasks that ran", "tasks_running", ""),
    ("Requests that waited", "waiting", ""),
)


def page(facts: Facts) -> str:
    """Return the whole file."""
    job = facts.job
    name = job.name or job.job_id
    made = f"written {_at(facts.made_at_s)}"
    sections = (
        ("Failures", _failures(facts)),
        ("Explanation", _explanation(facts)),
        ("Attempts", _attempts(facts)),
        ("Tasks by function", _functions(facts)),
        ("Cost", _cost(facts)),
        ("What workers ran", _timeline(facts)),
        ("The cluster meanwhile", _usage(facts)),
        ("Story", _story(facts)),
        ("Last lines of the driver", _output(facts)),
    )
    body = (
        tag("h1", f"{name} is ", _state(job.state)),
        _facts(facts),
        *(joined((tag("h2", title), content)) for title, content in sections if content),
        tag("p", made, class_="dim"),
    )
    head = (
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width">'),
        tag("title", f"{name}: {job.state}"),
        tag("style", Markup(_STYLE)),
    )
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def _facts(facts: Facts) -> Markup:
    job = facts.job
    # Values of environment variables may be secrets, so none is here.
    rows = {
        "job": job.job_id,
        "entrypoint": job.entrypoint,
        "user": job.user,
        "queue": job.queue,
        "namespace": job.namespace,
        "submitted": _at(job.created_at_s),
        "started": _at(job.started_at_s),
        "ended": _at(job.ended_at_s),
        "ran for": _took(job.started_at_s, job.ended_at_s or facts.made_at_s),
        "exit code": "" if job.exit_code is None else str(job.exit_code),
        "node": " ".join(one for one in (job.node_id, job.hostname) if one),
        "asks for": resources(job.resources) if job.resources else "",
        "installs": job.runtime_env.installs,
        "metadata": json.dumps(job.metadata) if job.metadata else "",
        "tasks": _counts(facts.tasks.states),
        "actors": _counts(facts.actors),
        "message": job.message.partition("\n")[0],
    }
    return tag("table", *(tag("tr", tag("th", k), tag("td", v)) for k, v in rows.items() if v))


def _counts(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items() if count)


def _failures(facts: Facts) -> Markup:
    return joined(_cause(one) for one in facts.causes)


def _cause(one: Cause) -> Markup:
    first, _, rest = one.message.partition("\n")
    times = f" ({one.count} times)" if one.count > 1 else ""
    head = tag(
        "p", f"{one.kind} ", tag("b", one.name), f"{times}: ", tag("span", first, class_="bad")
    )
    more = tag("p", f"{one.code}, such as {one.example_id}", class_="dim")
    if not rest.strip():
        return joined((head, more))
    return joined((head, tag("details", tag("summary", "all of it"), tag("pre", rest)), more))


def _explanation(facts: Facts) -> Markup:
    told = facts.explanation
    remedies = [one.text for one in told.remedies] or [told.remedy] * bool(told.remedy)
    parts = [tag("p", told.summary or told.state)]
    if told.constraint is not None:
        parts.append(tag("p", f"{told.constraint.kind}: {told.constraint.text}"))
    parts += [tag("p", f"to change that: {text}") for text in remedies]
    if told.waiting:
        rows = [
            (
                str(one.count),
                one.name,
                f"{'can never run: ' * one.infeasible}{one.cause}",
                one.remedy,
            )
            for one in told.waiting
        ]
        parts.append(table(("count", "what waits", "why", "to change that"), rows))
    if told.verdicts:
        rows = [(one.node_id, one.fit.value, one.rule, one.detail) for one in told.verdicts]
        parts.append(table(("node", "verdict", "rule", "detail"), rows))
    return joined(parts)


def _attempts(facts: Facts) -> Markup:
    job = facts.job
    if not job.attempts:
        return Markup("")
    rows: list[tuple[str | Markup, ...]] = [
        (
            str(one.attempt),
            _at(one.started_at_s),
            _took(one.started_at_s, one.ended_at_s),
            one.node_id,
            "" if one.exit_code is None else str(one.exit_code),
            "preempted: " * one.preempted + one.cause,
        )
        for one in job.attempts
    ]
    began_s = job.attempt_started_at_s
    code = "" if job.exit_code is None else str(job.exit_code)
    took = _took(began_s, job.ended_at_s or facts.made_at_s)
    rows.append((str(job.attempt), _at(began_s), took, job.node_id, code, _state(job.state)))
    return table(("attempt", "began", "took", "node", "exit code", "how it ended"), rows)


def _functions(facts: Facts) -> Markup:
    summary = facts.tasks
    if not summary.items:
        return tag("p", "it called no functions", class_="dim")
    rows = [
        (
            one.key,
            str(one.count),
            _counts(one.states),
            _percentiles(one.run_s),
            _percentiles(one.wait_s),
            hours(one.gpu_s),
            hours(one.cpu_s),
            ", ".join(f"{count} {code}" for code, count in one.failures.items()),
        )
        for one in summary.items
    ]
    head = (
        *("function", "attempts", "by state", "ran p50 / p90 / p99", "waited"),
        *("GPU-hours", "CPU-hours", "failures"),
    )
    more = summary.total - len(summary.items)
    rest = tag("p", f"and {more} more functions", class_="dim") if more else Markup("")
    return joined((table(head, rows), rest))


def _percentiles(measured: Durations) -> str:
    if not measured.count:
        return ""
    return " / ".join(duration(one) for one in (measured.p50, measured.p90, measured.p99))


def _cost(facts: Facts) -> Markup:
    cost = facts.cost
    if not cost.parts:
        return Markup("")
    total = tag("p", f"{hours(cost.gpu_s)} GPU-hours, {hours(cost.cpu_s)} CPU-hours")
    rows = [
        (one.kind, one.name or one.id, hours(one.gpu_s), hours(one.cpu_s))
        for one in cost.parts[:PARTS]
    ]
    more = len(cost.parts) - len(rows)
    rest = tag("p", f"and {more} more parts", class_="dim") if more else Markup("")
    return joined((total, table(("part", "name", "GPU-hours", "CPU-hours"), rows), rest))


def _timeline(facts: Facts) -> Markup:
    timeline = facts.timeline
    if not timeline.lanes:
        return Markup("")
    more = timeline.next_cursor or len(timeline.lanes) > LANES
    rest = "A row is a worker; green ended well, red failed, blue still runs."
    rest += " There are more." if more else ""
    return joined((timeline_chart(timeline), tag("p", rest, class_="dim")))


def _usage(facts: Facts) -> Markup:
    usage = facts.usage
    if usage is None or len(usage.at_s) < 2:
        return Markup("")
    nothing = (None,) * len(usage.at_s)
    parts = []
    for title, used, most in _CHARTS:
        values, limit = usage.series.get(used, nothing), usage.series.get(most, nothing)
        if any(values) or (most and any(limit)):
            parts += [tag("p", title), usage_chart(usage.at_s, values, limit)]
    return joined(parts)


def _story(facts: Facts) -> Markup:
    rows = [(_at(line.at_s), joined((line.text, *_why(line.why)))) for line in facts.story.lines]
    older = tag("p", "older lines are left out", class_="dim") if facts.story.more else Markup("")
    return joined((older, table(("when", "what"), rows))) if rows else Markup("")


def _why(text: str) -> tuple[Markup, ...]:
    return (tag("div", f"why: {text}", class_="dim"),) if text else ()


def _output(facts: Facts) -> Markup:
    if not facts.job.submitted:
        return tag(
            "p", "its driver ran by itself; its output is where that was started", class_="dim"
        )
    if not facts.output:
        return tag("p", "it printed nothing, or its log has left by retention", class_="dim")
    first = tag("p", f"the last {TAIL}", class_="dim") if len(facts.output) >= TAIL else Markup("")
    return joined((first, tag("pre", "\n".join(facts.output))))


def _state(name: str) -> Markup:
    kind = "good" if name in _GOOD else "bad" if name in _BAD else "dim"
    return tag("span", name, class_=kind)


def _took(start_s: float | None, end_s: float | None) -> str:
    return duration(end_s - start_s) if start_s and end_s else ""


def _at(at_s: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at_s)) if at_s else ""
