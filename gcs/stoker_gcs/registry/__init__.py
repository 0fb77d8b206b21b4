"""The records that a gcs owns, one package or module each: pure rules beside the code that applies them."""
