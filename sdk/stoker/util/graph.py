"""Graphs of calls: nodes are made by ``.bind()`` of remote functions, classes and methods.

::

    with InputNode() as number:
        graph = add.bind(square.bind(number), number)
    print(stoker.get(graph.execute(3)))   # 12
"""

from stoker.runtime.actors.graphs import GraphNode, InputNode, MultiOutputNode

__all__ = ("GraphNode", "InputNode", "MultiOutputNode")
