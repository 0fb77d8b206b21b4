"""A server's part of each table, in NumPy: no clock, no IO, no Python loop over rows."""
