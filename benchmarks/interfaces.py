"""``python -m benchmarks.interfaces``: Python's own interfaces over Stoker, and over processes, in turn.

100,000 calls of a function that returns at once, by ``Pool.map`` and ``Executor.map`` with the same
chunksize on both sides, and 10,000 by ``submit``. Where joblib and scikit-learn are installed (as in an
environment of ``make interop``) scikit-learn's own example of joblib as well: a randomized search over
SVMs on its digits. Pools have ``--cpus`` processes. Rounds alternate; medians, and ratios round by round.

Stoker sends chunks that are short together in one call, so the chunksize is the least that travels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import stoker
from benchmarks.results import Row, append
from stoker.util import Pool

GOALS = {"pool_map": 1.0, "executor_map": 1.0, "joblib": 0.9}
CHUNKS = (1, 10, 100, 0)
"""The chunksizes; 0 is that which ``Pool.map`` chooses."""


def same(x: int) -> int:
    """Return the argument."""
    return x


def took_s(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def pool_map(make: Callable[[], Any], calls: int, chunksize: int) -> float:
    """Return calls per second of ``Pool.map``, in a pool whose workers are there."""
    with make() as pool:
        pool.map(same, range(1000), chunksize=10)
        return calls / took_s(lambda: pool.map(same, range(calls), chunksize=chunksize or None))


def executor_map(make: Callable[[], Any], calls: int, chunksize: int) -> float:
    """Return calls per second of ``Executor.map``."""
    with make() as executor:
        list(executor.map(same, range(1000), chunksize=10))
        return calls / took_s(lambda: list(executor.map(same, range(calls), chunksize=chunksize)))


def executor_submit(make: Callable[[], Any], calls: int) -> float:
    """Return calls per second of ``submit``, all waited for."""
    with make() as executor:
        list(executor.map(same, range(1000), chunksize=10))

        def submit() -> None:
            concurrent.futures.wait([executor.submit(same, i) for i in range(calls)])

        return calls / took_s(submit)


def search(backend: str, jobs: int, iterations: int) -> float:
    """Return seconds of scikit-learn's example: a randomized search on the digits."""
    import joblib
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import RandomizedSearchCV
    from sklearn.svm import SVC

    x, y = load_digits(return_X_y=True)
    space = {
        "C": np.logspace(-6, 6, 30),
        "gamma": np.logspace(-8, 8, 30),
        "tol": np.logspace(-4, -1, 30),
        "class_weight": [None, "balanced"],
    }
    model = RandomizedSearchCV(
        SVC(kernel="rbf"), space, cv=5, n_iter=iterations, random_state=0, n_jobs=jobs
    )
    with joblib.parallel_config(backend=backend):
        return took_s(lambda: model.fit(x, y))


def cases(options: argparse.Namespace) -> dict[str, dict[str, Callable[[], float]]]:
    """Return what is timed, by case and backend."""
    cpus, calls = options.cpus, options.calls
    pools = {
        "stoker": lambda: Pool(cpus),
        "multiprocessing": lambda: multiprocessing.get_context("fork").Pool(cpus),
    }
    executors = {
        "stoker": lambda: stoker.Executor(cpus),
        "concurrent.futures": lambda: concurrent.futures.ProcessPoolExecutor(
            cpus, mp_context=multiprocessing.get_context("fork")
        ),
    }
    found: dict[str, dict[str, Callable[[], float]]] = {}
    for size in CHUNKS:
        found[f"pool_map_100k_chunk_{size or 'auto'}"] = {
            name: lambda make=make, size=size: pool_map(make, calls, size)
            for name, make in pools.items()
        }
        if size:
            # Beside the faster of the two pools of the standard library.
            found[f"executor_map_100k_chunk_{size}"] = {
                "stoker": lambda size=size: executor_map(executors["stoker"], calls, size),
                "multiprocessing": lambda size=size: pool_map(
                    pools["multiprocessing"], calls, size
                ),
            }
    found["executor_submit_10k"] = {
        name: lambda make=make: executor_submit(make, 10_000) for name, make in executors.items()
    }
    if importlib.util.find_spec("sklearn") is not None:
        from stoker.util import register_stoker

        register_stoker()
        found["joblib_search_digits"] = {
            name: lambda name=name: 1 / search(name, cpus, options.iterations)
            for name in ("stoker", "loky")
        }
    return found


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interfaces", description=__doc__)
    parser.add_argument("only", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--iterations", type=int, default=20, help="candidates of the search")
    parser.add_argument("--csv", default="", help="append results to this file")
    options = parser.parse_args()
    stoker.init(num_cpus=options.cpus, log_to_driver=False)
    rows: dict[str, list[Row]] = {}
    for case, backends in cases(options).items():
        if options.only and not any(name in case for name in options.only):
            continue
        found: dict[str, list[float]] = {name: [] for name in backends}
        for number, name in itertools.product(range(options.rounds), backends):
            found[name].append(backends[name]())
            if number == 0 and options.rounds > 1:
                found[name][:] = [backends[name]()]  # the first run warms caches on both sides
        ours, theirs = found.values()
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        goal = next((g for prefix, g in GOALS.items() if case.startswith(prefix)), None)
        middle = statistics.median(ratios)
        verdict = "" if goal is None else f", goal {goal:g}x {'yes' if middle >= goal else 'NO'}"
        peer = list(found)[1]
        print(
            f"{case:28} {statistics.median(ours):>10.4g}/s {peer} {statistics.median(theirs):>10.4g}/s "
            f"{middle:.2f}x ({min(ratios):.2f}-{max(ratios):.2f}){verdict}",
            flush=True,
        )
        for name, values in found.items():
            row = Row(f"interfaces_{case}", statistics.median(values), "/s")
            rows.setdefault(name, []).append(row)
    stoker.shutdown()
    if options.csv:
        for name, measured in rows.items():
            version = sys.version.split()[0]  # of the standard library
            if name == "stoker":
                version = stoker.__version__
            elif name == "loky":
                version = f"joblib {importlib.metadata.version('joblib')}"
            append(options.csv, name, version, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
