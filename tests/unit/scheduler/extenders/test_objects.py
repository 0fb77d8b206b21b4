"""Pods and Nodes: the objects in which extenders see requirements and nodes."""

from __future__ import annotations

from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.extenders.objects import node_of, pod_of
from stoker_scheduler.wire_types import terms_of
from tests.unit.scheduler.samples import GIB, a_node


def test_requirements_are_a_pod() -> None:
    terms = terms_of({"zone": "a", "disk": "!slow", "rack": "in(x,y)"})
    requirements = make_requirements({"CPU": 0.5, "GPU": 2, "memory": GIB, "ssd": 1}, terms=terms)
    pod = pod_of(requirements)
    (container,) = pod["spec"]["containers"]
    amounts = {"cpu": "500m", "nvidia.com/gpu": "2", "memory": str(GIB), "ssd": "1"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert pod["spec"]["nodeSelector"] == {"zone": "a"}
    assert pod["metadata"]["namespace"] == "stoker"
    assert pod == pod_of(requirements)
    assert pod["metadata"]["uid"] != pod_of(make_requirements({"CPU": 1}))["metadata"]["uid"]


def test_a_node_is_a_node() -> None:
    node = node_of(a_node("n_1", labels={"zone": "a"}, hostname="host-1", cordon="cordoned"))
    assert node["metadata"]["name"] == "n_1"
    assert node["metadata"]["labels"] == {"zone": "a", "kubernetes.io/hostname": "host-1"}
    assert node["spec"] == {"unschedulable": True}
    assert node["status"]["allocatable"] == {
        "cpu": "4", "nvidia.com/gpu": "2", "memory": str(8 * GIB), "ssd": "1",
    }  # fmt: skip
    assert node["status"]["conditions"] == [{"type": "Ready", "status": "True"}]
