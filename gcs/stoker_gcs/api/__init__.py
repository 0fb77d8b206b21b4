"""The HTTP API: one table of routes per kind of thing (``routes`` has them all), bound to a GcsApp.

Handlers decode paths and queries and call the registries; a decision in a handler is in the wrong
place.
"""
