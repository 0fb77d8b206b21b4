"""The upload of packages to the gcs: what it has already is not sent.

Used by drivers and by job submission, from threads of the user.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stoker.runtime.options.packages import Package, Progress
from stoker_wire.data.piece_lists import FindMissing, MissingPackages

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.runtime.net.http import HttpClient

UPLOAD_TIMEOUT_S = 600.0
_AT_ONCE = 4


def uploader(client: HttpClient) -> Callable[[Package], None]:
    """Return a function that sends a package to the gcs unless it is there.

    Of one in pieces it sends those that are missing, and its list last. A large upload shows its
    progress on stderr.
    """

    def upload(package: Package) -> None:
        if not client.exists(_path(package)):
            _send(client, _missing(client, package.pieces), package)

    return upload


def _path(package: Package) -> str:
    return f"/v1/packages/{package.hash}"


def _missing(client: HttpClient, pieces: tuple[Package, ...]) -> list[Package]:
    if not pieces:
        return []
    asked = FindMissing(hashes=tuple(one.hash for one in pieces))
    reply = client.call("POST", "/v1/packages/missing", asked, reply=MissingPackages)
    missing = set(reply.hashes)
    return [one for one in pieces if one.hash in missing]


def _send(client: HttpClient, pieces: list[Package], last: Package) -> None:
    total = sum(len(one.content) for one in (*pieces, last))
    progress = Progress(f"uploading to {client.base_url}", total)
    sent: dict[str, int] = {}

    def send(package: Package) -> None:
        def on_sent(nbytes: int) -> None:
            sent[package.hash] = nbytes
            progress.done(sum(list(sent.values())))

        client.call(
            "PUT", _path(package), package.content, timeout_s=UPLOAD_TIMEOUT_S, on_sent=on_sent
        )

    if pieces:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="stoker-upload") as pool:
            try:
                for done in [pool.submit(send, one) for one in pieces]:
                    done.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    send(last)
    progress.end()
