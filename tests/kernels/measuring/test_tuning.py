"""The tuning table: silent by default, exact in its keys, read from a file, forced while measuring."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from stoker_kernels import rms_norm, tuning
from stoker_kernels.workloads import workloads
from stoker_wire.messages.kernels import TunedKernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULT, OTHER = {"BLOCK": 8}, {"BLOCK": 16}


@pytest.fixture(autouse=True)
def _no_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("STOKER_KERNELS_TUNING", raising=False)
    tuning.clear()
    yield
    tuning.clear()


def chosen(columns: int = 4, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    return tuning.choose("k", DEFAULT, lambda: [DEFAULT, OTHER], columns=columns, dtype=dtype)


def test_the_default_stands_where_the_table_is_silent() -> None:
    assert chosen() is DEFAULT
    tuning.install("k", {"columns": 4, "dtype": "bfloat16"}, OTHER)
    assert chosen() == OTHER
    assert chosen(columns=5) is DEFAULT
    assert chosen(dtype=torch.float32) is DEFAULT
    tuning.clear()
    assert chosen() is DEFAULT


def test_names_that_the_kernel_no_longer_has_are_ignored() -> None:
    tuning.install("k", {"columns": 4, "dtype": "bfloat16"}, {"TILE": 16})
    assert chosen() is DEFAULT


def test_a_file_is_read_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    record = {"kernel": "k", "key": {"dtype": "bfloat16", "columns": 4}, "config": OTHER}
    path.write_text(json.dumps([record]))
    monkeypatch.setenv("STOKER_KERNELS_TUNING", str(path))
    assert chosen() == OTHER


def test_a_tuner_hears_every_choice_and_forces_its_own() -> None:
    tuning.install("k", {"columns": 4, "dtype": "bfloat16"}, {"BLOCK": 1})
    with tuning.listening() as asked:
        chosen()
        chosen()
    (question,) = asked.values()
    assert question == tuning.Question(
        "k", (("columns", 4), ("dtype", "bfloat16")), DEFAULT, [DEFAULT, OTHER]
    )
    with tuning.forcing(question, OTHER):
        assert chosen() == OTHER
    assert chosen() == {"BLOCK": 1}


@pytest.mark.parametrize("columns", [33, 300])
def test_every_candidate_of_a_kernel_computes_the_same(columns: int, interpreter: None) -> None:
    x, w = torch.randn(7, columns), torch.randn(columns)
    with tuning.listening() as asked:
        expected = rms_norm(x, w)
    (question,) = asked.values()
    assert len(question.candidates) > 1
    for config in question.candidates:
        with tuning.forcing(question, config):
            torch.testing.assert_close(rms_norm(x, w), expected)


def test_what_every_op_chooses_survives_the_way_through_the_store(interpreter: None) -> None:
    heard = []
    for work in workloads().values():
        with tuning.listening() as asked:
            work.call("cpu", work.dtypes[-1], **work.small)
        heard += asked.values()
    assert {"attention_fwd", "cross_entropy_fwd", "layer_norm_fwd"} <= {one.kernel for one in heard}
    for question in heard:
        for config in (question.default, *question.candidates):
            record = TunedKernel(
                kernel=question.kernel, key=dict(question.key), config=config, device="d"
            )
            read = msgspec.json.decode(msgspec.json.encode(record), type=TunedKernel)
            assert tuning.make_key(read.key) == question.key and read.config == config
