"""``python -m stoker_nodelet``: one node of a cluster, as a process of its own.

The token comes from STOKER_TOKEN or STOKER_TOKEN_FILE, never from the command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stoker_nodelet.workers.forkserver import DEFAULT_TARGET, start_forkserver
from stoker_wire.process.files.open_files import raise_open_files


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stoker_nodelet",
        description="Run a Stoker node: it joins the gcs and starts workers on this machine.",
        epilog="Every option has a STOKER_* variable; the token is read from STOKER_TOKEN or "
        "STOKER_TOKEN_FILE only.",
    )
    parser.add_argument("--gcs-url", help="URL of the gcs to join (STOKER_GCS_URL)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: a free one)")
    parser.add_argument("--num-cpus", type=float, help="CPUs to offer (default: as found)")
    parser.add_argument("--num-gpus", type=float, help="GPUs to offer; more than found are fake")
    parser.add_argument("--memory", type=int, help="bytes of memory to offer (default: 70 %% free)")
    parser.add_argument("--resources", type=json.loads, help="more of them: '{\"ssd\": 2}'")
    parser.add_argument("--labels", type=json.loads, help='labels: \'{"zone": "a"}\'')
    parser.add_argument("--taints", help="taints: key=value:NoSchedule,key:NoExecute")
    parser.add_argument("--session-dir", type=Path, help="folder for logs, sockets and spool")
    parser.add_argument("--target", default=DEFAULT_TARGET, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run a nodelet until SIGTERM."""
    options = _options(argv)
    raise_open_files()
    # Before the imports below: the fork server's own imports run beside them.
    forkserver = start_forkserver(target=options.target)

    from stoker_nodelet.service import Nodelet, end_process, serve
    from stoker_wire.errors import BadRequestError
    from stoker_wire.http.cluster_secret import find_secret
    from stoker_wire.http.server.service import run_service
    from stoker_wire.http.server.tokens import TokenSigner
    from stoker_wire.ids import Prefix, new_id
    from stoker_wire.settings import Settings

    settings = Settings.from_env(
        gcs_url=options.gcs_url, host=options.host, port=options.port, taints=options.taints
    )

    async def start() -> Nodelet:
        if not settings.gcs_url:
            raise BadRequestError(
                "the node has no gcs to join\ngive --gcs-url or set STOKER_GCS_URL"
            )
        token = TokenSigner(find_secret(settings, host=settings.host))
        return await serve(
            settings,
            token=token,
            gcs_url=settings.gcs_url,
            host=settings.host,
            port=settings.port,
            session_dir=options.session_dir or Path(settings.session_root) / new_id(Prefix.SESSION),
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            memory=options.memory,
            resources=options.resources,
            labels=options.labels,
            forkserver=forkserver,
            end=end_process,
        )

    try:
        run_service(start, settings=settings)
    finally:
        forkserver.sock.close()


if __name__ == "__main__":
    main(sys.argv[1:])
