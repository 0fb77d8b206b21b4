"""An elastic job without a model: its replicas sleep for as long as a step would take.

Start a cluster and several of these, and see them grow, shrink and share:

    stoker start --head --num-gpus 8
    python examples/elastic.py --seconds 120 &
    python examples/elastic.py --seconds 60

Everything but the sleeping is real: it measures its steps, fits the model of their time, says so to the
scheduler, chooses the batch with the best goodput, and accepts offers at its batch boundaries.
"""

from __future__ import annotations

import argparse
import time

import stoker
from stoker.train import elastic
from stoker_goodput.batches import BatchLimits, best_goodputs
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.fitting import Observation, fit
from stoker_goodput.throughput import ThroughputParams

LIMITS = BatchLimits(min_batch=128, max_batch=4096, min_local=16, max_local=128)
TRUTH = ThroughputParams(0.05, 0.0015, 0.06, 0.002, 0.02, 0.001, 1.5)
"""What the fit is to find out."""
NOISE = GradientNoise(sqr=1.0, var=20.0)


class Replica:
    """One rank: a step takes as long as it would on this many replicas and nodes."""

    def step(self, nodes: int, replicas: int, local_batch: int) -> float:
        """Return the seconds that a step took."""
        began = time.perf_counter()
        time.sleep(float(TRUTH.step_time(nodes, replicas, local_batch)))
        return time.perf_counter() - began


def main() -> None:
    """Run for some seconds, and print what happens."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--cpus", action="store_true", help="replicas have a CPU each, not a GPU")
    given = options.parse_args()
    stoker.init()
    needs = {"CPU": 1.0} if given.cpus else {"GPU": 1.0}
    until = time.monotonic() + given.seconds
    with elastic.join(
        base_batch=LIMITS.min_batch,
        max_batch=LIMITS.max_batch,
        min_local_batch=LIMITS.min_local,
        max_local_batch=LIMITS.max_local,
        resources=needs,
    ) as session:
        train(session, until, on_cpus=given.cpus)


def train(session: elastic.Session, until: float, *, on_cpus: bool) -> None:
    """Train until a time of the monotonic clock: one generation after the other."""
    seen: dict[tuple[int, int, int], Observation] = {}
    most, progress = 0, 0.0
    while time.monotonic() < until:
        try:
            offer = session.wait_for_offer(timeout_s=1.0)
        except stoker.exceptions.GetTimeoutError:
            continue
        began = time.monotonic()
        generation = session.accept(offer)
        actor = stoker.remote(num_cpus=int(on_cpus), num_gpus=int(not on_cpus))(Replica)
        replicas = [
            actor.options(scheduling_strategy=one).remote() for one in generation.strategies()
        ]
        nodes, world = len(generation.nodes), generation.world
        most = max(most, world)
        local, accumulated = choose(seen, nodes, world)
        print(f"generation {generation.number}: {world} replicas on {nodes} nodes", flush=True)
        restart_s = None
        while replicas and time.monotonic() < until and session.offer is None:
            times = stoker.get([one.step.remote(nodes, world, local) for one in replicas])
            restart_s = restart_s or time.monotonic() - began
            step_s = max(times)
            seen[nodes, world, local] = Observation(
                nodes, world, local, float(TRUTH.accumulation_time(local)), step_s
            )
            batch = world * local * (accumulated + 1)
            efficiency = float(NOISE.efficiency(batch / LIMITS.min_batch))
            progress += batch * efficiency
            theta = fit(seen.values())
            session.report(
                params=[getattr(theta, name) for name in theta.__dataclass_fields__],
                grad_sqr=NOISE.sqr,
                grad_var=NOISE.var,
                profiled_replicas=most,
                restart_s=restart_s,
                progress=progress,
                batch=batch,
                local_batch=local,
                accumulated=accumulated,
                efficiency=efficiency,
                goodput=batch * efficiency / step_s,
            )
        for one in replicas:
            stoker.kill(one)
    print(f"done: {progress:.0f} samples' worth, {session.state.restarts} restarts", flush=True)


def choose(
    seen: dict[tuple[int, int, int], Observation], nodes: int, world: int
) -> tuple[int, int]:
    """Return the samples of a pass, and the passes that accumulate, with the best goodput so far known."""
    if not world:
        return 0, 0
    if not seen:
        return max(LIMITS.min_local, LIMITS.min_batch // world), 0
    best = best_goodputs(fit(seen.values()), NOISE, LIMITS, (nodes,), (world,)).batch(0)
    return (LIMITS.min_local, 0) if best is None else (best.local, best.accumulated)


if __name__ == "__main__":
    main()
