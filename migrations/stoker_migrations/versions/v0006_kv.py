"""Keys have a revision and may expire; operations on them are remembered, so that a retry counts once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

KEYS, REQUESTS, EXPIRES = "kv", "kv_requests", "expires_at_s"


def upgrade() -> None:
    """Name the number of a key's last change, add its time of expiry, and make the table of requests."""
    op.execute(f"ALTER TABLE {KEYS} RENAME COLUMN seq TO revision")
    op.add_column(KEYS, sa.Column(EXPIRES, sa.Float(), nullable=True))
    op.create_index(f"ix_{KEYS}_{EXPIRES}", KEYS, [EXPIRES])
    postgresql = op.get_bind().dialect.name == "postgresql"
    key = sa.Text(collation="C") if postgresql else sa.Text()
    op.create_table(
        REQUESTS,
        sa.Column("request", key, primary_key=True),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("reply", sa.LargeBinary(), nullable=False),
        sa.Column(EXPIRES, sa.Float(), nullable=False),
    )
    op.create_index(f"ix_{REQUESTS}_{EXPIRES}", REQUESTS, [EXPIRES])


def downgrade() -> None:
    """Go back to keys that stay until they are deleted."""
    op.drop_table(REQUESTS)
    op.execute(f"DELETE FROM {KEYS} WHERE {EXPIRES} IS NOT NULL")
    op.drop_index(f"ix_{KEYS}_{EXPIRES}", table_name=KEYS)
    op.drop_column(KEYS, EXPIRES)
    op.execute(f"ALTER TABLE {KEYS} RENAME COLUMN revision TO seq")
