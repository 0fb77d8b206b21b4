"""Worker processes: their life cycle, and the fork server that makes them."""
