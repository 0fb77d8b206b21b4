"""Channels to other runtimes, clients of the services, task history on its way out."""
