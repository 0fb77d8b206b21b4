"""Trains a byte-level GPT on this Python's own source code, data-parallel over actors.

    python examples/train_gpt.py                            # a cluster on this machine, 2 workers
    python examples/train_gpt.py --workers 4 --num-gpus-per-worker 1
    python examples/train_gpt.py --resume                   # go on from the last checkpoint
    stoker job submit -- python examples/train_gpt.py       # on the cluster at STOKER_ADDRESS

Each worker is an actor with a copy of the model. A step's batch depends on the seed and the step's
number only; every worker takes its slice of it, forward and backward run through Stoker's kernels,
and DistributedDataParallel averages the gradients, with a hook that --compress METHOD tells to send
less, for slow links. The driver needs no torch: it starts the workers, reads a stream of reports, and
keeps the curve and the checkpoint in --out.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from corpus import read_source
from exchange import METHODS, Exchange
from reporting import Progress, plot, readable, write

import stoker
from stoker.exceptions import ActorDiedError, GetTimeoutError, StokerError, WorkerDiedError

Report = dict[str, Any]
"""One report of rank 0: ``step`` (steps done), ``loss`` (mean over the global batch, nats per byte),
``step_s``; with some, ``checkpoint`` (bytes); with the last, ``validation_loss`` and ``samples``."""

PROMPTS = (b"\ndef ", b"\nclass ", b"\n    return ")
VALIDATION_BATCHES = 8
CAUSE_S = 5.0


@dataclass(frozen=True)
class Config:
    """What decides the result: two runs with equal configs have equal loss curves."""

    steps: int = 400
    batch: int = 32  # sequences per step, over all workers
    block: int = 128  # bytes per sequence
    layers: int = 4
    heads: int = 4
    dim: int = 128
    lr: float = 3e-3
    warmup: int = 40  # steps
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 0
    compress: str = "none"  # how gradients travel, see exchange.METHODS

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))

    def sample(self, text: np.ndarray, number: int) -> np.ndarray:
        """Draw batch ``number`` (the same on every machine) -> (batch, block + 1) int64."""
        generator = np.random.default_rng((self.seed, number))
        starts = generator.integers(0, len(text) - self.block - 1, size=self.batch)
        return text[starts[:, None] + np.arange(self.block + 1)].astype(np.int64)

    def model(self) -> Any:
        """Make the model, with the weights that the seed gives it, on the CPU."""
        import torch

        from stoker_kernels.models.gpt import GPT, GPTConfig

        torch.manual_seed(self.seed)
        return GPT(
            GPTConfig(layers=self.layers, heads=self.heads, dim=self.dim, block_size=self.block)
        )


@dataclass(frozen=True)
class Place:
    """Which worker this is, and what it may use."""

    rank: int
    workers: int
    group: str
    attempt: int = 0
    threads: int = 1
    gpus: float = 0.0
    timeout_s: float = 60.0
    checkpoint_every: int = 100
    stop_after: int = 0  # leave the loop at this step; 0: at the end


@stoker.remote(runtime_env={"preload": ["torch"]})
class Trainer:
    """One worker of the data-parallel group. ``text`` and ``held_out`` are arrays of bytes."""

    def __init__(
        self, config: Config, place: Place, text: np.ndarray, held_out: np.ndarray
    ) -> None:
        import torch

        self.config, self.place, self.text, self.held_out = config, place, text, held_out
        # A batch is always summed in the same pieces, so that 1 and 2 workers round alike.
        pieces = max(2, place.workers)
        if config.batch % pieces:
            raise ValueError(f"--batch {config.batch} cannot be split evenly into {pieces}")
        self.piece = config.batch // pieces
        share = pieces // place.workers
        self.pieces = range(place.rank * share, (place.rank + 1) * share)
        torch.set_num_threads(place.threads)
        self.device = torch.device("cuda" if place.gpus else "cpu")
        self.model = config.model().to(self.device)
        self.optimizer = self.model.optimizer(lr=config.lr)

    def ready(self) -> None:
        """Return once this worker has its place and its model."""

    def train(self, checkpoint: bytes | None) -> Iterator[Report]:
        """Join the group and train; rank 0 yields its reports, the others nothing."""
        config, place = self.config, self.place
        stoker.train.init_process_group(
            place.group,
            place.rank,
            place.workers,
            backend="nccl" if place.gpus >= 1 else "gloo",  # NCCL wants a GPU for each rank
            timeout_s=place.timeout_s,
            attempt=place.attempt,
        )
        exchange = Exchange(config.compress, self.model)
        first = self._load(checkpoint, exchange) if checkpoint else 0
        last = min(config.steps, place.stop_after or config.steps)
        for step in range(first, last):
            began = time.perf_counter()
            loss = self._step(step, exchange)
            report: Report = {"step": step + 1, "loss": loss, "step_s": time.perf_counter() - began}
            if (step + 1) % place.checkpoint_every == 0 or step + 1 == last:
                memories = exchange.gather_state()
                if place.rank == 0:
                    report["checkpoint"] = self._checkpoint(step + 1, memories)
            if place.rank == 0:
                # For the dashboard's view Training, and `stoker train runs`.
                tokens_per_s = config.batch * config.block / report["step_s"]
                lr = config.lr_at(step)
                stoker.train.report(step + 1, loss=loss, tokens_per_s=tokens_per_s, lr=lr)
                yield report
        validation_loss = self._validate()
        del exchange  # the group ends, with its threads, only where nothing holds it
        stoker.train.destroy_process_group()
        if place.rank == 0:
            samples = samples_of(self.model, config.seed)
            yield {"step": last, "validation_loss": validation_loss, "samples": samples}

    def _step(self, step: int, exchange: Exchange) -> float:
        """One update; returns the loss over the whole batch before it."""
        import torch

        pieces = list(self._pieces(self.config.sample(self.text, step)))
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for number, (tokens, targets) in enumerate(pieces, 1):
            # Gradients add up in this worker until its last piece, whose backward averages them over all.
            with exchange.ddp.no_sync() if number < len(pieces) else nullcontext():
                part = exchange.ddp(tokens, targets)[1] / len(pieces)
                part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        self.optimizer.step()
        return self._mean(loss)

    def _pieces(self, batch: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """This worker's pieces of ``batch``: tokens and targets, (piece, block) each."""
        import torch

        for piece in self.pieces:
            rows = torch.from_numpy(batch[piece * self.piece : (piece + 1) * self.piece])
            rows = rows.to(self.device)
            yield rows[:, :-1], rows[:, 1:]

    def _mean(self, loss: Any) -> float:
        """The mean of the workers' losses: all have equally many sequences."""
        import torch.distributed as dist

        loss /= self.place.workers
        dist.all_reduce(loss)
        return float(loss)

    def _validate(self) -> float:
        import torch

        loss = torch.zeros((), device=self.device)
        with torch.no_grad():
            for number in range(VALIDATION_BATCHES):
                for tokens, targets in self._pieces(self.config.sample(self.held_out, number)):
                    loss += self.model(tokens, targets)[1]
        return self._mean(loss / (VALIDATION_BATCHES * len(self.pieces)))

    def _checkpoint(self, step: int, memories: list[Any]) -> bytes:
        import torch

        file = io.BytesIO()
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        parts |= {"step": step, "config": asdict(self.config), "memories": memories}
        torch.save(parts, file)
        return file.getvalue()

    def _load(self, checkpoint: bytes, exchange: Exchange) -> int:
        import torch

        saved = torch.load(io.BytesIO(checkpoint), map_location=self.device, weights_only=True)
        if saved["config"] != asdict(self.config):
            raise ValueError(f"the checkpoint is of another run, with {saved['config']}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        exchange.load_state(saved["memories"], self.place.rank)
        return int(saved["step"])


def samples_of(model: Any, seed: int) -> list[bytes]:
    """Have a model go on from each prompt."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    return [
        model.generate(prompt, 160, temperature=0.7, top_k=40, generator=generator)
        for prompt in PROMPTS
    ]


class TrainingFailed(Exception):
    """A worker was lost or raised; the text names it and the cause."""


def run(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Train on the cluster that this process is connected to; returns what metrics.json holds."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    saved, metrics_path = out / "checkpoint.pt", out / "metrics.json"
    checkpoint, losses = None, []
    if args.resume and saved.exists():
        checkpoint = saved.read_bytes()
        losses = json.loads(metrics_path.read_text())["losses"]
        print(f"resuming from {saved}")
    trainers = start(config, args)
    shared = stoker.put(checkpoint)
    placed = [trainer.ready.remote() for trainer in trainers]
    streams = [trainer.train.remote(shared) for trainer in trainers]
    began, metrics = time.monotonic(), {}
    progress = Progress(
        total=config.steps, batch_bytes=config.batch * config.block, every=args.log_every
    )
    try:
        stoker.get(placed, timeout=args.timeout_s)  # says what holds the place of a missing one
        for ref in streams[0]:
            report = stoker.get(ref)
            if "loss" in report:
                losses[report["step"] - 1 :] = [report["loss"]]
                progress.show(report)
            if "checkpoint" in report:
                # The curve first: a checkpoint never is ahead of it.
                metrics = {"config": asdict(config), "workers": args.workers, "losses": losses}
                write(metrics_path, json.dumps(metrics).encode())
                write(saved, report["checkpoint"])
            metrics |= {k: report[k] for k in ("validation_loss",) if k in report}
            samples = report.get("samples", ())
    except Exception as error:
        progress.end()
        raise why(streams, error) from error
    finally:
        for trainer in trainers:
            stoker.kill(trainer)
    progress.end()
    metrics |= {"seconds": round(time.monotonic() - began, 1), "checkpoint": str(saved.resolve())}
    metrics["samples"] = [readable(sample) for sample in samples]
    metrics["curve"] = str(plot(metrics, out.resolve() / "loss.png") or "")
    write(metrics_path, json.dumps(metrics, indent=1).encode())
    return metrics


def start(config: Config, args: argparse.Namespace) -> list[Any]:
    """Start the workers; each gets its share of the CPUs of the largest node, and so many threads."""
    text, held_out = (stoker.put(part) for part in read_source())
    largest = max(node["resources"].get("CPU", 0) for node in stoker.nodes())
    cpus = args.num_cpus_per_worker or max(1, int(largest // args.workers))
    gpus = args.num_gpus_per_worker
    shape = f"{config.layers} layers, width {config.dim}, batch {config.batch} x {config.block}"
    print(f"model: {shape}; {args.workers} workers with {cpus:g} CPUs and {gpus:g} GPUs each")
    group = f"gpt-{stoker.get_runtime_context().job_id}-{time.time_ns()}"
    return [
        Trainer.options(num_cpus=cpus, num_gpus=gpus).remote(
            config,
            Place(
                rank,
                args.workers,
                group,
                threads=max(1, int(cpus)),
                gpus=gpus,
                timeout_s=args.timeout_s,
                checkpoint_every=args.checkpoint_every,
                stop_after=args.stop_after,
            ),
            text,
            held_out,
        )
        for rank in range(args.workers)
    ]


def why(streams: list[Any], error: Exception) -> TrainingFailed:
    """Find the first cause: a worker that died, rather than another's broken connection to it."""
    found: dict[int, Exception] = {}
    silent = []
    for rank, stream in enumerate(streams):
        try:
            stoker.get(stream.completed(), timeout=CAUSE_S)
        except GetTimeoutError:
            silent.append(rank)
        except Exception as other:
            found[rank] = other
    died = {r: e for r, e in found.items() if isinstance(e, (ActorDiedError, WorkerDiedError))}
    hint = f"\nworkers {silent} do not answer" if silent and not died else ""
    for rank, cause in (died or found).items():
        return TrainingFailed(f"worker {rank} of {len(streams)} failed: {cause}{hint}")
    return TrainingFailed(f"training failed: {error}{hint}")


def arguments() -> argparse.ArgumentParser:
    """The command line; the fields of Config are options too."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's own source, on a Stoker cluster."
    )
    parser.add_argument("--workers", type=int, default=2, help="actors that train together")
    parser.add_argument(
        "--num-gpus-per-worker", type=float, default=0.0, help="0: train on the CPU"
    )
    parser.add_argument(
        "--num-cpus-per-worker", type=float, help="and threads (default: a node's CPUs / workers)"
    )
    parser.add_argument("--out", default="runs/train_gpt", help="for curve, checkpoint and metrics")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument(
        "--stop-after", type=int, default=0, help="end at this step, to resume later"
    )
    parser.add_argument("--log-every", type=int, default=25, help="steps, where it is no terminal")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for a worker")
    for field in fields(Config):
        choices, what = (METHODS, "method") if field.name == "compress" else (None, "model, data")
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name}", type=kind, default=field.default, choices=choices, help=what
        )
    return parser


def config_of(args: argparse.Namespace) -> Config:
    """Return the part of the arguments that decides the result."""
    return Config(**{field.name: getattr(args, field.name) for field in fields(Config)})


def main() -> int:
    """Run the example; 1 if a worker was lost."""
    args = arguments().parse_args()
    cluster = stoker.init()
    print(f"cluster: {cluster.address}, job {cluster.job_id}")
    try:
        metrics = run(config_of(args), args)
    except (TrainingFailed, StokerError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    for sample in metrics["samples"]:
        print(f"--- sample\n{sample}")
    first, last = metrics["losses"][0], metrics["losses"][-1]
    print(
        f"--- loss {first:.3f} -> {last:.3f}, held out {metrics['validation_loss']:.3f} nats per byte "
        f"after {len(metrics['losses'])} steps, {metrics['seconds']} s"
    )
    print(f"curve: {metrics['curve'] or 'none'}; checkpoint: {metrics['checkpoint']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
