"""Fork servers in containers: the command of one, and the connection that it makes back to its nodelet.

All workers of one image (and of the same GPUs) are forked in one container. It has the host's pids, network
and shared memory, so signals, addresses and objects are as outside; its files are the image's, but for the
nodelet's own folders at the same places. A descriptor does not pass into a container: the fork
server connects to a Unix socket in one of these folders instead, and from there on all is as without one.
The container ends with its fork server, which ends with the nodelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.environments.images import PYTHON, Container, Images
from stoker_nodelet.workers.forkserver import ForkServerHandle, InContainer, command_of
from stoker_wire.errors import UnavailableError
from stoker_wire.http.auth import SECRETS
from stoker_wire.ids import Prefix, new_id
from stoker_wire.process.files import umask

if TYPE_CHECKING:
    from stoker_nodelet.environments.environments import Environment
    from stoker_nodelet.identity import Identity
    from stoker_wire.messages.cluster import Lease
    from stoker_wire.settings import Settings

NODE_LABEL = "stoker.io/node-id"
_SHM = Path("/dev/shm")
_PASSED = ("OMP_NUM_THREADS", "TZ")
_CONNECT_S = 50.0
_LOOK_S = 0.05
_REMOVE_S = 20.0
_SAID_LINES = 5


@dataclass(frozen=True, slots=True)
class Containers:
    """The start of containers on this node; ``shared`` are the files and folders that they all have."""

    images: Images
    node_id: str
    socket_dir: Path
    log_dir: Path
    shared: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Settings, identity: Identity, images: Images) -> Containers:
        """Return those of a nodelet."""
        folders = (identity.session_dir, identity.arena_dir, identity.socket_dir)
        others = (settings.spill_dir, settings.job_output_root, identity.triton_dir)
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        shared = tuple(Path(one).absolute() for one in (*folders, *others, *files) if str(one))
        return cls(images, identity.node_id, identity.socket_dir, identity.log_dir, shared)

    def start(
        self, container: Container, *, target: str, preload: tuple[str, ...]
    ) -> ForkServerHandle:
        """Start a container whose fork server will connect; return at once."""
        engine = self.images.engine()
        name = f"stoker-{new_id(Prefix.WORKER)}"
        path = self.socket_dir / f"{name}.sock"
        log_path = self.log_dir / f"{name}.log"
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(1)
            listener.setblocking(False)
            program = command_of(PYTHON, target, preload, ["--connect", str(path)])
            with open(log_path, "ab", opener=umask.private) as log:
                proc = subprocess.Popen(
                    [*self.command(engine, name, container), *program[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={key: value for key, value in os.environ.items() if key not in SECRETS},
                    start_new_session=True,
                )
        except OSError as error:
            listener.close()
            path.unlink(missing_ok=True)
            raise UnavailableError(
                f"the container of an image cannot be started\n{error}"
            ) from None
        return ForkServerHandle(
            proc, listener, target, preload, PYTHON, InContainer(engine, name, proc, path, log_path)
        )

    def command(self, engine: str, name: str, container: Container) -> list[str]:
        """Return the command up to the image; the arguments of its Python follow."""
        files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        command = [engine, "run", "--rm", "--pull", "never", "--name", name]
        command += ["--label", f"{NODE_LABEL}={self.node_id}", "--log-driver", "none"]
        command += ["--network", "host", "--ipc", "host", "--pid", "host", "--pids-limit", "-1"]
        command += ["--user", f"{os.geteuid()}:{os.getegid()}"]
        command += ["--ulimit", f"nofile={files}:{most_files}"]
        is_podman = os.path.basename(engine) == "podman"
        if is_podman:
            command += ["--security-opt", "label=disable"]
            command += ["--userns", "keep-id"] if os.geteuid() else []
        for path in self._mounts():
            command += ["--mount", f"type=bind,source={path},target={path}"]
        for variable in sorted(_variables()):
            command += ["--env", variable]  # its value is in the environment of the command
        if container.devices and is_podman:
            for device in container.devices:
                command += ["--device", f"nvidia.com/gpu={device}"]
        elif container.devices:
            command += ["--gpus", f'"device={",".join(container.devices)}"']
        return [*command, "--entrypoint", PYTHON, container.image]

    def _mounts(self) -> list[Path]:
        """Return what is shared and there, without what lies in another folder of it, or in shared memory.

        That a container has as a whole; a folder in it that were mounted could not be removed meanwhile.
        """
        there = {path for path in self.shared if path.exists() and _SHM not in path.parents}
        return sorted(path for path in there if there.isdisjoint(path.parents))


async def accept(listener: socket.socket, container: InContainer) -> socket.socket:
    """Return the connection of the fork server in a container; UnavailableError says why there is none."""
    until_s = time.monotonic() + _CONNECT_S
    try:
        while time.monotonic() < until_s and container.proc.poll() is None:
            with contextlib.suppress(OSError):  # nobody is there yet, or this node stops
                connection, _ = listener.accept()
                connection.setblocking(False)
                return connection
            await asyncio.sleep(_LOOK_S)
    finally:
        listener.close()
        container.socket_path.unlink(missing_ok=True)
    await asyncio.to_thread(remove, container)
    text = ""
    with contextlib.suppress(OSError):
        text = container.log_path.read_text(errors="replace").strip()
    said = text.splitlines()[-_SAID_LINES:] or ["it said nothing"]
    lines = ("runtime_env.image_uri: the container of its workers did not start", *said)
    raise UnavailableError("\n".join(lines))


def remove(container: InContainer) -> None:
    """End a container, whatever it does."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [container.engine, "rm", "-f", container.name],
            capture_output=True,
            timeout=_REMOVE_S,
            check=False,
        )


def with_gpus(environment: Environment, lease: Lease, identity: Identity) -> Environment:
    """Return an environment whose container, if it has one, has the GPUs of a lease."""
    container, uuids = environment.container, identity.gpu_uuids
    if container is None or not lease.gpus or identity.fake_gpus:
        return environment
    devices = tuple(uuids.get(index, str(index)) for index in sorted(lease.gpus))
    return replace(environment, container=replace(container, devices=devices)).keyed()


def _variables() -> set[str]:
    ours = {name for name in os.environ if name.startswith("STOKER_") and name not in SECRETS}
    return ours | {name for name in _PASSED if name in os.environ}
