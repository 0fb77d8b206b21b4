"""Rendezvous of the workers of a training job: a ``torch.distributed`` group through the KV store.

Every rank announces itself under the group's key; rank 0 opens a ``TCPStore`` on an address that
the others can reach and publishes it once everybody is there; the rest of PyTorch's set-up runs over
that store. So a missing rank is known by its number, and no port is chosen ahead of time.

Called by user code inside actors or tasks, and by ``stoker.collective``, whose groups leave torch's
default one free; it must not import torch at module level.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stoker import kv
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError
from stoker.runtime import current

if TYPE_CHECKING:
    import threading

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.25
"""Between two looks at whether the others were given up."""
_LEAST_S = 0.001
"""torch takes a wait of no time for one without a deadline."""
_LEFT_S = 60.0
_STORE_SLACK_S = 2.0
"""Rank 0 names the ranks that are missing no later than this after its deadline."""


def init_process_group(
    name: str,
    rank: int,
    world_size: int,
    *,
    backend: str | None = None,
    timeout_s: float = 60.0,
    attempt: int = 0,
    rendezvous_timeout_s: float | None = None,
    abandoned: threading.Event | None = None,
) -> None:
    """Join this process, as ``rank`` of ``world_size``, to the ``torch.distributed`` group ``name``.

    Returns when all ranks are there. The name is the group's within the job; a group that is formed
    again after a failure must use another ``attempt``, so that it meets no keys of the last one.
    ``backend`` defaults to ``"nccl"`` where this process sees a GPU, else ``"gloo"``. ``timeout_s``
    bounds the rendezvous, and each collective afterwards; ``rendezvous_timeout_s``, if given, the
    rendezvous alone. Who waits for others stops soon after ``abandoned`` is set, with ``ConflictError``.

    Raises ``GetTimeoutError`` naming the ranks that are missing, and ``ConflictError`` if the rank was
    taken by another process. The store has no password: it listens on the address by which this
    cluster's processes reach each other (loopback on a local cluster), so keep that network private.
    """
    if not 0 <= rank < world_size:
        raise BadRequestError(
            f"init_process_group({name!r}): rank {rank} is not in 0..{world_size - 1}", field="rank"
        )
    import torch
    import torch.distributed as dist

    # Its default arguments keep the group of the moment for ever: imported later, as by DDP, the group
    # would outlive destroy_process_group, and gloo's threads abort the process when it exits.
    import torch.distributed.nn.functional

    if dist.is_initialized():
        raise ConflictError(
            f"init_process_group({name!r}): this process is in a group already\n"
            "leave it by stoker.train.destroy_process_group()"
        )
    wait_s = timeout_s if rendezvous_timeout_s is None else rendezvous_timeout_s
    rendezvous = Rendezvous(
        name, rank, world_size, attempt=attempt, timeout_s=wait_s, abandoned=abandoned
    )
    store = rendezvous.open_store()
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        rendezvous.close(store)
    except BaseException:
        dist.destroy_process_group()  # else no other attempt could be made
        raise


def destroy_process_group() -> None:
    """Leave the group; nothing happens if this process is in none."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def advertised_host() -> str:
    """Return the address by which other processes of the cluster reach this one."""
    return urlsplit(current.runtime().channels.address.url).hostname or _LOOPBACK


