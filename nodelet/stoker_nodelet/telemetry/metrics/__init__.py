"""The metrics of a node: what its machine, workers, objects and GPUs do, and what jobs take of it."""
