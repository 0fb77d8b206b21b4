"""Nodes: registration, heartbeats, and the sweep that declares silent ones dead."""