class Rendezvous:
    """One attempt of a group to form, as one of its ranks sees it: keys, a deadline, and the store.

    :meth:`open_store`, connect over the store, then :meth:`close`. ``name`` is the group's within the job.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        attempt: int | str = 0,
        timeout_s: float = 60.0,
        abandoned: threading.Event | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._title = f"group {name!r} (attempt {attempt}, {world_size} ranks)"
        self._deadline_s = time.monotonic() + timeout_s
        self._abandoned = abandoned
        self._base = f"train/{current.runtime().job.job_id}/{name}/{attempt}/"

    def open_store(self) -> TCPStore:
        """Return the group's store once all ranks are there: rank 0 serves it.

        Raises as :func:`init_process_group` does; this rank may then try again.
        """
        host = advertised_host()
        bind_interface(host)
        self.announce()
        try:
            return _open_store(self, host) if self.rank == 0 else _join_store(self)
        except GetTimeoutError:
            self._withdraw()
            raise

    def close(self, store: TCPStore) -> None:
        """Say that this rank is connected; rank 0 waits for all to say so, and removes the keys.

        It waits no longer than the rendezvous may take in all, or until the others are given up: one that
        died meanwhile holds nobody. Raises as :meth:`open_store` does.
        """
        store.set(f"stoker/met/{self.rank}", "1")
        if self.rank == 0:
            self._wait_until_met(store)
            self.clear()

    def _wait_until_met(self, store: TCPStore) -> None:
        everyone = [f"stoker/met/{other}" for other in range(self.world_size)]
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            self._check_lives()
            left_s = max(0.0, deadline_s - time.monotonic())
            wait_s = left_s if self._abandoned is None else min(left_s, _LOOK_S)
            try:
                store.wait(everyone, timedelta(seconds=max(wait_s, _LEAST_S)))
                return
            except RuntimeError as error:  # torch's DistStoreError is one
                if wait_s < left_s:
                    continue
                missing = [n for n, key in enumerate(everyone) if not store.check([key])]
                raise GetTimeoutError(
                    f"rank {self.rank} of {self._title} waited {self.timeout_s:g} s\n"
                    f"ranks {missing} came, and did not connect",
                    extra={"missing_ranks": missing},
                ) from error

    def _check_lives(self) -> None:
        if self._abandoned is not None and self._abandoned.is_set():
            raise ConflictError(f"{self._title} was given up\nit forms again, or not at all")

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def announce(self) -> None:
        """Announce this rank; ConflictError if another process has done so."""
        key = self._key(self.rank)
        own_name = f"{current.runtime().identity.peer_id} pid {os.getpid()}"
        if kv.put(key, own_name, if_absent=True):
            return
        holder = (kv.get(key) or b"nobody").decode()
        if holder != own_name:  # a put that was sent twice finds itself
            raise ConflictError(
                f"rank {self.rank} of {self._title} is taken by {holder}\n"
                "give every worker a rank of its own, and a group that is formed again another "
                "attempt"
            )

    def wait_for_all(self) -> None:
        """Wait until every rank has announced itself."""
        for rank in range(self.world_size):
            self._wait(self._key(rank), 0.0)

    def publish(self, address: str) -> None:
        """Publish the address of the store: the others may go on."""
        kv.put(f"{self._base}store", address)

    def store_address(self) -> str:
        """Wait until rank 0 has published the store."""
        return self._wait(f"{self._base}store", _STORE_SLACK_S).decode()

    def clear(self) -> None:
        """Remove the keys once the group has formed."""
        for rank in range(self.world_size):
            kv.delete(self._key(rank))
        kv.delete(f"{self._base}store")

    def _withdraw(self) -> None:
        """Remove what this rank alone has announced: who comes later shall not take it for there."""
        kv.put(
            f"{self._base}left/{self.rank}", "1", ttl_s=_LEFT_S
        )  # others still name who did not come
        kv.delete(self._key(self.rank))
        if self.rank == 0:
            kv.delete(f"{self._base}store")

    def _key(self, rank: int) -> str:
        return f"{self._base}rank/{rank}"

    def _wait(self, key: str, slack_s: float) -> bytes:
        while True:
            left_s = self.left_s + slack_s
            self._check_lives()
            if self._abandoned is not None:
                left_s = min(left_s, _LOOK_S)
            try:
                return kv.wait(key, timeout=left_s)
            except GetTimeoutError:
                if self._abandoned is None or self.left_s + slack_s <= 0:
                    raise self._missing_ranks_error() from None

    def _missing_ranks_error(self) -> GetTimeoutError:
        prefixes = (f"{self._base}rank/", f"{self._base}left/")
        announced = {int(key.removeprefix(one)) for one in prefixes for key in kv.keys(one)}
        missing = [rank for rank in range(self.world_size) if rank not in announced]
        if missing:
            cause = f"ranks {missing} did not come"
        else:
            cause = "all ranks came, but rank 0 did not open the store"
        return GetTimeoutError(
            f"rank {self.rank} of {self._title} waited {self.timeout_s:g} s\n{cause}",
            extra={"missing_ranks": missing},
        )


def _open_store(rendezvous: Rendezvous, host: str) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # A socket of its own, because TCPStore would listen on every address of this machine.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(max(16, rendezvous.world_size))
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            rendezvous.world_size,
            is_master=True,
            timeout=timedelta(seconds=rendezvous.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    rendezvous.wait_for_all()
    rendezvous.publish(f"{host} {port}")
    return store


def _join_store(rendezvous: Rendezvous) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = rendezvous.store_address().split()
    return TCPStore(
        host,
        int(port),
        rendezvous.world_size,
        is_master=False,
        timeout=timedelta(seconds=rendezvous.timeout_s),
        wait_for_workers=False,
    )


def bind_interface(host: str) -> None:
    """Have gloo and NCCL use the interface that ``host`` is on, unless the user chose one."""
    import psutil

    addresses: dict[str, list[Any]] = psutil.net_if_addrs()
    for interface, bound in addresses.items():
        if any(address.address == host for address in bound):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if host != _LOOPBACK:  # on one machine NCCL needs no network; over lo it is told none
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            return
