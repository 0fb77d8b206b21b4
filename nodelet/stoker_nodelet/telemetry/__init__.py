"""Observations that a nodelet makes and passes on: logs, exits, memory use, task history."""
