"""Pipelines of processes: losses and weights of one process, whatever the schedule and the cut."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stoker_train.planning.strategy import Recompute, Strategy
from tests.unit.train.elastic.rank_processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB, WIDTH, TOKENS, BATCH, STEPS = 32, 16, 16, 16, 20
WAIT_S = 240.0
"""For a message of a step: a busy machine needs long."""
PRELOAD = (
    "torch._dynamo",
    "stoker_kernels.models",
    "stoker_train.sharded.parallel.apply",
    "stoker_train.sharded.parallel.clipping",
    "stoker_train.sharded.pipelining.executor",
    "stoker_train.sharded.pipelining.splitting",
)
FORM_BYTES = 8 * 89
CLIP = 0.5
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    processes = RankProcesses(8, tmp_path_factory.mktemp("ranks"), PRELOAD)
    yield processes
    processes.close()


# -- what runs on ranks ----------------------------------------------------------------------------


def make_model(tied: bool, **changes: Any) -> nn.Module:
    from stoker_kernels.models import GPT, GPTConfig

    torch.manual_seed(1)
    shape = {
        "layers": 4, "heads": 2, "dim": WIDTH, "block_size": TOKENS, "vocab_size": VOCAB,
        "ops": "torch", "tied": tied, "full_logits": False,
    }  # fmt: skip
    return GPT(GPTConfig(**{**shape, **changes}))


def layers_of(strategy: Strategy) -> int:
    return max(4, strategy.pipeline * strategy.interleave)


def batches(count: int, rows: int = BATCH) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (rows, TOKENS + 1), generator=drawn)
        yield tokens[:, :-1], tokens[:, 1:]


def make_pipeline(
    model: nn.Module, strategy: Strategy, *args: Any, chain: Any = None, **options: Any
) -> tuple[Any, list[nn.Module], Any]:
    """Return the rank's pipeline, its parts and its mesh."""
    from stoker_train.sharded.parallel.apply import parallelize
    from stoker_train.sharded.parallel.mesh import PIPELINE, device_mesh
    from stoker_train.sharded.pipelining.executor import Pipeline
    from stoker_train.sharded.pipelining.splitting import count_layers, cut_evenly, split

    mesh = device_mesh(strategy, "cpu")
    stages = cut_evenly(count_layers(model, chain), strategy.pipeline * strategy.interleave)
    rank = mesh.get_local_rank(PIPELINE)
    parts = split(model, stages, pipeline=strategy.pipeline, rank=rank, chain=chain)
    parts = [parallelize(part, strategy, mesh) for part in parts]
    pipeline = Pipeline(parts, strategy, mesh, *args, **{"timeout_s": WAIT_S, **options})
    return pipeline, parts, mesh


def parameters_of(parts: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for part in parts for parameter in part.parameters()]


