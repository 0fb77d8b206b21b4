"""Tasks, the caller's half: from ``.remote()`` to the settled result."""
