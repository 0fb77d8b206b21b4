"""The HTTP API: one module per kind of thing, each adding its routes to the service."""
