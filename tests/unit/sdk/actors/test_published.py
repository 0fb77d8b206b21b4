"""What the gcs hands out of actors: their handles come back whole, and nothing in them runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker
from stoker.exceptions import SerializationError
from stoker.runtime.actors.create import handle_of
from stoker.runtime.actors.info import HandleInfo, MethodInfo, methods_of
from stoker.runtime.actors.published import decoded_info, encoded_info
from stoker.runtime.options.actor_options import MethodOptions
from stoker.runtime.tasks.functions import pickled_exception_types
from stoker_wire.messages.work import Actor, ActorState


class OnlyHereError(Exception):
    pass


class Service:
    def plain(self, x: int, *, y: Any = object()) -> None: ...  # noqa: B008

    @stoker.method(num_returns=2, concurrency_group="io", timeout=5, retry_exceptions=True)
    def rich(self, *args: int, **kwargs: int) -> None: ...

    @stoker.method(max_task_retries=3, retry_exceptions=[OnlyHereError])
    def picky(self) -> None: ...

    def streams(self) -> Any:
        yield 1


def actor(handle_info: bytes) -> Actor:
    return Actor(
        actor_id="a_1",
        job_id="j_1",
        class_name="Service",
        state=ActorState.ALIVE,
        handle_info=handle_info,
    )


def info(**changes: Any) -> HandleInfo:
    made = HandleInfo("a_1", "Service", methods_of(Service), 2, 7, ("io",), "j_1", ("", "io"))
    return msgspec.structs.replace(made, **changes)


def test_a_handle_from_the_gcs_is_that_of_its_creator() -> None:
    known, read = info(), decoded_info(actor(encoded_info(info())))
    picky = known.methods.pop("picky"), read.methods.pop("picky")
    assert read == known
    assert picky[1].parameters == picky[0].parameters
    types = [pickled_exception_types(method.options.retry_exceptions) for method in picky]
    assert types[0] == types[1], "its caller passes the types on to the worker as they are"
    assert handle_of(actor(encoded_info(info()))).picky.options(timeout=3)


class Bomb:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return Path.touch, (self.flag,)


def test_no_byte_of_a_handle_from_the_gcs_is_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    with pytest.raises(SerializationError, match="a_1 cannot be read"):
        handle_of(actor(bomb))
    armed = MethodInfo(MethodOptions(retry_exceptions=bomb), generates=False)
    handle = handle_of(actor(msgspec.msgpack.encode(info(methods={"f": armed}))))
    repr(handle.f.options(name="g"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        b"\x81\xa8actor_id\xa2\xff\xff",
        b"\x82\xa1a" + 100_000 * b"\x91",
        msgspec.msgpack.encode({"actor_id": 3}),
        encoded_info(info(actor_id="a_2")),
        msgspec.msgpack.encode(
            info(
                methods={"f": MethodInfo(MethodOptions(retry_exceptions=1 << 50), generates=False)}
            )
        ),
    ],
)
def test_a_handle_that_is_none_is_one_error(bad: bytes) -> None:
    with pytest.raises(SerializationError, match=r"a_1|retry_exceptions"):
        decoded_info(actor(bad))
