"""``ray.dag.input_node``."""

from stoker.runtime.actors.graphs import GraphInput as DAGInputData
from stoker.runtime.actors.graphs import InputNode
from stoker.runtime.actors.graphs import InputPart as InputAttributeNode

__all__ = ("DAGInputData", "InputAttributeNode", "InputNode")
