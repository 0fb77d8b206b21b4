"""Makes the table of ``docs/metrics.md``, of the catalogue; what is above it is written by hand.

``tests/unit/test_monitoring.py`` fails when the page is not current.
"""

from __future__ import annotations

from pathlib import Path

from stoker_wire.process.metrics.catalogue import METRICS, SERVICES, MetricSpec

METRICS_PAGE = Path(__file__).parents[1] / "docs/metrics.md"
_HEAD = """\
## All metrics

<!-- Made by `make docs` from wire/stoker_wire/process/metrics/catalogue.py: change the table there. -->

"""


def metrics_page() -> str:
    """Return ``docs/metrics.md`` as it is, with the table as it should be."""
    prose = METRICS_PAGE.read_text().partition(_HEAD)[0]
    return prose + _HEAD + "\n".join(_sections())


def _sections() -> list[str]:
    parts = {"Every service": [spec for spec in METRICS if spec.services == SERVICES]}
    for service in SERVICES:
        parts[service] = [
            spec for spec in METRICS if service in spec.services and spec.services != SERVICES
        ]
    return [
        f"### {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        + "".join(map(_row, specs))
        for title, specs in parts.items()
    ]


def _row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    meaning = spec.help.replace("|", "\\|")
    return f"| `{spec.name}` | {spec.type.value} | {labels} | {meaning} |\n"
