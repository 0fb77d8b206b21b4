"""Actors: durable creation, names, placement, restarts, and an end with a cause."""
