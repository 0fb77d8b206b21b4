"""Snapshots of the cluster's state, from which that at an earlier time is rebuilt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table; the leading gcs takes the first snapshot when it starts."""
    op.create_table(
        "snapshots",
        sa.Column("seq", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("part", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("seq", "part"),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("snapshots")
