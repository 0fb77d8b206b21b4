"""Detached objects: those that outlive the process that made them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TABLE = "detached_objects"


def upgrade() -> None:
    """Make the table and its indexes."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    key = sa.Text(collation="C") if postgresql else sa.Text()
    columns: list[sa.Column[Any]] = [
        sa.Column("object_id", key, primary_key=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("job_id", "state", "namespace", "name")
        ),
        sa.Column("live_name", sa.Text()),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.Column("value", sa.LargeBinary()),
    ]
    if postgresql:
        columns.append(sa.Column("rowid", sa.BigInteger(), sa.Identity(), nullable=False))
    op.create_table(TABLE, *columns)
    op.create_index(f"ix_{TABLE}_namespace", TABLE, ["namespace"])
    op.create_index(f"ux_{TABLE}_live_name", TABLE, ["live_name"], unique=True)
    if postgresql:
        op.create_index(f"ix_{TABLE}_rowid", TABLE, ["rowid"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table(TABLE)
