"""Detached objects: their records, and the copies of them on nodes."""
