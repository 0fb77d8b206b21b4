"""The records that a gcs owns, one package per entity: pure rules beside the code that applies them."""
