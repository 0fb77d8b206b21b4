"""CUDA memory lent to other processes of its node by CUDA IPC, in place of a way through host memory.

``stoker.put(value, tensor_transport="cuda_ipc")`` lends: each CUDA tensor is copied once, on its GPU, into
memory that no one writes to, and only a handle of it travels. A reader opens the handle, copies from
GPU memory to GPU memory and closes it, so nothing of a reader points into a lender. The lender keeps the
copy until the object is freed (``objects/device_objects.py``). A handle may outlive that: behind the bytes
lies a random token, which is erased before they are given up, and which a reader compares after it has
copied. Imported where such a value is put or read.

It speaks to the driver's library, by the CUDA driver API's calls for memory: torch's own sharing counts one
reader for each sending, and keeps memory for ever where none or several come.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

from stoker.exceptions import ObjectLostError, SerializationError
from stoker_wire.process.host_identity import pid_namespace, start_time

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is."""
_HANDLE_NBYTES = 64
_TOKEN_NBYTES = 16
_lent: WeakValueDictionary[bytes, torch.Tensor] = WeakValueDictionary()
"""What this process has lent, by its token: CUDA maps no process's memory into itself."""


class Mapping(NamedTuple):
    """The way to memory of a GPU: the UUID, the handle of an allocation, and a place in it, in bytes."""

    gpu: str
    handle: bytes
    offset: int


class Lender(NamedTuple):
    """The process whose memory was lent; its start tells it from a later one with its pid."""

    pid_namespace: str
    pid: int
    started: int

    def is_this_process(self) -> bool:
        """Return whether the memory is this process's own."""
        return self == _this_process()

    def check_alive(self) -> None:
        """Raise ObjectLostError if the process has ended: its memory went with it."""
        if start_time(self.pid) != self.started:
            raise ObjectLostError(
                f"CUDA memory of process {self.pid} is gone: the process has ended\n"
                "put the value again, or without tensor_transport: then it is in host memory"
            )


class Loan(NamedTuple):
    """A stand-in for a tensor's bytes, which travels; ``token`` lies behind them as long as they are lent."""

    lender: Lender
    mapping: Mapping
    token: bytes
    nbytes: int

    def borrow(self) -> torch.UntypedStorage:
        """Return a storage with a copy of the lent bytes; see :func:`borrow`."""
        return borrow(self)


class DeviceMemory(Protocol):
    """Memory of devices that processes can share."""

    def can_lend(self, flat: torch.Tensor) -> bool:
        """Return whether a tensor is in this kind of memory."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return new memory (uint8) of a device, which can be lent."""

    def lend(self, memory: torch.Tensor) -> Mapping:
        """Return how other processes find memory, once all that it is to hold is written."""

    def erase(self, memory: torch.Tensor) -> None:
        """Write zeros, and return when they are there."""

    def read(self, mapping: Mapping, nbytes: int, more: int) -> tuple[torch.Tensor, bytes]:
        """Return a copy of lent bytes (uint8) in this process's memory of the same device.

        And, as they are after that, the ``more`` bytes that lie behind them.
        """


