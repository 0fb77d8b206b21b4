"""The ``worker_process_setup`` of a ``runtime_env``: a function that each worker runs before its first call.

Run on the thread of that call, the worker's main thread. One that fails fails each call of this worker, with
its reason, and is not tried again: it may have done half of its work.
"""

from __future__ import annotations

import base64
import importlib
import threading
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from stoker_wire.errors import RuntimeEnvSetupError
from stoker_wire.messages.common import PICKLED


class ProcessSetup:
    """The hooks that this process has run, each once."""

    def __init__(self) -> None:
        self._results: dict[str, str] = {}
        self._lock = threading.RLock()  # no call of another thread begins before it has run

    def ensure(self, hook: str) -> None:
        """Run ``hook`` unless it has run here; RuntimeEnvSetupError if it failed."""
        with self._lock:
            self._run_once(hook)
        if why := self._results[hook]:
            name = "a function" if hook.startswith(PICKLED) else hook
            raise RuntimeEnvSetupError(f"runtime_env.worker_process_setup: {name} failed\n{why}")

    def _run_once(self, hook: str) -> None:
        if hook not in self._results:
            self._results[hook] = ""
            try:
                _load(hook)()
            except Exception as error:
                lines = traceback.format_exception(error)
                self._results[hook] = f"{type(error).__name__}: {error}\n{''.join(lines).rstrip()}"


def _load(hook: str) -> Callable[[], Any]:
    if hook.startswith(PICKLED):
        function = cloudpickle.loads(base64.b64decode(hook.removeprefix(PICKLED)))
    else:
        module, _, name = hook.partition(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    return function  # type: ignore[no-any-return]
