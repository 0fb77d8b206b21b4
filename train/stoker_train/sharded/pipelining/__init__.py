"""Pipelines: schedules, a model cut into stages, and their execution over point-to-point messages."""
