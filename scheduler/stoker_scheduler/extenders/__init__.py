"""Extenders: services that filter and score nodes, in the format of kube-scheduler's."""
