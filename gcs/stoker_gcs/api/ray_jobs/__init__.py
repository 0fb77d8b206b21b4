"""Adapter of Ray's job API: its routes and types, over Stoker's own jobs and packages."""
