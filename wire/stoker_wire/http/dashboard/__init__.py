"""The messages between the gcs and the page of its dashboard."""
