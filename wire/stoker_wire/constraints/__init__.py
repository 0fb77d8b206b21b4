"""Grammars of what work demands of nodes: label selectors, node filters, taints and tolerations."""