class Lending:
    """The tensors of one value that are lent: a copy of each, until they are revoked."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.copies: list[torch.Tensor] = []

    def lend(self, flat: torch.Tensor) -> Loan | None:
        """Copy a contiguous tensor and lend the copy; None where it is in other memory, or empty."""
        nbytes = flat.nbytes
        if not nbytes or not self._memory.can_lend(flat):
            return None
        copy = self._memory.allocate(nbytes + _TOKEN_NBYTES, flat.device)
        copy[:nbytes].copy_(flat.view(torch.uint8))
        token = secrets.token_bytes(_TOKEN_NBYTES)
        copy[nbytes:].copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        mapping = self._memory.lend(copy)
        self.copies.append(copy)
        _lent[token] = copy
        return Loan(_this_process(), mapping, token, nbytes)

    def revoke(self) -> None:
        """End the loans, so that no reader takes what is in the memory later for them."""
        for copy in self.copies:
            self._memory.erase(copy[-_TOKEN_NBYTES:])
        self.copies.clear()


def borrow(loan: Loan) -> torch.UntypedStorage:
    """Return a storage with a copy of lent bytes.

    ObjectLostError if the lender has ended or has freed them; SerializationError where this process cannot
    reach its memory.
    """
    lender, memory = loan.lender, CudaIpcMemory()
    if lender.is_this_process():
        lent = _lent.get(loan.token)
        if lent is None:
            raise ObjectLostError("CUDA memory of this process was freed with its object")
        copy = lent[: loan.nbytes].clone()
        if copy.is_cuda:  # the memory may be freed as soon as this returns
            torch.cuda.current_stream(copy.device).synchronize()
        return copy.untyped_storage()
    if lender.pid_namespace != pid_namespace():
        raise SerializationError(
            "CUDA memory of another machine or container cannot be mapped here\n"
            "read the value on the node that put it, or put it without tensor_transport",
            field="tensor_transport",
        )
    lender.check_alive()
    try:
        found, token = memory.read(loan.mapping, loan.nbytes, _TOKEN_NBYTES)
    except SerializationError:
        lender.check_alive()
        raise
    lender.check_alive()  # what was copied while it ended may be anything
    if token != loan.token:
        raise ObjectLostError(
            f"CUDA memory of process {lender.pid} was freed with its object\n"
            "keep a ref to the object as long as it may be read"
        )
    return found.untyped_storage()


def _this_process() -> Lender:
    return Lender(pid_namespace(), os.getpid(), start_time(os.getpid()))


class CudaIpcMemory:
    """The memory of CUDA devices."""

    def can_lend(self, flat: torch.Tensor) -> bool:
        """Return whether a tensor is CUDA's."""
        return flat.is_cuda

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of torch's allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def lend(self, memory: torch.Tensor) -> Mapping:
        """Return the IPC handle of the allocation that memory lies in, and its place there."""
        driver = _Driver()
        with torch.cuda.device(memory.device):
            torch.cuda.current_stream().synchronize()
            base = driver.allocation_of(memory.data_ptr())
            handle = driver.handle_of(base)
        gpu = str(torch.cuda.get_device_properties(memory.device).uuid)
        return Mapping(gpu, handle, memory.data_ptr() - base)

    def erase(self, memory: torch.Tensor) -> None:
        """Write zeros on a stream of their own, so that what is queued on others does not delay them."""
        stream: torch.cuda.Stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            memory.zero_()
        stream.synchronize()

    def read(self, mapping: Mapping, nbytes: int, more: int) -> tuple[torch.Tensor, bytes]:
        """Return a copy of lent memory, on the same GPU, and what lies behind it afterwards."""
        driver = _Driver()
        device = _device_with(mapping.gpu)
        with torch.cuda.device(device):
            copy = torch.empty(nbytes, dtype=torch.uint8, device=device)
            behind = torch.empty(more, dtype=torch.uint8, device=device)
            stream = torch.cuda.current_stream()
            stream.synchronize()  # a thread that has not called CUDA yet has no context before
            base = driver.open(mapping.handle)
            try:
                place = base + mapping.offset
                driver.copy(copy.data_ptr(), place, nbytes, stream.cuda_stream)
                driver.copy(behind.data_ptr(), place + nbytes, more, stream.cuda_stream)
                stream.synchronize()
            finally:
                driver.close(base)
        return copy, bytes(behind.tolist())


def _device_with(gpu: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return torch.device("cuda", index)
    raise SerializationError(
        f"CUDA memory of GPU {gpu} cannot be mapped here: this process does not see that GPU\n"
        "read the value in a task or actor with num_gpus on that GPU, or put it without tensor_transport",
        field="tensor_transport",
    )


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_NBYTES),)


class _Driver:
    """The calls of the CUDA driver that sharing needs; each raises SerializationError with its reason."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SerializationError(
                f"CUDA memory cannot be mapped here: there is no driver\n{error}\n"
                "read the value where a GPU is, or put it without tensor_transport",
                field="tensor_transport",
            ) from None

    def allocation_of(self, address: int) -> int:
        """Return the address of the allocation in which an address lies."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(address),
        )
        return base.value

    def handle_of(self, base: int) -> bytes:
        """Return the handle by which other processes open an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return ctypes.string_at(ctypes.addressof(handle), _HANDLE_NBYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; return its address here."""
        base, given = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, flags)
        return base.value

    def close(self, base: int) -> None:
        """Unmap what :meth:`open` mapped."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy within a device, in the order of a stream."""
        places = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call(
            "cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise SerializationError(
                f"CUDA memory cannot be shared: {name} returned {reason} ({code})\n"
                "memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF) has no handle; without "
                "tensor_transport the value goes through host memory",
                field="tensor_transport",
            )
