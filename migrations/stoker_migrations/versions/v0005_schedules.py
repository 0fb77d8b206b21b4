"""Schedules: their table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLE = "schedules"


def upgrade() -> None:
    """Make the table."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    key = sa.Text(collation="C") if postgresql else sa.Text()
    op.create_table(
        TABLE,
        sa.Column("name", key, primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table(TABLE)
