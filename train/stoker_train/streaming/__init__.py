"""Stream data to training loops: what users know as ``stoker.data``.

::

    with stoker.data.stream("data/*.jsonl", stoker.data.JsonLines(), batch=32, shuffle=10_000) as batches:
        for batch in batches:
            ...

Names load when they are first used: readers are processes of their own, and need few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_train.streaming.file_shards import FileShards
    from stoker_train.streaming.parsers import CsvRows, FixedRecords, JsonLines, Lines, Parser
    from stoker_train.streaming.prefetching import Prefetch, prefetch
    from stoker_train.streaming.reading import StreamStats
    from stoker_train.streaming.streams import Stream, stream
    from stoker_train.streaming.token_files import Tokens
    from stoker_train.streaming.torch_dataset import StreamDataset

__all__ = (
    "CsvRows",
    "FileShards",
    "FixedRecords",
    "JsonLines",
    "Lines",
    "Parser",
    "Prefetch",
    "Stream",
    "StreamDataset",
    "StreamStats",
    "Tokens",
    "prefetch",
    "stream",
)

_MODULES = {
    "CsvRows": "parsers",
    "FileShards": "file_shards",
    "FixedRecords": "parsers",
    "JsonLines": "parsers",
    "Lines": "parsers",
    "Parser": "parsers",
    "Prefetch": "prefetching",
    "Stream": "streams",
    "StreamDataset": "torch_dataset",
    "StreamStats": "reading",
    "Tokens": "token_files",
    "prefetch": "prefetching",
    "stream": "streams",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'stoker.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stoker_train.streaming.{module}"), name)
