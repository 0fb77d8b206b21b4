"""Worker processes: the fork server, what it starts, and what becomes of it."""
