"""The node's object store: its arena, the index of what is in it, eviction."""
