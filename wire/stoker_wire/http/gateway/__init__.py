"""The way into a cluster of which a machine reaches one port: what clients and the gateway share."""
