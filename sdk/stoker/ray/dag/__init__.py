"""``ray.dag``: graphs of calls by ``bind`` and ``execute``."""

from __future__ import annotations

from typing import Any

from stoker.ray.mapping.lacking import attribute_error
from stoker.runtime.actors.graphs import (
    ActorNode,
    CallNode,
    GraphInput,
    GraphNode,
    InputNode,
    InputPart,
    MethodNode,
    MultiOutputNode,
)

DAGNode = GraphNode
FunctionNode = CallNode
ClassNode = ActorNode
ClassMethodNode = MethodNode
InputAttributeNode = InputPart
DAGInputData = GraphInput

__all__ = (
    "ClassMethodNode",
    "ClassNode",
    "DAGInputData",
    "DAGNode",
    "FunctionNode",
    "InputAttributeNode",
    "InputNode",
    "MultiOutputNode",
)


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
