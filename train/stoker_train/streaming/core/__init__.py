"""Decide what a stream reads next, in which order, and where it goes on: no clock, no IO, no threads."""
