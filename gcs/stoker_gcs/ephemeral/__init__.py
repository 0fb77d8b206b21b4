"""The ephemeral store: entries that matter for seconds (heartbeats, sessions), and announcements.

It may vanish at any time. Nothing in it is authoritative: each entry is written again by its owner, or
rebuilt from SQL and this process's memory.
"""
