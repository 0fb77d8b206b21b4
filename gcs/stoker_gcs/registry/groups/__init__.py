"""Placement groups: their rules, their registry, and their placement by the scheduler."""
