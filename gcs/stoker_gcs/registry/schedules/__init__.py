"""Schedules: their rules and their registry."""
