"""Lists: rows are numbered as they come, and ids are searched by their beginning.

SQLite numbers rows and compares texts as bytes by itself, so only PostgreSQL changes.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

LISTED = ("nodes", "jobs", "actors", "tasks")
SEARCHED = (
    ("events", "subject"),
    ("meta", "name"),
    ("nodes", "node_id"),
    ("jobs", "job_id"),
    ("actors", "actor_id"),
    ("leases", "lease_id"),
    ("tasks", "task_id"),
    ("kv", "namespace"),
    ("kv", "key"),
    ("blobs", "kind"),
    ("blobs", "blob_id"),
    ("tokens", "token_id"),
    ("leaders", "name"),
    ("facts", "kind"),
    ("facts", "key"),
)


def upgrade() -> None:
    """Number the rows that are there, as they lie, and make texts compare as bytes."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, column in SEARCHED:
        op.alter_column(table, column, type_=sa.Text(collation="C"))
    for table in LISTED:
        op.add_column(table, sa.Column("rowid", sa.BigInteger(), sa.Identity(), nullable=False))
        op.create_index(f"ix_{table}_rowid", table, ["rowid"])


def downgrade() -> None:
    """Go back to the first schema."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in LISTED:
        op.drop_index(f"ix_{table}_rowid", table_name=table)
        op.drop_column(table, "rowid")
    for table, column in SEARCHED:
        op.alter_column(table, column, type_=sa.Text())