def whole_state(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    found = {name: value for part in parts for name, value in part.state_dict().items()}
    return {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in found.items()}


def train(
    rank: int, world: int, strategy: Strategy, tied: bool, kind: str | None, count: int
) -> Any:
    from stoker_train.sharded.parallel.clipping import clip_grad_norm_

    torch.set_num_threads(1)
    model = make_model(tied, layers=layers_of(strategy))
    pipeline, parts, mesh = make_pipeline(model, strategy, kind=kind)
    own = parameters_of(parts)
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    share = BATCH // strategy.data
    rows = slice(mesh.get_local_rank("data") * share, (mesh.get_local_rank("data") + 1) * share)
    losses, norms = [], []
    for inputs, targets in batches(count):
        losses.append(float(pipeline.step(inputs[rows], targets[rows])))
        copies = pipeline.copies
        norms.append(float(clip_grad_norm_(own, CLIP, mesh, counted_elsewhere=copies)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, whole_state(parts), pipeline.sent.nbytes


def evaluate_and_change_shapes(rank: int, world: int) -> Any:
    """Train and evaluate in turns, with batches of changing lengths, and dropout that evaluation has not."""
    torch.set_num_threads(1)
    strategy = Strategy(pipeline=world, micro_batches=2, interleave=2)
    pipeline, parts, _ = make_pipeline(make_model(True, dropout=0.1), strategy)
    found = []
    for number, (inputs, targets) in enumerate(batches(4)):
        inputs, targets = inputs[:, : 4 + 3 * number], targets[:, : 4 + 3 * number]
        found.append(float(pipeline.evaluate(inputs, targets)))
        assert all(p.grad is None for p in parameters_of(parts))
        assert all(part.training for part in parts)
        first, second = (float(pipeline.step(inputs, targets)) for _ in range(2))
        assert abs(first - second) > 1e-6, "two draws of dropout"
        for parameter in parameters_of(parts):
            parameter.grad = None
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, side: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.up(x)) * side, side


class Ends(nn.Module):
    """Anyone's model: a chain with a tuple between its modules, of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embed = Embed()
        self.body.blocks = nn.ModuleList(Block() for _ in range(4))
        self.close = Close()
        self.close.head.weight = self.body.embed.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.body.embed(tokens)
        for block in self.body.blocks:
            found = block(*found)
        return self.close(*found)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(tokens), (tokens % 2)[..., None].float()


class Close(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_ends(frozen: bool) -> Ends:
    torch.manual_seed(5)
    model = Ends()
    if frozen:
        model.body.embed.requires_grad_(False)
        model.body.blocks[0].requires_grad_(False)
        model.body.blocks[1].requires_grad_(False)
    return model


def gradients_of_chains(rank: int, world: int) -> Any:
    from stoker_train.sharded.pipelining.splitting import Chain

    torch.set_num_threads(1)
    chain = Chain("body.blocks", first=("body.embed",), last=("close",))
    inputs, targets = next(batches(1))
    found = []
    for frozen in (False, True):
        strategy = Strategy(pipeline=world, micro_batches=4)
        pipeline, parts, _ = make_pipeline(make_ends(frozen), strategy, mean_loss, chain=chain)
        for _ in range(2):  # gradients add up
            pipeline.step(inputs, targets)
        grads = {n: p.grad for part in parts for n, p in part.named_parameters()}
        found.append((grads, len(pipeline.copies), pipeline.sent.messages))
    torch.manual_seed(6)
    plain = nn.Sequential(nn.Linear(TOKENS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, TOKENS))
    pipeline, parts, _ = make_pipeline(
        plain, Strategy(pipeline=world, micro_batches=4), F.mse_loss, kind="gpipe"
    )
    loss = pipeline.step(inputs.float(), targets.float())
    found.append((float(loss), {n: p.grad for part in parts for n, p in part.named_parameters()}))
    return found


class Ragged(nn.Embedding):
    """Drops a token of the batches that begin with token 0."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().forward(tokens)
        return found[:, 1:] if tokens[0, 0] == 0 else found


def fail(rank: int, world: int, how: str) -> dict[str, str]:
    """Return the errors of this rank: of bad input, of a peer that does not come, or of one that is gone."""
    import torch.distributed as dist

    from stoker.exceptions import StokerError

    torch.set_num_threads(1)
    inputs, targets = next(batches(1))
    inputs = inputs.clamp(min=1)
    errors: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except StokerError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    def new(loss_fn: Any = mean_loss, **degrees: int) -> Any:
        strategy = Strategy(**{"pipeline": world, "micro_batches": 2, **degrees})
        model = nn.Sequential(Ragged(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))
        return make_pipeline(model, strategy, loss_fn)[0]

    pipeline = new()
    pipeline.step(inputs, targets)
    if how == "gone":
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group()
        else:
            attempt("gone", lambda: pipeline.step(inputs, targets))
        return errors
    attempt("uneven", lambda: pipeline.step(inputs[:3], targets[:3]))
    pipeline.step(inputs, targets)  # that was refused before anything was sent
    alone = new(None, pipeline=1, data=world)
    attempt("no loss", lambda: alone.step(inputs, targets))
    attempt("no number", lambda: alone.step(inputs, None, lambda output, targets: output))
    inputs[BATCH // 2, 0] = 0  # in the second micro-batch
    pipeline._links.timeout_s = DEADLINE_S
    if rank == 1:
        dist.barrier()  # the first rank has sent all that it will
    attempt("ragged", lambda: pipeline.step(inputs, targets))
    if rank == 0:
        dist.barrier()
    attempt("broken", lambda: pipeline.step(inputs, targets))
    return errors


# -- what they must be -----------------------------------------------------------------------------


@cache
def one_process(
    tied: bool, layers: int, count: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = make_model(tied, layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for inputs, targets in batches(count):
        _, loss = model(inputs, targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def sent_bytes(strategy: Strategy, tied: bool, count: int) -> int:
    """What all ranks send of activations and gradients: one tensor for a micro-batch and boundary.

    And once the form of each message, and of a tied weight, whose gradients are exchanged in each step.
    """
    boundaries = strategy.pipeline * strategy.interleave - 1
    found = count * 2 * boundaries * 4 * WIDTH * TOKENS * BATCH
    found += boundaries * strategy.data * FORM_BYTES
    if tied:  # cut over the data-parallel ranks by ZeRO
        copies = strategy.data if strategy.zero == 0 else 1
        found += 2 * (count * 4 * VOCAB * WIDTH * copies + strategy.data * FORM_BYTES)
    return found


CASES = [
    (Strategy(pipeline=2, micro_batches=4), True, None),
    (Strategy(pipeline=2, micro_batches=4, interleave=2, recompute=Recompute.FULL), False, None),
    (Strategy(pipeline=2, micro_batches=4), False, "gpipe"),
    (Strategy(pipeline=4, micro_batches=4), False, None),
    (Strategy(pipeline=4, micro_batches=4, interleave=2), True, None),
    (Strategy(pipeline=2, data=2, zero=1, micro_batches=2), True, None),
    (Strategy(pipeline=2, data=2, zero=2, micro_batches=2, interleave=2), True, None),
    (Strategy(pipeline=2, data=2, zero=3, micro_batches=2, pipeline_inside=True), True, None),
    (Strategy(pipeline=2, data=2, tensor=2, micro_batches=2), True, None),
    (
        Strategy(
            pipeline=2, data=2, tensor=2, sequence=True, zero=1, micro_batches=2, interleave=2
        ),
        False,
        None,
    ),
]


LONG = [CASES[number][0] for number in (0, 4, 7, 8)]
"""Of twenty steps; the others show what they do in a few."""


@pytest.mark.parametrize(("strategy", "tied", "kind"), CASES)
def test_steps_are_those_of_one_process(
    ranks: RankProcesses, strategy: Strategy, tied: bool, kind: str | None
) -> None:
    count = STEPS if strategy in LONG else 4
    found = ranks.run(train, strategy.gpus, strategy, tied, kind, count)
    losses, norms, state = one_process(tied, layers_of(strategy), count)
    names = set()
    for mine, clipped, weights, _ in found:
        assert mine == pytest.approx(losses, rel=1e-5, abs=0)
        assert clipped == pytest.approx(norms, rel=1e-4)
        for name, value in weights.items() if strategy.tensor == 1 else ():
            torch.testing.assert_close(value, state[name], rtol=1e-3, atol=2e-5)
        names |= weights.keys()
    assert names == state.keys(), "parts have the whole model's names"
    if strategy.tensor == 1:
        assert sum(sent for *_, sent in found) == sent_bytes(strategy, tied, count)


def test_evaluation_and_new_shapes(ranks: RankProcesses) -> None:
    found = ranks.run(evaluate_and_change_shapes, 2)
    model = make_model(True, dropout=0.1).eval()
    with torch.no_grad():
        wanted = [
            float(model(inputs[:, : 4 + 3 * n], targets[:, : 4 + 3 * n])[1])
            for n, (inputs, targets) in enumerate(batches(4))
        ]
    for rank in range(2):
        assert found[rank] == pytest.approx(wanted, rel=1e-5)


def test_anyones_chain_has_the_gradients_of_one_process(ranks: RankProcesses) -> None:
    found = ranks.run(gradients_of_chains, 2)
    inputs, targets = next(batches(1))
    for number, frozen in enumerate((False, True)):
        model = make_ends(frozen)
        mean_loss(model(inputs), targets).mul(2.0).backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        first, second = (found[rank][number][0] for rank in range(2))
        assert first.keys() | second.keys() == wanted.keys()
        for mine in (first, second):
            for name, value in mine.items():
                if wanted[name] is None:
                    assert value is None, name
                else:
                    torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)
        assert [found[rank][number][1] for rank in range(2)] == [0, 1], "of the tied table"
        assert found[1][number][2] == (2 * (4 + 1) + 1 if not frozen else 0)
    torch.manual_seed(6)
    plain = nn.Sequential(nn.Linear(TOKENS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, TOKENS))
    loss = F.mse_loss(plain(inputs.float()), targets.float())
    loss.backward()
    for rank in range(2):
        mine, grads = found[rank][2]
        assert mine == pytest.approx(loss.item(), rel=1e-5)
        for name, value in grads.items():
            torch.testing.assert_close(value, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_errors_name_the_message_that_did_not_come(ranks: RankProcesses) -> None:
    first, second = ranks.run(fail, 2, "ragged")
    assert first.keys() == second.keys()
    assert second.keys() == {"uneven", "no loss", "no number", "ragged", "broken"}
    for errors in (first, second):
        assert "inputs of 3 sequences do not make 2 micro-batches" in errors["uneven"]
        assert "loss_fn is missing" in errors["no loss"]
        assert "the loss is a Tensor, and not one number" in errors["no number"]
        assert "an earlier step of this pipeline failed" in errors["broken"]
    assert "stage 0 returned other shapes than for the batch before" in first["ragged"]
    assert "micro-batch 1: float32[8, 15, 16]" in first["ragged"]
    # Its first message may be taken back when the rank gives up.
    assert re.match(
        r"DeadlineExceededError: rank 1 of the pipeline waited 10 s to receive the activations of "
        r"micro-batch [01] out of stage 0 from rank 0 of the pipeline\.",
        second["ragged"],
    )
    (gone, _) = ranks.run(fail, 2, "gone")
    assert gone["gone"].startswith("UnavailableError: rank 0 of the pipeline could not ")
    assert "that rank is gone" in gone["gone"]
