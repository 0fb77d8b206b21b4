"""The hot store: facts that are true for seconds (heartbeats, sessions) and news between replicas.

It may vanish at any time. Nothing in it is the truth; everything in it is written again by those who
know, or rebuilt from SQL and this process's memory.
"""
