"""TLS of every TCP port: the contexts, what a handshake that fails means, and TLS of the data path."""
