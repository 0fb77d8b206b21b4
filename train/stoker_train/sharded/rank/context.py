"""The context that a loop gets: its place in the plan, and the calls by which it trains.

Made by the rank's actor, used in the loop's thread. It puts together what others do: parallelism inside a
stage (``parallel``), pipelines (``pipelining``), checkpoints, and the loader. A rank never goes on after
another one was lost: the whole gang begins anew from the newest checkpoint.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import stoker.train
from stoker.exceptions import (
    BadRequestError,
    ConflictError,
    FencedError,
    StokerError,
    UnavailableError,
)
from stoker_train.elastic.data.cursor import Cursor
from stoker_train.elastic.data.loader import ElasticLoader, StepPlan
from stoker_train.elastic.state.rng import RandomState
from stoker_train.sharded.checkpoints.state import PER_RANK
from stoker_train.sharded.checkpoints.store import NO_AGREEMENT, Saved, ShardedCheckpoints
from stoker_train.sharded.parallel.apply import parallelize, release
from stoker_train.sharded.parallel.clipping import clip_grad_norm_
from stoker_train.sharded.parallel.mesh import DATA, PIPELINE, TENSOR, device_mesh
from stoker_train.sharded.parallel.offload import offload_optimizer
from stoker_train.sharded.parallel.tensor import named_plans
from stoker_train.sharded.rank.agreement import Agreement
from stoker_train.sharded.rank.reports import Committed, Loaded, Stepped
from stoker_train.sharded.records import GROUP

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from stoker_train.elastic.replica.link import Link
    from stoker_train.sharded.pipelining.executor import Pipeline
    from stoker_train.sharded.pipelining.splitting import Chain
    from stoker_train.sharded.rank.work import Work

__all__ = ("Context", "StopTraining")

_log = logging.getLogger(__name__)
_OWN = frozenset({PER_RANK, "stoker_cursor"})
_TELL_S = 0.2
LossFn = Callable[[Any, Any], Any]


class StopTraining(BaseException):
    """The user has asked for the end: raised by ``ctx.step``, no loop should catch it."""


class Context:
    """One rank of a gang, as its loop sees it."""

    def __init__(self, work: Work, rank: int, gang: int, link: Link, asked: set[str]) -> None:
        spec = work.spec
        self.rank, self.plan = rank, spec.strategy
        """``plan``: the :class:`Strategy` by which the model is cut."""
        self.folder = Path(spec.checkpoint.path or ".")
        self.stopped = False
        self.activity = "its start"
        """What the loop is at, for the error of a rank that waits in vain."""
        on_gpu = spec.resources.get("GPU", 0) >= 1 and torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        self._work, self._gang, self._link, self._asked = work, gang, link, asked
        self._cursor, self._random = Cursor(), RandomState()
        self._modules: list[nn.Module] = []
        self._pipeline: Pipeline | None = None
        self._loss_fn: LossFn | None = None
        self._state: dict[str, Any] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._max_norm: float | None = None
        self._store: ShardedCheckpoints | None = None
        self._loaders: list[ElasticLoader] = []
        self._reported: dict[str, Any] = {}
        # A loss may come while a checkpoint is written: the one before it is as old as two intervals then.
        self._save_every = max(1, spec.checkpoint.every // 2)
        self._saved_step, self._told_s = -1, 0.0
        self._last_loss: Any = None

    # The rank's place.

    @property
    def world_size(self) -> int:
        """The ranks of the gang."""
        return self.plan.gpus

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh of pipeline, data and tensor parallelism: dimensions "pp", "data", "tp"."""
        return self._mesh

    @property
    def data_rank(self) -> int:
        """This rank's number among the data-parallel ones; ranks of the same number have the same samples."""
        return self._mesh.get_local_rank(DATA)

    @property
    def tensor_rank(self) -> int:
        """This rank's number in its tensor-parallel group."""
        return self._mesh.get_local_rank(TENSOR)

    @property
    def stage(self) -> int:
        """This rank's number in its pipeline."""
        return self._mesh.get_local_rank(PIPELINE)

    @property
    def step_number(self) -> int:
        """The steps that are done."""
        return self._cursor.step

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._cursor.epoch

    def open(self) -> None:
        """Form the process group and the mesh; the actor calls it before the loop."""
        spec = self._work.spec
        threads = int(spec.resources.get("CPU", 1))
        torch.set_num_threads(max(1, threads))
        self.activity = "the rendezvous of the gang"
        stoker.train.init_process_group(
            GROUP,
            self.rank,
            self.world_size,
            backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            timeout_s=spec.failure.collective_timeout_s,
            rendezvous_timeout_s=spec.failure.start_s,
            attempt=self._gang,
        )
        self.activity = "making the process groups"
        self._mesh = device_mesh(self.plan, self.device.type)
        limit = timedelta(seconds=spec.failure.collective_timeout_s)
        for dim in (DATA, PIPELINE, TENSOR):  # else half an hour
            dist.distributed_c10d._set_pg_timeout(limit, self._mesh.get_group(dim))
        self._agreement = Agreement(self._asked, spec.failure.collective_timeout_s)
        random.seed(spec.seed)
        torch.manual_seed(spec.seed)  # all alike: each makes the same model before it is cut
        self.activity = "the loop, before its first step"

    # What a loop calls.

    def parallelize(
        self,
        model: nn.Module,
        *,
        precision: Any = None,
        tensor_plan: Any = None,
        chain: Chain | None = None,
    ) -> Any:
        """Cut the whole model by the plan, and return what this rank has of it; before the optimizer.

        The module itself, or this rank's part of it in a pipeline (a list of parts where the plan
        interleaves). ``tensor_plan``: how modules are cut, by patterns of their names, for models that are
        none of ours; ``chain``: in what order their modules run, for a pipeline. ``precision``: "bf16"
        computes in 16 bit with fp32 parameters. BadRequestError for what cannot be cut.
        """
        if self._modules:
            raise ConflictError(
                "ctx.parallelize() was called before\na job trains one model: call it once"
            )
        parts = [model]
        if self.plan.pipeline > 1:
            from stoker_train.sharded.pipelining.splitting import count_layers, cut_evenly, split

            if tensor_plan is not None and self.plan.tensor > 1:
                named_plans.check(model, tensor_plan)
            count = self.plan.pipeline * self.plan.interleave
            stages = self._work.spec.stages or cut_evenly(count_layers(model, chain), count)
            parts = split(model, stages, pipeline=self.plan.pipeline, rank=self.stage, chain=chain)
        self._modules = [
            parallelize(part, self.plan, self._mesh, tensor_plan=tensor_plan, precision=precision)
            for part in parts
        ]
        return self._modules[0] if len(self._modules) == 1 else self._modules

    def parameters(
        self, model: nn.Module | Sequence[nn.Module] | None = None
    ) -> list[nn.Parameter]:
        """Return the parameters of what :meth:`parallelize` returned, for the optimizer."""
        if model is None:
            model = self._own_modules()
        parts: Iterable[nn.Module] = [model] if isinstance(model, torch.nn.Module) else model
        return [one for part in parts for one in part.parameters()]

    def state(
        self,
        *,
        model: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        max_norm: float | None = None,
        **objects: Any,
    ) -> None:
        """Say what checkpoints keep, and go on from the newest one if there is one.

        ``objects``: anything with ``state_dict``. ``max_norm``: gradients are clipped to this norm over all
        shards. Every rank calls it once, before its first step; after a loss the loop begins from its top.
        """
        if self._store is not None:
            raise ConflictError(
                "ctx.state() was called before\ncall it once, before the first step"
            )
        self._own_modules()
        if max_norm is not None and not max_norm > 0.0:
            raise BadRequestError(
                f"max_norm {max_norm} must be above 0\ngive the greatest norm that is wanted, or None",
                field="max_norm",
            )
        for name, one in objects.items():
            if name in _OWN or not callable(getattr(one, "load_state_dict", None)):
                raise BadRequestError(
                    f"{name} of ctx.state() has no state_dict() and load_state_dict()\n"
                    "give an object that has both",
                    field=name,
                )
        spec = self._work.spec
        self._optimizer = optimizer
        if self.plan.offload:
            self._optimizer = offload_optimizer(optimizer)
        self._scheduler, self._max_norm = scheduler, max_norm
        others = objects if scheduler is None else {**objects, "scheduler": scheduler}
        self._state = {
            "model": model,
            "optimizer": optimizer,
            "stoker_cursor": self._cursor,
            **others,
        }
        self._seed_random(0)
        with self._at("loading the checkpoint"):
            self._store = ShardedCheckpoints(
                self.folder,
                spec.checkpoint.keep,
                self._gang,
                owner=self._work.job_id,
                timeout_s=max(spec.failure.collective_timeout_s, spec.failure.start_s),
            )
            loaded = self._store.load({**self._state})
        if loaded is not None:
            self._saved_step = self._cursor.step
            if loaded.per_rank is not None and loaded.meta.get("plan") == str(self.plan):
                self._random.load_state_dict(loaded.per_rank)
            else:  # not those of the first steps again
                self._seed_random(self._cursor.step)
        self._link.report(Loaded(self.rank, self._gang, self._cursor.step), urgent=True)

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> ElasticLoader:
        """Return the loader of the training data: this data-parallel rank's sequences of each step.

        The order is that of one process, whatever the plan. Ranks that share a part of the data (of tensor
        groups and pipelines) get the same. What is left of an epoch and makes no whole batch is left out.
        """
        batch = self.plan.batch
        try:
            loader = ElasticLoader(
                dataset,
                self._cursor,
                self._share,
                shuffle=shuffle,
                collate_fn=collate_fn,
                num_workers=num_workers,
                device=self.device,
                base_batch=batch,
                seed=self._work.spec.seed if seed is None else seed,
                drop_last=True,
            )
        except BadRequestError as error:
            if error.field != "base_batch":
                raise
            raise BadRequestError(
                f"the data set has fewer sequences than a step: {batch}\n"
                "give a smaller batch to ShardedTrainer(), or more data",
                field="batch",
            ) from None
        self._loaders.append(loader)
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs up to ``count``; a job that was interrupted goes on inside one."""
        self._own_store()
        while self._cursor.epoch < count:
            epoch = self._cursor.epoch
            yield epoch
            if self._cursor.epoch == epoch:
                self._cursor.begin_epoch(epoch + 1)

    def forward_backward(
        self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None
    ) -> torch.Tensor:
        """Run this rank's micro-batches forward and backward; return the mean loss of all ranks.

        ``inputs`` (B, ...): a tensor, or a tuple or dict of the model's arguments, cut along the first
        dimension; ``targets`` likewise. ``loss_fn(output, targets)`` returns the mean loss of a
        micro-batch; without it the model is called with ``targets=``, and returns the loss. Gradients are
        those of the mean over the whole batch.
        """
        with self._at("forward_backward"):
            return self._runner(loss_fn).step(inputs, targets)

    def evaluate(
        self, inputs: Any, targets: Any = None, loss_fn: LossFn | None = None
    ) -> torch.Tensor:
        """Run a batch forward alone, and return its mean loss over all ranks."""
        with self._at("evaluate"):
            return self._runner(loss_fn).evaluate(inputs, targets)

    def step(self, loss: Any = None, max_norm: float | None = None) -> bool:
        """End a step: clip, update, clear gradients, move on in the data, and save where it is time.

        A save waits for the one before, so that a loss costs no more than ``checkpoint.every`` steps.
        ``loss`` is shown by ``progress()``. ``max_norm`` is that of this step, by default that of
        :meth:`state`. Returns True; it raises where the job ends here.
        """
        self._own_store()
        optimizer = self._optimizer
        assert optimizer is not None
        release(self._modules)  # a loop may have called its model to evaluate it
        norm = self._max_norm if max_norm is None else max_norm
        if norm is not None:
            with self._at("clipping the gradients"):
                copies = self._pipeline.copies if self._pipeline is not None else []
                clip_grad_norm_(self.parameters(), norm, self._mesh, counted_elsewhere=copies)
        with self._at("the optimizer's step"):
            optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        self._cursor.advance(self.plan.batch)
        self._last_loss = loss
        if self.rank == 0 and time.monotonic() - self._told_s > _TELL_S:
            self._tell()
        with self._at("agreeing on what users ask for"):
            asks = self._agreement.exchange()
        if "checkpoint" in asks or self._cursor.step % self._save_every == 0:
            self._save()
        if "stop" in asks:
            self.stopped = True
            raise StopTraining
        return True

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Return the mean of a value over all ranks, each with its weight; every rank calls it."""
        total = torch.tensor([float(value) * weight, weight], dtype=torch.float64)
        with self._at("a mean over all ranks"):
            dist.all_reduce(total)
        return float(total[0] / total[1]) if total[1] else float("nan")

    def report(self, **values: Any) -> None:
        """Show values beside the loss; those of rank 0 count."""
        self._reported.update(values)

    def finish(self) -> None:
        """End the loop: the last state is saved, and all that is to be written is."""
        for loader in self._loaders:
            loader.close()
        if self._store is None:
            raise ConflictError(
                "the loop has ended without a state\ncall ctx.state(model=..., optimizer=...)"
            )
        with self._at("the end of the loop"):
            self._agreement.settle()
        if self._saved_step != self._cursor.step:
            self._save()
        with self._at("the last checkpoint"):
            saved = self._store.wait()
            if saved is not None and saved.problem:
                raise _kind_of(saved)(f"the last checkpoint could not be written\n{saved.problem}")
        if self.rank == 0:
            if saved is not None:  # its own report may come too late
                self._tell_saved(saved)
            self._tell(urgent=True)

    # Its own.

    @contextmanager
    def _at(self, activity: str) -> Iterator[None]:
        """Note what the loop is at; it stays where an error comes out of it."""
        self.activity = f"step {self._cursor.step}, {activity}"
        yield
        self.activity = f"step {self._cursor.step}, between two calls of ctx"

    def _seed_random(self, step: int) -> None:
        """Seed this rank's random numbers, as all ranks of its tensor-parallel group do."""
        place = self.data_rank + self.plan.data * self.stage
        self._random.seed(self._work.spec.seed, step, place)

    def _own_modules(self) -> list[nn.Module]:
        if not self._modules:
            raise ConflictError("the loop has no model\ncall ctx.parallelize(model) before")
        return self._modules

    def _own_store(self) -> ShardedCheckpoints:
        if self._store is None:
            raise ConflictError(
                "the loop has no state\ncall ctx.state(model=..., optimizer=...) before"
            )
        return self._store

    def _share(self) -> StepPlan:
        size = self.plan.batch // self.plan.data
        return StepPlan(self.plan.batch, self.data_rank * size, size, size)

    def _runner(self, loss_fn: LossFn | None) -> Pipeline:
        """Return the pipeline, of one stage where the plan has none; loss functions may change."""
        if self._pipeline is None or (self._loss_fn is None) != (loss_fn is None):
            from stoker_train.sharded.pipelining.executor import Pipeline

            self._pipeline = Pipeline(
                self._own_modules(),
                self.plan,
                self._mesh,
                None if loss_fn is None else self._loss,
                timeout_s=self._work.spec.failure.collective_timeout_s,
            )
        self._loss_fn = loss_fn
        return self._pipeline

    def _loss(self, output: Any, targets: Any) -> Any:
        assert self._loss_fn is not None
        return self._loss_fn(output, targets)

    def _save(self) -> None:
        store, step = self._own_store(), self._cursor.step
        state = {**self._state, PER_RANK: self._random.state_dict()}
        with self._at("saving a checkpoint"):
            future = store.save(step, state, meta={"plan": str(self.plan)})
            if self.rank == 0:
                future.add_done_callback(lambda done: self._tell_saved(done.result()))
            if self._work.spec.checkpoint.every == 1:
                store.wait()
        self._saved_step = step

    def _tell_saved(self, saved: Saved) -> None:
        self._link.report(Committed(self.rank, self._gang, saved.step, saved.problem), urgent=True)

    def _tell(self, *, urgent: bool = False) -> None:
        """Tell of the last step. It waits for the GPU to have made its loss, so not for each."""
        self._told_s = time.monotonic()
        metrics = {"epoch": self._cursor.epoch, **self._reported}
        if self._last_loss is not None:
            metrics["loss"] = self._last_loss
        shown = {
            name: float(one.detach()) if isinstance(one, torch.Tensor) and one.numel() == 1 else one
            for name, one in metrics.items()
        }
        self._link.report(Stepped(0, self._gang, self._cursor.step, shown), urgent=urgent)


def _kind_of(saved: Saved) -> type[StokerError]:
    """Return the error that a save without a checkpoint is: of another gang, another rank, or its own."""
    if saved.fenced:
        return FencedError
    return UnavailableError if saved.problem.startswith(NO_AGREEMENT) else ConflictError
