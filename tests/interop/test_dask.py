"""Dask's collections over a cluster: ``make interop``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

dask = pytest.importorskip("dask", reason="dask is not installed: make interop")
pytest.importorskip("dask.array", reason="dask[array] is not installed: make interop")

import stoker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    stoker.init(num_cpus=2, log_to_driver=False)
    yield
    stoker.shutdown()


def test_delayed_calls_and_several_results() -> None:
    parts = [dask.delayed(pow)(n, 2) for n in range(10)]
    total = dask.delayed(sum)(parts)
    assert dask.compute(total, parts[3], scheduler=stoker.dask_get) == (285, 9)
    with dask.config.set(scheduler=stoker.dask_get):
        assert total.compute() == 285


def test_arrays() -> None:
    import dask.array as da
    import numpy as np

    x = da.arange(1_000_000, chunks=100_000).reshape(1000, 1000)
    found = (x + x.T).mean(axis=0).compute(scheduler=stoker.dask_get)
    whole = np.arange(1_000_000).reshape(1000, 1000)
    assert np.allclose(found, (whole + whole.T).mean(axis=0))


def test_frames() -> None:
    import pandas as pd

    dd = pytest.importorskip("dask.dataframe")
    table = pd.DataFrame({"x": [1, 2] * 500, "y": range(1000)})
    found = dd.from_pandas(table, npartitions=4).groupby("x").y.mean()
    with dask.config.set(scheduler=stoker.dask_get):
        assert found.compute().to_dict() == {1: 499.0, 2: 500.0}


def test_an_error_is_of_its_own_type() -> None:
    def fail() -> None:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        dask.delayed(fail)().compute(scheduler=stoker.dask_get)


def test_options_and_executors() -> None:
    call = dask.delayed(pow)(2, 5)
    assert call.compute(scheduler=stoker.dask_get, stoker_options={"num_cpus": 0.5}) == 32
    with stoker.Executor() as executor:
        assert call.compute(scheduler=executor) == 32
