"""The actor of a node of ``stoker launch``: it runs the agent, and passes on what that says and prints.

It holds the node's bundle; when it ends, by the driver or with the bundle, the nodelet ends all that it has
started. Made by the driver; it must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

import msgspec

from stoker.runtime import current
from stoker.train.rendezvous import advertised_host, bind_interface
from stoker_train.launch.spec import AgentSpec, Ended, Event, Lines, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.http.auth import Credential

_MOST_WAITING = 1000
_MOST_LINES = 500
_END_S = 5.0
_TOKEN_S = 1.0
"""Between two looks at whether this actor has another token."""


class Node:
    """A node of the run ``run_id``, as its actor."""

    def run(self, spec: Spec, run_id: str, member: str, namespace: str) -> Iterator[list[Event]]:
        """Start the agent, and yield its events until it has ended; :class:`Ended` is the last."""
        if spec.cwd and not os.path.isdir(spec.cwd):
            why = f"the folder {spec.cwd} is not on this node\nsend it along: --working-dir {spec.cwd}"
            yield [Ended(left=False, message=why)]
            return
        events: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        process, said = self._start(spec, run_id, member, namespace)
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=_read_events, args=(said, events), daemon=True),
            threading.Thread(
                target=_read_lines, args=("stdout", process.stdout, events), daemon=True
            ),
            threading.Thread(
                target=_read_lines, args=("stderr", process.stderr, events), daemon=True
            ),
        ]
        for one in readers:
            one.start()
        open_ends, ended = len(readers), False
        while open_ends:
            batch = [events.get()]
            while len(batch) < _MOST_LINES and not events.empty():
                batch.append(events.get_nowait())
            open_ends -= batch.count(None)
            kept = [event for event in batch if event is not None]
            ended = ended or any(isinstance(event, Ended) for event in kept)
            if kept:
                yield kept
        code = process.wait(_END_S)
        if not ended:
            yield [Ended(left=False, message=f"the agent ended with exit code {code}")]

    def _start(
        self, spec: Spec, run_id: str, member: str, namespace: str
    ) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        reading, writing = os.pipe()
        host = advertised_host()
        bind_interface(host)
        identity = current.runtime().identity
        told = AgentSpec(
            spec=spec,
            run_id=run_id,
            member=member,
            address=identity.gcs_url,
            token=identity.credential.token,
            namespace=namespace,
            local_addr=host,
        )
        environ = dict(os.environ)
        if spec.nproc > 1:
            environ.setdefault("OMP_NUM_THREADS", "1")
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "stoker_train.launch.agent", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writing,),
            cwd=spec.cwd or None,
            env=environ,
        )
        os.close(writing)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(told) + b"\n")
        process.stdin.flush()
        tokens = threading.Thread(
            target=send_tokens, args=(process, told.token, identity.credential), daemon=True
        )
        tokens.start()
        return process, os.fdopen(reading, "rb")


def send_tokens(process: subprocess.Popen[bytes], token: str, credential: Credential) -> None:
    """Pass on each token that this actor has instead of ``token``, while the agent lives."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # it has ended meanwhile
        while process.poll() is None:
            if credential.token != token:
                token = credential.token
                process.stdin.write(f"{token}\n".encode())
                process.stdin.flush()
            time.sleep(_TOKEN_S)


def _read_events(file: IO[bytes], events: queue.Queue[Event | None]) -> None:
    with file:
        for line in file:
            events.put(msgspec.json.decode(line, type=Event))
    events.put(None)


def _read_lines(stream: str, file: IO[bytes], events: queue.Queue[Event | None]) -> None:
    with file:
        for line in file:
            text = line.decode(errors="replace").rstrip("\r\n")
            events.put(Lines(stream=stream, lines=(text,)))
    events.put(None)
