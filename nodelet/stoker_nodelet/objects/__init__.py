"""The node's object store: its arena, the index of what lies in it, eviction."""
