"""The loops of a gcs: leader election, reconciliation, lease requests, maintenance."""
