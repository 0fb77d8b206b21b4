"""The table of what a member lends, and its way to what others lend; a group has one.

Called by a group's supervisor, when a reader asks, and by loans that are read. It knows neither groups nor
objects.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.exceptions import ObjectLostError, SerializationError
from stoker_train.collective.errors import CollectiveError
from stoker_train.collective.headers import Call
from stoker_train.collective.lane import Lane, Peers

if TYPE_CHECKING:
    import torch

    from stoker_train.collective.channel import Channel

_TOKEN_NBYTES = 16
_HERE, _GONE = 1, 0


class Wanted(msgspec.Struct, frozen=True):
    """A reader's request; ``number`` counts those of a reader to a lender, from 0."""

    lender: int
    reader: int
    number: int
    token: bytes


class Lent:
    """The tensors that a member lends, and its way to those of others.

    ``make`` returns a lane by its label and its two members; ``tell`` sets a key of the group.
    """

    def __init__(
        self,
        rank: int,
        make: Callable[[str, tuple[int, ...]], Lane],
        tell: Callable[[str, object], None],
    ) -> None:
        self._rank, self._tell = rank, tell
        self._peers = Peers(lambda label, ranks: make(f"lent {label}", ranks))
        self._lock = threading.Lock()
        self._kept: dict[bytes, torch.Tensor] = {}
        self._asked: dict[int, int] = {}
        """Of this reader, how many requests went to each lender."""
        self._served: dict[int, int] = {}
        """Of this lender, how many of each reader were taken up."""
        self._early: dict[tuple[int, int], Wanted] = {}
        """Requests that came before others of the same reader."""

    def keep(self, flat: torch.Tensor) -> bytes:
        """Copy a tensor on its device; return by what it is found."""
        import torch

        copy = flat.detach().clone().view(-1).view(torch.uint8)
        _settle(copy)
        token = secrets.token_bytes(_TOKEN_NBYTES)
        with self._lock:
            self._kept[token] = copy
        return token

    def drop(self, token: bytes) -> None:
        """Forget a copy."""
        with self._lock:
            self._kept.pop(token, None)

    def fetch(self, lender: int, token: bytes, nbytes: int, *, is_cuda: bool) -> torch.Tensor:
        """Return a copy of what the member ``lender`` lends, uint8 (nbytes,), on this process's device.

        SerializationError where that has no GPU; ObjectLostError if the bytes were freed; CollectiveError
        if the group has failed, or the lender does not come.
        """
        import torch

        if lender == self._rank:
            with self._lock:
                own = self._kept.get(token)
            if own is None:
                raise _gone(token)
            copy = own.clone()
            _settle(copy)
            return copy
        if is_cuda and not torch.cuda.is_available():
            raise SerializationError(
                "a CUDA tensor of a collective group cannot be read here: this process sees no GPU\n"
                "give the actor num_gpus=1, or put the value without tensor_transport",
                field="tensor_transport",
            )
        device = torch.device("cuda" if is_cuda else "cpu")

        def receive(channel: Channel) -> torch.Tensor:
            state = torch.empty(1, dtype=torch.uint8)
            channel.recv(state, 0)
            if int(state) == _GONE:
                raise _gone(token)
            found = torch.empty(nbytes, dtype=torch.uint8, device=device)
            channel.recv(found, 0)
            _settle(found)
            return found

        lane = self._peers.lane(lender, self._rank)
        with self._lock:  # the numbers are the order in the lane
            number = self._asked.get(lender, 0)
            self._asked[lender] = number + 1
            handle = lane.submit(_call(token), receive)
        wanted = Wanted(lender, self._rank, number, token)
        self._tell(f"want/{lender}/{self._rank}/{number}", wanted)
        return handle.wait()

    def take(self, request: bytes) -> None:
        """Queue the sending of what a reader asks for; each request once, in the order of their numbers."""
        wanted = msgspec.msgpack.decode(request, type=Wanted)
        reader = wanted.reader
        ready = []
        with self._lock:
            if wanted.number < self._served.get(reader, 0):
                return  # read again after a gap in the news
            self._early[reader, wanted.number] = wanted
            while (one := self._early.pop((reader, self._served.get(reader, 0)), None)) is not None:
                self._served[reader] = one.number + 1
                ready.append(one)
        with contextlib.suppress(
            CollectiveError
        ):  # the group has failed: the reader hears of that too
            lane = self._peers.lane(self._rank, reader)
            for one in ready:
                lane.submit(_call(one.token), self._sending(one.token))

    def _sending(self, token: bytes) -> Callable[[Channel], None]:
        def send(channel: Channel) -> None:
            import torch

            with self._lock:
                found = self._kept.get(token)
            state = _GONE if found is None else _HERE
            channel.send(torch.tensor([state], dtype=torch.uint8), 1)
            if found is not None:
                channel.send(found, 1)
                _settle(found)

        return send


def _call(token: bytes) -> Call:
    return Call("fetch", token.hex())


def _gone(token: bytes) -> ObjectLostError:
    return ObjectLostError(
        f"a lent tensor ({token.hex()[:8]}) was freed with its object\n"
        "keep a ref to the object as long as it may be read"
    )


def _settle(tensor: Any) -> None:
    """Wait until a CUDA tensor is written, so that any stream may use it."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()
