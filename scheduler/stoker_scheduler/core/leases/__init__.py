"""The life of a lease, and which nodes may hold one."""
