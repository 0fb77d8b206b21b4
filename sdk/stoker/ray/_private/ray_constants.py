"""``ray._private.ray_constants``."""

RESOURCE_CONSTRAINT_PREFIX = "accelerator_type:"
"""Of a node's resource that says what its GPUs are: ``init`` makes a label of it."""
DEFAULT_PORT = 6379
