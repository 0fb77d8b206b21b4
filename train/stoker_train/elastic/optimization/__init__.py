"""Measure how fast and how well a job learns, and choose its batch."""
