"""The past of the cluster: its state at any time that the event log has, and what happened to one thing."""
