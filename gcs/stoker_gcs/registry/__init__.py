"""The records that a gcs owns, one folder an entity: pure rules beside the code that applies them."""
