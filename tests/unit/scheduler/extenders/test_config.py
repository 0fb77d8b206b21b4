"""Files of extenders: those of kube-scheduler are read as they are, and refused with the field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.extenders.config import duration_s, read_extenders
from stoker_wire.errors import BadRequestError

if TYPE_CHECKING:
    from pathlib import Path

KUBE = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: false
profiles:
  - schedulerName: default-scheduler
extenders:
  - urlPrefix: "http://127.0.0.1:8888/scheduler"
    filterVerb: filter
    prioritizeVerb: prioritize
    weight: 2
    enableHTTPS: false
    httpTimeout: 1m500ms
    nodeCacheCapable: true
    ignorable: true
    managedResources:
      - name: nvidia.com/gpu
        ignoredByScheduler: false
"""


def test_a_file_of_kube_scheduler_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "kube.yaml"
    file.write_text(KUBE.replace("1m500ms", "30s"))
    (one,) = read_extenders(str(file))
    assert (one.url_prefix, one.filter_verb, one.prioritize_verb, one.weight) == (
        "http://127.0.0.1:8888/scheduler", "filter", "prioritize", 2,
    )  # fmt: skip
    assert (one.node_cache_capable, one.ignorable, one.timeout_s) == (True, True, 30.0)
    assert [resource.name for resource in one.managed_resources] == ["nvidia.com/gpu"]


def test_json_will_do_and_defaults_are_those_of_kube_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "kube.json"
    file.write_text('{"extenders": [{"urlPrefix": "http://h", "filterVerb": "filter"}]}')
    (one,) = read_extenders(str(file))
    assert (one.timeout_s, one.ignorable, one.node_cache_capable) == (5.0, False, False)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("5s", 5.0), ("100ms", 0.1), ("1m30s", 90.0), ("1.5h", 5400.0), (2_000_000_000, 2.0)],
)
def test_a_duration(written: str | int, seconds: float) -> None:
    assert duration_s(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("extender", "words"),
    [
        ("filterVerb: f", "missing required field `urlPrefix`"),
        ("urlPrefix: h:1\n    filterVerb: f", "extenders[0].urlPrefix must begin with http://"),
        ("urlPrefix: http://h", "extenders[0] needs a filterVerb or a prioritizeVerb"),
        ("urlPrefix: http://h\n    prioritizeVerb: p", "extenders[0].weight must be above 0"),
        ("urlPrefix: http://h\n    filterVerb: f\n    bindVerb: b", "extenders[0].bindVerb"),
        ("urlPrefix: http://h\n    filterVerb: f\n    httpTimeout: 5", "extenders[0].httpTimeout"),
        ("urlPrefix: http://h\n    filterVerb: f\n    httpTimeout: soon", "'soon' is no duration"),
        ("urlPrefix: http://h\n    filterVerb: f\n    verb: 1", "`verb`"),
        ("urlPrefix: http://h\n    filterVerb: [", "YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_field(
    tmp_path: Path, extender: str, words: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(f"extenders:\n  - {extender}\n")
    with pytest.raises(BadRequestError) as caught:
        read_extenders(str(file))
    assert words in str(caught.value) and str(file) in str(caught.value)
    assert caught.value.field == "extenders"


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="cannot be opened"):
        read_extenders(str(tmp_path / "no.yaml"))
