"""Outcomes of fuzzing, and the table of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which the product does what it does not document; ``repeat`` is a command that shows it."""

    text: str
    repeat: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one target: a decoder, or the API of a service."""

    target: str
    inputs: int
    seconds: float
    findings: list[Finding] = field(default_factory=list)


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as lines of text, the findings behind them."""
    rows = [("target", "inputs", "seconds", "findings")]
    rows += [
        (o.target, f"{o.inputs:,}", f"{o.seconds:.1f}", str(len(o.findings))) for o in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    for outcome in outcomes:
        for finding in outcome.findings:
            lines += ["", f"{outcome.target}: {finding.text}", f"  repeat: {finding.repeat}"]
    return "\n".join(lines)
