"""Alembic migrations of the SQL store, shipped so that a deployed gcs can upgrade its own database."""
