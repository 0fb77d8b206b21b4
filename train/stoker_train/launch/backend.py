"""The rendezvous backend ``stoker`` of torchrun: its state is a key of the cluster's KV.

torch's ``DynamicRendezvousHandler`` does the rest. The token of a state is the revision of the key, which
is what compare-and-set asks for. Made by torch for ``torchrun --rdzv-backend=stoker`` (entry point
``torchrun.handlers``), and by the agents of ``stoker launch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)

from stoker.exceptions import BadRequestError, StokerError
from stoker_train.launch.kv_line import KvLine
from stoker_train.launch.spec import KEPT_S, RENDEZVOUS, STORE
from stoker_train.launch.store import KVStore
from stoker_wire.http.auth import is_loopback
from stoker_wire.http.client.endpoints import urls_of

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

NAME = "stoker"
LOOPBACK = "127.0.0.1"
_READ_TIMEOUT_S = 60.0
State = tuple[bytes, Any]


class KVRendezvousBackend(RendezvousBackend):
    """The state of the rendezvous ``run_id``, for all who reach the cluster.

    ``RendezvousConnectionError`` where that does not answer. ``check`` is called before each use, and may
    raise to end what torch does.
    """

    def __init__(
        self, line: KvLine, run_id: str, *, check: Callable[[], object] | None = None
    ) -> None:
        if not run_id:
            raise BadRequestError(
                "the run id of the rendezvous is empty\ngive --rdzv-id", field="run_id"
            )
        self._line = line
        self._key = f"{RENDEZVOUS}/{run_id}"
        self._check = check

    @property
    def name(self) -> str:
        """``stoker``."""
        return NAME

    def get_state(self) -> State | None:
        """Return the state with its token, or None before there is one."""
        self._check_use()
        try:
            item = self._line.read([self._key]).get(self._key)
        except StokerError as error:
            raise _unreached(error) from error
        return None if item is None else (item.value, item.revision)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Set the state if ``token`` is that of the present one; None: if there is none.

        Returns the state that holds, its token, and whether it is the one given here; None if there is none,
        as another was expected.
        """
        self._check_use()
        if token is None or isinstance(token, int):
            try:
                revision = self._line.put_if(self._key, state, token or 0, KEPT_S)
            except StokerError as error:
                raise _unreached(error) from error
            if revision is not None:
                return state, revision, True
        present = self.get_state()
        return None if present is None else (*present, False)

    def _check_use(self) -> None:
        if self._check is not None:
            self._check()


def create_stoker_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return torch's dynamic handler over the KV of the cluster at ``params.endpoint``.

    An empty endpoint, or ``auto``, is the usual cluster: ``STOKER_ADDRESS``, or that of this machine; the
    token is looked up as the CLI does. ``params`` are those of torch's ``create_handler``, and
    ``read_timeout``, the seconds for which a key of the store is waited for.
    """
    line = KvLine.to(params.endpoint or None, token=params.get("token") or None)
    return dynamic_handler(line, params)


def dynamic_handler(
    line: KvLine,
    params: RendezvousParameters,
    *,
    check: Callable[[], object] | None = None,
    make_store: Callable[..., KVStore] = KVStore,
) -> RendezvousHandler:
    """Return torch's handler for ``params.run_id`` on this line."""
    timeout_s = float(params.get_as_int("read_timeout", int(_READ_TIMEOUT_S)) or 0)
    store = make_store(f"{STORE}/{params.run_id}", timeout_s, ttl_s=KEPT_S, line=line)
    if not params.local_addr and _is_local(line):
        # All that reach this cluster are here; the machine's name may lead to another address.
        params.local_addr = LOOPBACK
    backend = KVRendezvousBackend(line, params.run_id, check=check)
    return create_handler(store, backend, params)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torch registers for the entry point ``torchrun.handlers``."""
    return create_stoker_handler


def _is_local(line: KvLine) -> bool:
    return all(is_loopback(urlsplit(url).hostname or "") for url in urls_of(line.client.base_url))


def _unreached(error: StokerError) -> RendezvousConnectionError:
    return RendezvousConnectionError(f"the cluster's KV did not answer: {error}")
