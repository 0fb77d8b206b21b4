"""Charts as inline SVG: what workers ran when, and a quantity over time. Their size is bounded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker.cli.views.report.markup import Markup, tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker_wire.http.dashboard.figures import Lane, Timeline

WIDTH = 960
LABEL = 170
ROW = 14
LANES = 60
STEPS = 600
"""The parts of a lane that are told apart."""
_CHART = 90
_RANK = {"FINISHED": 1, "CANCELLED": 2, "RUNNING": 3, "FAILED": 4}
"""The state of a part in which several ended: that with the highest number."""


def timeline_chart(timeline: Timeline) -> Markup:
    """Return a row per worker, with what it ran in the colours of how that ended."""
    lanes = timeline.lanes[:LANES]
    height = ROW * len(lanes) + 24
    drawn = []
    for number, lane in enumerate(lanes):
        top = number * ROW
        drawn.append(_text(0, top + ROW - 4, lane.actor_id or lane.worker_id))
        drawn += _with_spans(lane, timeline, top) if lane.spans is not None else _busy(lane, top)
    return _svg(height, *drawn, *_axis(timeline.from_s, timeline.to_s, height))


def _with_spans(lane: Lane, timeline: Timeline, top: int) -> Iterable[Markup]:
    """Yield the spans of a lane; those too short to be seen apart become one."""
    parts: list[str] = [""] * STEPS
    for start_s, end_s, _, state, *_ in lane.spans or ():
        first = _step(start_s, timeline)
        name = timeline.states[state]
        for index in range(first, max(_step(end_s, timeline), first) + 1):
            if _RANK.get(name, 0) > _RANK.get(parts[index], 0):
                parts[index] = name
    begin = 0
    for index in range(1, STEPS + 1):
        if index == STEPS or parts[index] != parts[begin]:
            if parts[begin]:
                yield _rect(begin, index, top, parts[begin].lower())
            begin = index


def _step(at_s: float, timeline: Timeline) -> int:
    part = (at_s - timeline.from_s) / (timeline.to_s - timeline.from_s)
    return min(STEPS - 1, max(0, int(part * STEPS)))


def _busy(lane: Lane, top: int) -> Iterable[Markup]:
    """Yield how busy a lane was, the darker the busier."""
    busy = lane.busy or ()
    for index, part in enumerate(busy):
        if part > 0:
            begin, end = (at * STEPS / len(busy) for at in (index, index + 1))
            yield _rect(begin, end, top, "finished", opacity=round(0.15 + 0.85 * part, 2))


def _rect(begin: float, end: float, top: int, kind: str, **more: float) -> Markup:
    scale = (WIDTH - LABEL) / STEPS
    return tag(
        "rect",
        x=round(LABEL + begin * scale, 1),
        y=top + 1,
        width=round((end - begin) * scale, 1),
        height=ROW - 2,
        class_=kind,
        **more,
    )


def usage_chart(
    at_s: Sequence[float], values: Sequence[float | None], most: Sequence[float | None]
) -> Markup:
    """Return a quantity over time below the line of what there was; where nothing is known is a gap."""
    top = max((one for one in (*values, *most) if one is not None), default=0.0) or 1.0
    drawn = [
        line
        for series, kind in ((most, "most"), (values, "used"))
        for line in _lines(at_s, series, top, kind)
    ]
    label = _text(0, 12, f"{top:.3g}")
    return _svg(_CHART + 24, label, *drawn, *_axis(at_s[0], at_s[-1], _CHART + 24))


def _lines(
    at_s: Sequence[float], series: Sequence[float | None], top: float, kind: str
) -> Iterable[Markup]:
    span_s = (at_s[-1] - at_s[0]) or 1.0
    points: list[str] = []
    for at, value in [*zip(at_s, series, strict=True), (0.0, None)]:
        if value is not None:
            x = LABEL + (at - at_s[0]) / span_s * (WIDTH - LABEL)
            points.append(f"{x:.1f},{_CHART - value / top * (_CHART - 10):.1f}")
        elif points:
            yield tag("polyline", points=" ".join(points), class_=kind)
            points = []


def _axis(from_s: float, to_s: float, height: int) -> list[Markup]:
    y = height - 20
    line = tag("line", x1=LABEL, y1=y, x2=WIDTH, y2=y, class_="axis")
    first, last = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (from_s, to_s))
    return [line, _text(LABEL, y + 15, first), _text(WIDTH, y + 15, last, text_anchor="end")]


def _text(x: float, y: float, text: str, **more: str) -> Markup:
    return tag("text", text, x=x, y=y, **more)


def _svg(height: int, *content: Markup) -> Markup:
    return tag("svg", *content, viewBox=f"0 0 {WIDTH} {height}", width="100%", role="img")
