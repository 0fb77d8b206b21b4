"""The HTTP protocol's rules, once: server, client, auth, deadlines, idempotency, problems, watches."""
