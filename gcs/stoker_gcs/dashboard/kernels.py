"""Measured configurations of kernels, for those too who may not read the KV namespace that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Prefix, Unexpired
from stoker_wire.messages.control import Page
from stoker_wire.messages.kernels import TUNING_NAMESPACE, TunedKernel

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition
    from stoker_wire.messages.queries import KernelsQuery

_tuned = msgspec.json.Decoder(TunedKernel).decode


async def tuned_kernels(state: StateStore, query: KernelsQuery) -> Page[TunedKernel]:
    """Return a page of them; what is there and is no measurement is left out."""
    seq = state.log.last
    where: dict[str, Condition] = {
        "namespace": TUNING_NAMESPACE,
        "expires_at_s": Unexpired(state.now()),
    }
    if query.device:
        where["key"] = Prefix(query.device)
    rows, cursor = await state.rows(schema.KV, query, where)
    items = []
    for row in rows:
        try:
            items.append(_tuned(bytes(row["value"])))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    total, exact = await state.total(schema.KV, query, where)
    return Page(items=tuple(items), next_cursor=cursor, seq=seq, total=total, total_exact=exact)
