"""The side that asks: routing of keys to servers, tables, workers and the whole group of servers."""
