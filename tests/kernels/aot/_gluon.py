"""Runs Gluon kernels on the CPU: the kernels' own Python, over an emulation of what they use of Hopper.

Gluon has no interpreter. Here a kernel's function runs with other globals: ``gl``, ``tma``, ``mbarrier``
and the warpgroup's products are those below. Every partition of every program is a thread, one runs at a
time, and a seed decides which; copies by TMA finish whenever the seed says, products are computed when they
are waited for. Layouts are ignored: the compiler checks those.

What is checked, whatever the schedule: a barrier's phases, arrivals and expected bytes; that a tile is read
only after its barrier said so, and overwritten only after all who read it said so (vector clocks: a missing
wait is found even where the schedule was lucky); that tensor cores and the TMA see stored data behind a
fence; that an outstanding product's result is not touched; that nobody waits for ever. Not checked: what
happens within a partition (layouts, barriers between its warps), registers, and time.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 60.0  # for a thread to hand on
SPINS = 3000  # looks at one number without a change anywhere: nobody will change it


class Fault(AssertionError):
    """A kernel does what a GPU would punish: a race, a deadlock, a barrier miscounted."""


class Clock(defaultdict[int, int]):
    """What is known to have happened: events of each agent, counted."""

    def __init__(self, other: dict[int, int] | None = None) -> None:
        super().__init__(int, other or {})

    def merge(self, other: dict[int, int]) -> None:
        for agent, time in other.items():
            self[agent] = max(self[agent], time)


class Cell:
    """One row of shared memory along its first dimension: who wrote it, who has read it since."""

    def __init__(self) -> None:
        self.write: tuple[int, int] | None = None
        self.reads: dict[int, int] = {}
        self.pending = 0  # copies and products that read it and have not been waited for
        self.loading = self.dirty = False

    def check_read(self, clock: Clock, by_hardware: bool, what: str) -> None:
        if self.loading or self.write is None or clock[self.write[0]] < self.write[1]:
            raise Fault(f"{what} is read before its barrier said that it is full")
        if by_hardware and self.dirty:
            raise Fault(f"{what} is read by hardware without fence_async_shared after the store")

    def check_write(self, clock: Clock, what: str) -> None:
        late = any(clock[agent] < time for agent, time in self.reads.items())
        unseen = self.write is not None and clock[self.write[0]] < self.write[1]
        if self.pending or self.loading or late or unseen:
            raise Fault(f"{what} is overwritten before all its readers gave it back")


class Shared:
    """A view of shared memory: data, and the cells that it lies in."""

    def __init__(self, data: torch.Tensor, cells: list[Cell], name: str) -> None:
        self.data, self.cells, self.name = data, cells, name
        self.dtype, self.shape = data.dtype, list(data.shape)

    def index(self, place: int) -> Shared:
        return Shared(self.data[place], self.cells[place : place + 1], f"{self.name}[{place}]")

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape), self.cells, self.name)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.cells, self.name)

    def load(self, layout: Any) -> torch.Tensor:
        task = current()
        for cell in self.cells:
            cell.check_read(task.clock, False, self.name)
            cell.reads[task.number] = task.tick()
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        task = current()
        assert value.shape == self.data.shape, (value.shape, self.shape)
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        for cell in self.cells:
            cell.check_write(task.clock, self.name)
            cell.write, cell.reads, cell.dirty = (task.number, task.tick()), {}, True
            task.unfenced.append(cell)
        self.data.copy_(value)


class Barrier:
    """An mbarrier: ``count`` arrivals and the expected bytes complete a phase."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.phase = self.nbytes = self.pending = 0
        self.next_clock, self.clock = Clock(), Clock()

    def arrive(self, clock: Clock, count: int) -> None:
        if not self.count:
            raise Fault(f"{self.name} is used before mbarrier.init")
        self.pending -= count
        if self.pending < 0:
            raise Fault(f"{self.name} has more arrivals in a phase than its {self.count}")
        self.next_clock.merge(clock)
        self.complete()

    def complete(self) -> None:
        if self.pending == 0 and self.nbytes == 0:
            self.clock.merge(self.next_clock)
            self.next_clock, self.pending, self.phase = Clock(), self.count, self.phase + 1


