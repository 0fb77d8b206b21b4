"""The schema as SQLAlchemy metadata. Migrations import this; the serving path never does on SQLite."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from stoker_gcs.state import schema

_TYPES: dict[schema.Type, Any] = {
    schema.Type.TEXT: sa.Text,
    schema.Type.INT: sa.BigInteger,
    schema.Type.FLOAT: sa.Float,
    schema.Type.BYTES: sa.LargeBinary,
}


def metadata() -> sa.MetaData:
    """Return :data:`stoker_gcs.state.schema.TABLES` as metadata."""
    result = sa.MetaData()
    for table in schema.TABLES:
        _table(table, result)
    return result


def _table(table: schema.Table, into: sa.MetaData) -> sa.Table:
    columns: list[sa.Column[object]] = []
    for column in table.columns:
        counted = table.counted and (column.name,) == table.key
        # SQLite counts up only in a column that is exactly INTEGER PRIMARY KEY; 8 bytes wide there.
        kind: sa.types.TypeEngine[object] = _TYPES[column.type]()
        if column.type is schema.Type.TEXT and column.name in (*table.key, *table.searched):
            kind = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")  # type: ignore[assignment]
        if counted:
            kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # type: ignore[assignment]
        columns.append(
            sa.Column(
                column.name,
                kind,
                primary_key=column.name in table.key,
                nullable=column.null,
                autoincrement=counted,
            )
        )
    if table.listed:
        # For PostgreSQL: in SQLite every table has it unasked.
        columns.append(sa.Column(schema.ARRIVAL, sa.BigInteger(), sa.Identity(), nullable=False))
    indexes = [
        sa.Index(schema.index_name(table, names, unique=unique), *names, unique=unique)
        for group, unique in ((table.indexes, False), (table.unique, True))
        for names in group
    ]
    if table.listed:
        arrival = (schema.ARRIVAL,)
        indexes.append(sa.Index(schema.index_name(table, arrival, unique=False), *arrival))
    return sa.Table(
        table.name,
        into,
        *columns,
        *indexes,
        sqlite_autoincrement=table.counted,
        sqlite_with_rowid=not table.clustered,
    )
