"""Traces: the spans of this process's code, and the trace context that its calls carry."""
