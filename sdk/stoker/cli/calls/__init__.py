"""Commands that call what runs on a cluster, and stop it, by a gateway."""
