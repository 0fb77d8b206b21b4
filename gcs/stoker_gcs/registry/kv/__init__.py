"""The key-value store: its rules, its registry, and blobs beside it."""
