"""``ray.dag.output_node``."""

from stoker.runtime.actors.graphs import MultiOutputNode

__all__ = ("MultiOutputNode",)
