"""Explanations for people: why something waits, and which record an id prefix means."""
