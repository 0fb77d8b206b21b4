"""The gateway of a head: a process of its own, as what people move must not hold up the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Self

from stoker_wire.errors import StartError
from stoker_wire.http.auth import SECRETS
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

_READY_S = 30.0
_AGAIN_S = 1.0
_STOP_S = 5.0


class GatewayProcess:
    """``python -m stoker.gateway``, which is started again where it ends by itself."""

    def __init__(self, settings: Settings, gcs_url: str, port: int) -> None:
        self._settings = settings
        self._gcs_url = gcs_url
        self._port = port
        self._background = Background("gateway")
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: tuple[int, int] = os.pipe()
        """The gateway ends when the second end is closed, however this process dies."""
        self.url = ""

    async def start(self) -> Self:
        """Return when it listens. StartError says why it does not."""
        await self._spawn()
        self._background.spawn(self._keep(), name="keep")
        return self

    async def stop(self) -> None:
        """End it in order."""
        await self._background.close()
        for end in self._lifeline:
            os.close(end)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        environ = {name: text for name, text in os.environ.items() if name not in SECRETS}
        environ |= {"STOKER_GCS_URL": self._gcs_url, "STOKER_HOST": self._settings.host}
        if self._settings.advertise_host:
            environ["STOKER_ADVERTISE_HOST"] = self._settings.advertise_host
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "stoker.gateway", "--port", str(self._port)),
            *("--ready-fd", "1", "--lifeline-fd", str(self._lifeline[0])),
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._lifeline[0],),
        )
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            line = await asyncio.wait_for(self._process.stdout.readline(), _READY_S)
        if not line:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            raise StartError(
                f"the gateway did not start on port {self._port}\n"
                "the head's log has what it said; choose another port with --gateway-port"
            )
        self.url = line.decode().strip()
        self._port = int(self.url.rpartition(":")[2])

    async def _keep(self) -> None:
        while True:
            assert self._process is not None
            await self._process.wait()
            await asyncio.sleep(_AGAIN_S)
            with contextlib.suppress(StartError):  # tried again: the port may be free by then
                await self._spawn()
