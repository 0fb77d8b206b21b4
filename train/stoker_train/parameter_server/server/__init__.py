"""The actor that serves its part of all tables, and its waits for workers."""
