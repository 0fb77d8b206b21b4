"""The process of one caller: a driver that joins the cluster with a token, and answers on connections."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import stoker
from stoker.api.registration import default_namespace
from stoker.exceptions import StokerError
from stoker.gateway.calls.caller import Caller
from stoker.gateway.calls.guest import Guest
from stoker.gateway.calls.handover import Receiver, hand_over
from stoker.gateway.calls.routes import DOCUMENT_ROUTES, ROUTES
from stoker.runtime import current
from stoker_wire.http.gateway.calls import is_call
from stoker_wire.http.principals import Principal
from stoker_wire.http.server.service import Service
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from stoker.gateway.calls.spec import CallerSpec
    from stoker.runtime.runtime import Runtime
    from stoker_wire.http.gateway.protocol import RequestHead
    from stoker_wire.settings import Settings

_START_S = 20.0
_LOOK_S = 1.0
_IDLE_S = 300.0
"""A caller that holds nothing and is asked nothing for so long ends."""


class _OneToken:
    """The authority over the one token that a caller takes: whoever shows it is its user."""

    def __init__(self, principal: Principal) -> None:
        self._principal = principal
        self.used_s = time.monotonic()

    async def resolve(self, principal: Principal) -> Principal:
        """Return the user, whatever the token itself would allow."""
        self.used_s = time.monotonic()
        return self._principal

    async def admit(
        self, principal: Principal, method: str, path: str, params: Mapping[str, str]
    ) -> None:
        """Admit it: what a caller holds is the user's own."""


class CallerService:
    """The parts of the process."""

    def __init__(self, spec: CallerSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        user = spec.user
        self._principal = Principal(
            roles=frozenset({user.role}),
            name=user.name,
            job_id=user.job_id,
            namespaces=user.namespaces,
            token_id=user.token_id,
        )
        self._authority = _OneToken(self._principal)
        self._runtime: Runtime
        self._caller: Caller
        self._service: Service
        self._background: Background
        self._receiver: Receiver

    def start(self, on_idle: Callable[[], object]) -> None:
        """Join the cluster, and listen; ``on_idle`` is called once nobody needs it any more."""
        stoker.init(self._spec.gcs_url, token=self._spec.token, log_to_driver=False)
        self._runtime = current.runtime()
        self._runtime.io.run(self._start(on_idle), _START_S)

    async def _start(self, on_idle: Callable[[], object]) -> None:
        spec, settings = self._spec, self._settings
        namespace = default_namespace(spec.user)
        self._caller = Caller(self._runtime, self._principal, namespace)
        self._background = Background("caller")
        self._background.spawn(self._caller.refs.sweep(), name="references")
        self._background.spawn(self._until_idle(on_idle), name="idle")
        self._service = Service("gateway", settings, token=spec.token, authority=self._authority)
        self._service.add_routes(ROUTES, self._caller)
        self._service.add_routes(DOCUMENT_ROUTES, self._service)
        await self._service.start(None, unix_path=spec.socket_path)
        self._service.guard.listens_on(spec.host)  # requests come as they came to the gateway
        self._service.ready()
        self._receiver = Receiver(spec.handover_path, self._take, self._background)
        self._receiver.start()

    def _take(self, connection: socket.socket, came: bytes) -> None:
        """Answer on a connection that the gateway has handed over."""

        def guest() -> Guest:
            return Guest(self._service.protocol(), came, self._is_ours, self._give_back)

        connect = asyncio.get_running_loop().connect_accepted_socket
        self._background.spawn(connect(guest, connection), name="connection")

    def _is_ours(self, head: RequestHead) -> bool:
        return is_call(head.path) and head.token == self._spec.token

    def _give_back(self, connection: socket.socket, unread: bytes) -> None:
        async def give_back() -> None:
            with connection, suppress(OSError):  # then the gateway has ended
                await hand_over(self._spec.gateway_path, connection, unread)

        self._background.spawn(give_back(), name="connection given back")

    def stop(self) -> None:
        """Listen no more, and leave the cluster."""
        with suppress(StokerError):
            self._runtime.io.run(self._stop(), _START_S)
        stoker.shutdown()
        shutil.rmtree(self._spec.folder, ignore_errors=True)

    async def _stop(self) -> None:
        self._receiver.close()
        await self._service.stop(grace_s=1.0)
        await self._background.close()

    async def _until_idle(self, on_idle: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            idle_s = time.monotonic() - self._authority.used_s
            busy = len(self._caller.refs) or self._service.dispatcher.live
            if not busy and idle_s > _IDLE_S:
                on_idle()
                return
