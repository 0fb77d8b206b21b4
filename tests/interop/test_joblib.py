"""joblib and scikit-learn over a cluster: ``make interop``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

joblib = pytest.importorskip("joblib", reason="joblib is not installed: make interop")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: make interop")

import stoker
from stoker.util import register_stoker
from tests.interop.calls import is_writeable, nested_sum, pid, square

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    stoker.init(num_cpus=2, log_to_driver=False)
    register_stoker()
    yield
    stoker.shutdown()


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    with joblib.parallel_config(backend="stoker", n_jobs=2):
        yield


def test_calls_are_made_in_workers_in_batches_and_in_order() -> None:
    assert joblib.Parallel()(joblib.delayed(square)(i) for i in range(2000)) == [
        i * i for i in range(2000)
    ]
    assert joblib.Parallel(n_jobs=-1)(joblib.delayed(pid)(i) for i in range(4))[0] != pid(0)
    found = joblib.Parallel(return_as="generator")(joblib.delayed(square)(i) for i in range(5))
    assert list(found) == [0, 1, 4, 9, 16]


def test_the_old_name_of_the_context_works() -> None:
    with joblib.parallel_backend("stoker", n_jobs=2):
        assert joblib.Parallel()(joblib.delayed(square)(i) for i in (2, 3)) == [4, 9]


def test_nested_calls_end_though_the_outer_ones_have_all_cpus() -> None:
    found = joblib.Parallel()(joblib.delayed(nested_sum)(n) for n in range(5))
    assert found == [sum(i * i for i in range(n)) for n in range(5)]


def test_an_error_is_of_its_own_type_and_the_next_call_works() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        joblib.Parallel()(joblib.delayed(int)(x) for x in ("1", "x"))
    assert joblib.Parallel()(joblib.delayed(int)(x) for x in ("1", "2")) == [1, 2]


def test_large_arrays_are_shared_and_read_only() -> None:
    import numpy as np

    array = np.ones(1_000_000)
    assert joblib.Parallel()(joblib.delayed(np.sum)(array) for _ in range(4)) == [1_000_000] * 4
    assert not any(joblib.Parallel()(joblib.delayed(is_writeable)(array) for _ in range(4)))


def test_grid_search_unmodified() -> None:
    from sklearn.datasets import load_iris
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    x, y = load_iris(return_X_y=True)
    forest = RandomForestClassifier(n_estimators=5, random_state=0)
    search = GridSearchCV(forest, {"max_depth": [1, 2, 4]}, cv=3, n_jobs=2)
    assert search.fit(x, y).best_score_ > 0.9
    with joblib.parallel_config(backend="sequential"):
        alone = GridSearchCV(forest, {"max_depth": [1, 2, 4]}, cv=3).fit(x, y)
    assert alone.best_score_ == search.best_score_
