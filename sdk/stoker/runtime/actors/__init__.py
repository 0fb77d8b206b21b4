"""Actors, the caller's half: handles, creation, ordered calls, connections."""
