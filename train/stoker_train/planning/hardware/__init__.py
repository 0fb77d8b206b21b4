"""The cluster as a planner sees it: data sheets of GPUs, records of nodes, links that were measured."""
