"""Commands about this machine, which ask no cluster: starting and stopping, settings, certificates."""
