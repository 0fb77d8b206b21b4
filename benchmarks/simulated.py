"""How long ``stoker simulate`` takes for a large trace: the real core, in virtual time.

    python -m benchmarks.simulated [jobs [load]]

100,000 jobs of 200 users on 1,000 nodes of 8 GPUs, submitted at random so that they ask for ``load``
(0.9) of the GPUs on average: 7 of 10 want one GPU, others up to 64, as gangs of whole nodes; durations
are log-normal, 10 minutes in the median, 51 on average.
"""

from __future__ import annotations

import math
import random
import sys
import time

from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.state import SchedulingPolicy
from stoker_scheduler.simulation.inputs import Cluster, TraceJob
from stoker_scheduler.simulation.run import Simulation

NODES, GPUS, USERS = 1000, 8, 200
SIZES = {1: 0.70, 2: 0.10, 4: 0.08, 8: 0.07, 16: 0.03, 32: 0.015, 64: 0.005}
"""GPUs of a job -> the part of the jobs that want so many."""
MEDIAN_S, SIGMA = 600.0, 1.8
SEED = 1


def trace(jobs: int, load: float) -> list[TraceJob]:
    """Return jobs in the order of their submission."""
    random_ = random.Random(SEED)
    mean_gpus = sum(gpus * part for gpus, part in SIZES.items())
    mean_s = MEDIAN_S * math.exp(SIGMA**2 / 2)
    span_s = jobs * mean_gpus * mean_s / (NODES * GPUS * load)
    submitted = sorted(random_.uniform(0, span_s) for _ in range(jobs))
    sizes = random_.choices(list(SIZES), list(SIZES.values()), k=jobs)
    return [
        TraceJob(
            job_id=f"job_{number}",
            submit_s=at_s,
            duration_s=random_.lognormvariate(math.log(MEDIAN_S), SIGMA),
            tasks=-(-gpus // GPUS),
            gang=gpus > GPUS,
            requirements=make_requirements({"CPU": 4 * min(gpus, GPUS), "GPU": min(gpus, GPUS)}),
            queue="default",
            user=f"user_{random_.randrange(USERS)}",
            priority=0,
        )
        for number, (at_s, gpus) in enumerate(zip(submitted, sizes, strict=True))
    ]


def main() -> None:
    """Simulate, and print how long it took."""
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    load = float(sys.argv[2]) if len(sys.argv) > 2 else 0.9
    spec = {"CPU": 64.0, "GPU": float(GPUS)}
    nodes = tuple(make_node_spec(f"n_{index:04}", spec) for index in range(NODES))
    simulation = Simulation(Cluster(nodes, ()), trace(jobs, load), SchedulingPolicy())
    started_s = time.perf_counter()
    simulation.run()
    took_s = time.perf_counter() - started_s
    hours = simulation.log[-1].at_s / 3600
    print(f"{jobs} jobs at load {load:g} on {NODES} nodes: {took_s:.1f} s for {hours:.0f} hours")


if __name__ == "__main__":
    main()
