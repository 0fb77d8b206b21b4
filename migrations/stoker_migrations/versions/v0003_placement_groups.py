"""Placement groups: their table."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLE = "placement_groups"


def upgrade() -> None:
    """Make the table, with its rows numbered as they come."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    key = sa.Text(collation="C") if postgresql else sa.Text()
    columns: list[sa.Column[Any]] = [
        sa.Column("group_id", key, primary_key=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("job_id", "state", "namespace", "name")
        ),
        sa.Column("live_name", sa.Text()),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
    ]
    if postgresql:
        columns.append(sa.Column("rowid", sa.BigInteger(), sa.Identity(), nullable=False))
    op.create_table(TABLE, *columns)
    op.create_index(f"ix_{TABLE}_job_id", TABLE, ["job_id"])
    op.create_index(f"ix_{TABLE}_state", TABLE, ["state"])
    op.create_index(f"ux_{TABLE}_live_name", TABLE, ["live_name"], unique=True)
    if postgresql:
        op.create_index(f"ix_{TABLE}_rowid", TABLE, ["rowid"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table(TABLE)
