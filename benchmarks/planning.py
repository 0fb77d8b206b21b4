"""How long the planner takes: GPT-3's shape, 96 layers, on 1,024 GPUs.

    python -m benchmarks.planning [--gpus 1024] [--rounds 3]

There is no peer that plans over the same space; the goal is 5 s on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time

from stoker_train.planning import ClusterShape, plan_training
from stoker_train.planning.model_shape import transformer


def main() -> None:
    """Print the plans, and the median seconds of making them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shape = transformer(
        "gpt3", layers=96, hidden=12288, heads=96, vocab=51200, learned_positions=2048,
        norm_parameters=2 * 12288, bias=True,
    )  # fmt: skip
    cluster = ClusterShape(options.gpus // 8, 8, 80e9, 0.7 * 989e12)
    took = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        plans = plan_training(shape, cluster=cluster, batch=1536, seq_len=2048)
        took.append(time.perf_counter() - began)
    print(plans)
    print(
        f"{statistics.median(took):.2f} s (median of {options.rounds}) for {plans.considered} plans"
    )


if __name__ == "__main__":
    main()
