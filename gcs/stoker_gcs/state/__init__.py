"""The state of the cluster: typed records, the event log, the schema of both."""
