"""Queues: their rules and their registry."""
