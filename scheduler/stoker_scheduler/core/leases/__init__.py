"""The life of a lease, and the nodes that may have one."""