class Barriers:
    def __init__(self, count: int, name: str) -> None:
        self.items = [Barrier(f"{name}[{place}]") for place in range(count)]

    def index(self, place: int) -> Barrier:
        return self.items[place]


def one(barrier: Barrier | Barriers) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.items[0]


class Product:
    """A product that was issued and not waited for; its result is nobody's before that."""

    def __init__(self, a: Any, b: Shared, acc: torch.Tensor, use_acc: bool) -> None:
        task = current()
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.operands = [operand for operand in (a, b) if isinstance(operand, Shared)]
        self.done: torch.Tensor | None = None
        for operand in self.operands:
            for cell in operand.cells:
                cell.check_read(task.clock, True, operand.name)
                cell.pending += 1

    def retire(self) -> None:
        task = current()
        a = self.a.data if isinstance(self.a, Shared) else self.a
        assert a.dtype == self.b.dtype and self.acc.dtype == torch.float32
        result = a.float() @ self.b.data.float()
        assert result.shape == self.acc.shape, (result.shape, self.acc.shape)
        self.done = result + self.acc if self.use_acc else result
        for operand in self.operands:
            for cell in operand.cells:
                cell.pending -= 1
                cell.reads[task.number] = task.tick()


class Task:
    """One partition of one program."""

    def __init__(self, machine: Machine, run: Callable[[], Any], program: tuple[int, ...]) -> None:
        self.machine, self.program, self.number = machine, program, machine.new_agent()
        self.clock, self.unfenced = Clock(), list[Cell]()
        self.products: list[Product] = []
        self.stores: list[tuple[Descriptor, list[int], Shared]] = []
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for, self.done, self.turn = "", False, threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self.thread.start()

    def _main(self, run: Callable[[], Any]) -> None:
        self.turn.acquire()
        TASKS.current = self
        try:
            if self.machine.fault is None:
                run()
                if self.products or self.stores:
                    raise Fault("a partition ends with products or stores that nobody waited for")
        except BaseException as error:  # handed to the test's thread
            self.machine.fault = self.machine.fault or error
        self.done = True
        self.machine.back.release()

    def tick(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]

    def pause(self, ready: Callable[[], bool] = lambda: True, waits_for: str = "") -> None:
        """Let others run until ``ready``."""
        self.ready, self.waits_for = ready, waits_for
        self.machine.back.release()
        self.turn.acquire()
        if self.machine.fault is not None:
            raise self.machine.fault


TASKS = threading.local()


def current() -> Task:
    task: Task = TASKS.current
    return task


class Machine:
    """One launch: at most ``resident`` programs at a time, begun in order, scheduled by ``seed``."""

    def __init__(self, seed: int, resident: int) -> None:
        self.random, self.resident = random.Random(seed), resident
        self.back, self.fault = threading.Semaphore(0), None
        self.fault: BaseException | None
        self.tasks: list[Task] = []
        self.copies: list[Callable[[], None]] = []
        self.agents = self.spins = 0

    def new_agent(self) -> int:
        self.agents += 1
        return self.agents

    def run(self, programs: list[tuple[tuple[int, ...], Callable[[], Any]]]) -> None:
        """Run them all; raises the first fault. No thread of them is left."""
        waiting = list(reversed(programs))
        try:
            while self.fault is None:
                self.tasks = [task for task in self.tasks if not task.done]
                while waiting and len({task.program for task in self.tasks}) < self.resident:
                    program, body = waiting.pop()
                    self.tasks.append(Task(self, body, program))
                able = [task for task in self.tasks if task.ready()]
                if not able and not self.copies:
                    break
                choice = self.random.randrange(len(able) + len(self.copies))
                if choice >= len(able):
                    self.copies.pop(choice - len(able))()
                else:
                    self._hand_to(able[choice])
            if self.fault is None and self.tasks:
                stuck = ", ".join(sorted({task.waits_for for task in self.tasks}))
                self.fault = Fault(f"deadlock: all wait for {stuck}")
        except Fault as fault:
            self.fault = fault
        for task in self.tasks:
            if not task.done:
                self._hand_to(task)
        if self.fault is not None:
            raise self.fault

    def _hand_to(self, task: Task) -> None:
        task.turn.release()
        if not self.back.acquire(timeout=WAIT_S):
            raise TimeoutError("a partition of an emulated kernel does not come to a barrier")


