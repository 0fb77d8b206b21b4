"""Tables of runs of training, of their metrics, and of the values of these by step and over wider ranges."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    postgres = op.get_bind().dialect.name == "postgresql"
    key = sa.Text(collation="C") if postgres else sa.Text()
    op.create_table(
        "training_runs",
        *(sa.Column(name, key, primary_key=True) for name in ("job_id", "run")),
        sa.Column("first_at_s", sa.Float(), nullable=False),
    )
    if postgres:  # In SQLite every table has it unasked.
        op.add_column(
            "training_runs", sa.Column("rowid", sa.BigInteger(), sa.Identity(), nullable=False)
        )
        op.create_index("ix_training_runs_rowid", "training_runs", ["rowid"])
    whole = ("series", "count", "first_step", "last_step", "newest_step")
    op.create_table(
        "training_metrics",
        *(sa.Column(name, key, primary_key=True) for name in ("job_id", "run", "metric")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in whole),
        sa.Column("first_at_s", sa.Float(), nullable=False),
        sa.Column("newest_at_s", sa.Float(), nullable=False),
        sa.Column("newest_value", sa.Float(), nullable=True),
    )
    op.create_table(
        "training_values",
        *(
            sa.Column(name, sa.BigInteger(), primary_key=True, autoincrement=False)
            for name in ("series", "width", "step")
        ),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.Float(), nullable=False),
        sa.Column("low", sa.Float(), nullable=True),
        sa.Column("high", sa.Float(), nullable=True),
        sa.Column("nans", sa.BigInteger(), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("training_values")
    op.drop_table("training_metrics")
    op.drop_table("training_runs")
