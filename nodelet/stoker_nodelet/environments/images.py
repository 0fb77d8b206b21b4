"""Images of containers: the engine of this node, images pulled once, and what must be in one.

An image has a Python of its own, whose minor version is the node's (functions travel as its bytecode), and
the Stoker of the node. Failures are RuntimeEnvSetupError with the reason.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_nodelet.environments.venvs import run_command
from stoker_wire.errors import RuntimeEnvSetupError
from stoker_wire.process.background import Background
from stoker_wire.version import PROTOCOL_TEXT, VERSION

if TYPE_CHECKING:
    from stoker_wire.messages.common import RuntimeEnv

PYTHON = "python3"
"""The interpreter of an image, found on its own PATH."""
_ENGINES = ("docker", "podman")
_PULL_S = 1800.0
_ASK_S = 60.0
_FACTS = """
import json, sys
said = ""
try:
    import stoker, stoker_nodelet
    from stoker_wire.version import PROTOCOL_TEXT, VERSION
    said = VERSION + " (protocol " + PROTOCOL_TEXT + ")"
except ImportError as error:
    print(error)
print(json.dumps([list(sys.version_info[:3]), said]))
"""

Report = Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
"""Runs an installation, and reports how it goes."""


@dataclass(frozen=True, slots=True)
class Container:
    """The image and the devices of a container: workers of equal ones share it."""

    image: str
    """The id of the image, which stays when its name becomes another's."""
    devices: tuple[str, ...] = ()
    """The GPUs that it has: uuids, or indices as the driver counts."""


@dataclass(slots=True)
class Images:
    """The images of one node. ``chosen`` is the engine's command, if it is not to be found."""

    background: Background
    chosen: str = ""
    _checked: set[str] = field(default_factory=set)
    _builds: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def engine(self) -> str:
        """Return the path of the engine's command; RuntimeEnvSetupError if this node has none."""
        names = (self.chosen,) if self.chosen else _ENGINES
        found = next((path for name in names if (path := shutil.which(name))), None)
        if found is None:
            which = f"no {self.chosen!r}" if self.chosen else "no container engine"
            raise RuntimeEnvSetupError(
                f"runtime_env.image_uri: this node has {which}\n"
                "put docker or podman on the PATH of the nodelet, or name one by STOKER_CONTAINER_ENGINE"
            )
        return found

    async def prepare(self, wanted: RuntimeEnv, report: Report) -> Container:
        """Pull the image unless it is here, and look at it once; return a container of it."""
        if wanted.not_in_images:
            raise RuntimeEnvSetupError(
                f"runtime_env.{wanted.not_in_images[0]}: it is not done in images\n"
                "build the image with it, or leave image_uri out"
            )
        engine, name = self.engine(), wanted.image_uri
        image = await self._find(engine, name)
        if image not in self._checked:
            await self._build_once(engine, name, report)
            image = await self._find(engine, name)
        return Container(image)

    async def _build_once(self, engine: str, name: str, report: Report) -> None:
        if name not in self._builds:

            async def run() -> None:
                try:
                    await report(lambda: self._build(engine, name))
                finally:
                    del self._builds[name]

            self._builds[name] = self.background.spawn(run(), name=f"image-{name}", report=False)
        # A caller that gives up must not end the build of the others.
        await asyncio.shield(self._builds[name])

    async def _build(self, engine: str, name: str) -> None:
        image = await self._find(engine, name)
        if not image:
            await run_command([engine, "pull", "-q", name], f"pull of {name}", timeout_s=_PULL_S)
            image = await self._find(engine, name)
        await self._check(engine, image, name)
        self._checked.add(image)

    async def _find(self, engine: str, name: str) -> str:
        """Return the id of an image that is here, else ''."""
        inspect = [engine, "image", "inspect", "--format", "{{.Id}}", name]
        try:
            said = await run_command(inspect, "image inspect", timeout_s=_ASK_S)
        except RuntimeEnvSetupError:
            await self._ask(engine)
            return ""
        return said.strip().rpartition("\n")[2]

    async def _ask(self, engine: str) -> None:
        try:
            await run_command([engine, "info"], f"{engine} info", timeout_s=_ASK_S)
        except RuntimeEnvSetupError as error:
            why = error.message.split("\n")
            raise RuntimeEnvSetupError(
                "runtime_env.image_uri: the container engine of this node does not answer\n"
                f"start it, and let the user of the nodelet use its socket\n{why[min(1, len(why) - 1)]}"
            ) from None

    async def _check(self, engine: str, image: str, name: str) -> None:
        command = [engine, "run", "--rm", "--network", "none", "--entrypoint", PYTHON]
        said = await run_command(
            [*command, image, "-c", _FACTS], f"{PYTHON} of {name}", timeout_s=_ASK_S
        )
        lines = said.splitlines()
        try:
            version, stoker = json.loads(lines[-1])
            python = ".".join(str(part) for part in version)
            fits = tuple(version[:2]) == sys.version_info[:2]
        except (ValueError, IndexError, TypeError):
            raise RuntimeEnvSetupError(
                f"the Python of {name} does not answer\n{said[-500:]}"
            ) from None
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        if not fits:
            raise RuntimeEnvSetupError(
                f"runtime_env.image_uri: the Python of {name} is {python}, and that of this node {ours}\n"
                f"build the image with Python {ours}"
            )
        expected = f"{VERSION} (protocol {PROTOCOL_TEXT})"
        if stoker != expected:
            why = f"has Stoker {stoker}" if stoker else "cannot import Stoker"
            raise RuntimeEnvSetupError(
                f"runtime_env.image_uri: {name} {why}\n"
                f"install Stoker {expected} in the image, as on this node: "
                + (lines[-2] if len(lines) > 1 else f"`pip install stoker=={VERSION}`")
            )