class Descriptor:
    """A TMA descriptor's tensor and tile; outside of the tensor it reads zero and stores nothing."""

    def __init__(self, given: Any) -> None:
        self.tensor = given.base.as_strided(given.shape, given.strides)
        self.block_shape, self.layout = given.block_shape, given.layout
        self.dtype = given.base.dtype
        self.nbytes = self.dtype.itemsize * torch.Size(self.block_shape).numel()
        self.block_type = SimpleNamespace(nbytes=self.nbytes)

    def part(self, at: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        assert len(at) == len(self.block_shape) and min(at) >= 0
        part = self.tensor
        for dim, (start, width) in enumerate(zip(at, self.block_shape, strict=True)):
            length = max(0, min(width, part.shape[dim] - start))
            part = part.narrow(dim, min(start, part.shape[dim]), length)
        return part, tuple(slice(0, length) for length in part.shape)

    def load(self, at: list[int], smem: Shared) -> None:
        part, inside = self.part(at)
        smem.data.zero_()
        smem.data[inside] = part

    def store(self, at: list[int], smem: Shared) -> None:
        part, inside = self.part(at)
        part.copy_(smem.data[inside])


class Pointer:
    """Addresses in one tensor's memory."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + other)


def _copy_in(desc: Descriptor, at: list[int], barrier: Any, smem: Shared) -> None:
    task, bar = current(), one(barrier)
    assert list(smem.shape) == list(desc.block_shape), (smem.shape, desc.block_shape)
    for cell in smem.cells:
        cell.check_write(task.clock, smem.name)
        cell.loading = True
    agent, clock = task.machine.new_agent(), Clock(task.clock)
    clock[agent] = 1
    at = list(at)

    def finish() -> None:
        desc.load(at, smem)
        for cell in smem.cells:
            cell.loading, cell.dirty, cell.write, cell.reads = False, False, (agent, 1), {}
        bar.next_clock.merge(clock)
        bar.nbytes -= desc.nbytes
        bar.complete()

    task.machine.copies.append(finish)
    task.pause()


def _copy_out(desc: Descriptor, at: list[int], smem: Shared) -> None:
    for cell in smem.cells:
        cell.check_read(current().clock, True, smem.name)
        cell.pending += 1
    current().stores.append((desc, list(at), smem))


def _store_wait(pendings: int) -> None:
    task = current()
    while len(task.stores) > pendings:
        desc, at, smem = task.stores.pop(0)
        desc.store(at, smem)
        for cell in smem.cells:
            cell.pending -= 1
            cell.reads[task.number] = task.tick()


def _expect(barrier: Any, nbytes: int) -> None:
    one(barrier).nbytes += nbytes
    one(barrier).arrive(current().clock, 1)


def _init(barrier: Any, count: int) -> None:
    one(barrier).count = one(barrier).pending = count


def _arrive(barrier: Any, *, count: int = 1) -> None:
    current().tick()
    one(barrier).arrive(current().clock, count)
    current().machine.spins = 0
    current().pause()


def _wait(barrier: Any, phase: int) -> None:
    bar = one(barrier)
    assert phase in (0, 1), phase
    current().pause(lambda: bar.phase % 2 != phase, f"{bar.name}, phase {phase}")
    current().clock.merge(bar.clock)


def _mma(
    a: Any, b: Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool = False
) -> Any:
    product = Product(a, b, acc, use_acc)
    current().products.append(product)
    current().pause()
    return product if is_async else _mma_wait(0, [product])


def _mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    products = current().products
    while len(products) > num_outstanding:
        products.pop(0).retire()
    results = []
    for dep in deps:
        if isinstance(dep, Product):
            if dep.done is None:
                raise Fault("the result of a product that is still outstanding is used")
            dep = dep.done
        results.append(dep)
    return results[0] if len(results) == 1 else tuple(results)


def _fence() -> None:
    for cell in current().unfenced:
        cell.dirty = False
    current().unfenced.clear()


def _atomic_add(ptr: Pointer, value: Any, sem: str = "acq_rel") -> Any:
    task = current()
    if isinstance(ptr.offset, torch.Tensor):
        ptr.flat[ptr.offset] += value
        return None
    if value == 0:  # somebody polls
        task.machine.spins += 1
        if task.machine.spins > SPINS:
            raise Fault("deadlock: a number is polled that nobody changes")
    before = int(ptr.flat[ptr.offset])
    ptr.flat[ptr.offset] += value
    task.pause()
    return before


def _atomic_xchg(ptr: Pointer, value: int, sem: str = "acq_rel") -> None:
    ptr.flat[ptr.offset] = value
    current().machine.spins = 0
    current().pause()


def _store(ptr: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    ptr.flat[ptr.offset[mask]] = value[mask]


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    name = f"shared memory {dtype} {shape}"
    if dtype == torch.int64:
        return Barriers(shape[0], f"barrier of {shape}")
    data = torch.full(shape, float("nan"), dtype=dtype)
    return Shared(data, [Cell() for _ in range(shape[0])], name)


def _specialize(parts: list[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    task, machine = current(), current().machine
    assert len(warps) == len(registers) == len(parts) - 1
    workers = [
        Task(machine, lambda run=run, args=args: run(*args), task.program)
        for run, args in parts[1:]
    ]
    for worker in workers:
        worker.clock.merge(task.clock)
        machine.tasks.append(worker)
    run, args = parts[0]
    run(*args)
    task.pause(lambda: all(worker.done for worker in workers), "its partitions")


def _either(tensors: Any, numbers: Any) -> Any:
    def choose(a: Any, b: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return numbers(a, b)
        return tensors(a, torch.as_tensor(b, dtype=a.dtype))

    return choose


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _namespace(grid: tuple[int, ...]) -> dict[str, Any]:
    """Return what replaces the names that a kernel's module imports."""
    layouts = {
        name: lambda *args, **named: None
        for name in (
            "NVMMADistributedLayout",
            "NVMMASharedLayout",
            "SliceLayout",
            "DotOperandLayout",
        )
    }
    gl = SimpleNamespace(
        float32=torch.float32, int64=torch.int64, constexpr=lambda value: value,
        program_id=lambda axis: current().program[axis], num_programs=lambda axis: grid[axis],
        maximum=_either(torch.maximum, max), minimum=_either(torch.minimum, min),
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=lambda condition, a, b: torch.where(condition, a, b), exp2=torch.exp2,
        log2=torch.log2, max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda value, layout: value, cast=_cast, static_range=range,
        store=_store, atomic_add=_atomic_add, atomic_xchg=_atomic_xchg,
        allocate_shared_memory=_allocate, warp_specialize=_specialize, **layouts,
    )  # fmt: skip
    return {
        "gl": gl,
        "tma": SimpleNamespace(
            async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out,
            store_wait=_store_wait,
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=_init, expect=_expect, arrive=_arrive, wait=_wait,
        ),
        "barrier": lambda: None,
        "fence_async_shared": _fence,
        "warpgroup_mma": _mma,
        "warpgroup_mma_wait": _mma_wait,
    }  # fmt: skip


def emulated(kernel: Any, replaced: dict[str, Any]) -> Callable[..., Any]:
    """Return a kernel's Python function over ``replaced`` names; so are the functions that it calls."""
    names: dict[str, Any] = {}
    for name, value in kernel.fn.__globals__.items():
        if name in replaced:
            names[name] = replaced[name]
        elif isinstance(value, JITFunction):
            names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        else:
            names[name] = getattr(value, "value", value)
    return FunctionType(kernel.fn.__code__, names, kernel.fn.__name__, kernel.fn.__defaults__)


def run(
    kernel: Any, grid: tuple[int, ...], *args: Any, seed: int = 0, resident: int = 3, **config: Any
) -> None:
    """Run a Gluon kernel's programs in place, as ``runtime.launch`` would. Raises :class:`Fault`."""
    sizes = (*grid, 1, 1)[:3]
    body = emulated(kernel, _namespace(sizes))
    given = [
        Descriptor(arg) if hasattr(arg, "block_shape")
        else Pointer(arg.view(-1)) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]  # fmt: skip
    config = {name: value for name, value in config.items() if name != "num_warps"}
    places = [(x, y, z) for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])]
    Machine(seed, resident).run([(place, lambda: body(*given, **config)) for place in places])
