"""How long training stops when a node joins, of plain torchrun: ``python -m benchmarks.resize_torchrun``.

Two agents of ``torchrun --nnodes 1:4`` on this machine, with a c10d rendezvous and without Stoker: the first
trains a model of 10M parameters over gloo, the second joins. The pause is the time from the end of the last
step before to the end of the first step after, as the survivor's workers write them down: their processes are
restarted, load the checkpoint of the last step, and form a group. It ends with a row of a Markdown table, of
several runs the p50 and the worst; ``--parameters 0`` leaves what processes and rendezvous alone cost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WAIT_S = 180.0
STEADY_STEPS = 5
"""Steps of the first node before the second is started, and of both before all is ended."""
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torch 2.13 tells of a shared store, its default, in the first round alone: a node that joins
later waits for it until it fails, and takes the first along."""

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, parameters = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
side = max(1, int((parameters / 4) ** 0.5))
layers = [torch.nn.Linear(side, side, bias=False) for _ in range(4)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
kept = os.path.join(folder, "checkpoint.pt")
if os.path.exists(kept):
    state = torch.load(kept)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
ddp = DistributedDataParallel(model)
while True:
    optimizer.zero_grad()
    ddp(torch.ones(1, side)).square().mean().backward()
    optimizer.step()
    if rank == 0:
        with open(os.path.join(folder, "steps"), "a") as file:
            file.write(f"{time.time():.6f} {world}\\n")
        if len(sys.argv) > 3:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, kept + ".tmp")
            os.replace(kept + ".tmp", kept)
"""


def agent(folder: Path, port: int, parameters: int, *, is_host: bool) -> subprocess.Popen[bytes]:
    """Start one node's torchrun."""
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "1:4", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "resize",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
        "--rdzv-conf", f"is_host={int(is_host)},last_call_timeout=1",
        str(folder / "script.py"), str(folder), str(parameters), "checkpoint",
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **NO_SHARED_STORE}
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=(folder / "log").open("ab")
    )


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """At the end no torchrun of this is left, nor its workers."""
    try:
        yield
    finally:
        for one in processes:
            one.terminate()  # it ends its workers
        for one in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(40)
            one.kill()


def steps(folder: Path) -> list[tuple[float, int]]:
    """Return when each step ended, and the world it was of."""
    path = folder / "steps"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(float(row[0]), int(row[1])) for row in rows if len(row) == 2]


def wait_for_steps(folder: Path, world: int) -> None:
    """Return when enough steps of this world were done; fails with the agents' log."""
    deadline_s = time.monotonic() + WAIT_S
    while sum(one == world for _, one in steps(folder)) < STEADY_STEPS:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no steps of {world} nodes:\n{(folder / 'log').read_text()}")
        time.sleep(0.05)


def pause_s(parameters: int) -> float:
    """Return the seconds without a step when a second node joins the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [agent(folder, port, parameters, is_host=True)]
        with ended(processes):
            wait_for_steps(folder, 1)
            processes.append(agent(folder, port, parameters, is_host=False))
            wait_for_steps(folder, 2)
        rows = steps(folder)
    last = max(at_s for at_s, world in rows if world == 1)
    first = min(at_s for at_s, world in rows if world == 2)
    return first - last


def row(name: str, pauses: list[float]) -> str:
    """Return a row of a table: p50 and the worst, in seconds."""
    return f"| {name} | {statistics.median(pauses):.2f} | {max(pauses):.2f} | {len(pauses)} |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    pauses = []
    for _ in range(options.runs):
        pauses.append(pause_s(options.parameters))
        print(f"a node joined: {pauses[-1]:.2f} s without a step", file=sys.stderr, flush=True)
    print("| resize, 1 -> 2 nodes, gloo | pause p50 (s) | worst | runs |")
    print("|---|---|---|---|")
    print(row(f"torchrun --nnodes 1:4, {options.parameters / 1e6:g}M parameters", pauses))


if __name__ == "__main__":
    main()
