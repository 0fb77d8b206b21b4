"""The rendezvous backend ``stoker``: what torch's own tests ask of each, and ``torchrun`` with it.

torch's wheel comes without its tests. Of ``test/distributed/elastic/rendezvous`` (2026) these are asked here:

=============================================  ===========================================================
rendezvous_backend_test:
get_state: returns state, none where absent    the_state_and_its_token_are_read, there_is_no_state_before
get_state raises where it is corrupt           cannot be: the state is bytes, which are kept as they are
set_state: absent, token is current            a_state_is_set_without_a_token_only_once, the_right_token
set_state: token is none, old, invalid         the same two, and an_invalid_token_sets_nothing
c10d_rendezvous_backend_test, of create_backend:
returns a backend, is_host, store exists       torch_s_handler_brings_two_nodes_together: nobody is host
read_timeout is not given, is invalid          the_read_timeout_is_the_store_s
store is unreachable                           a_cluster_that_does_not_answer_is_a_connection_error
endpoint is invalid                            the_endpoint_names_the_cluster
=============================================  ===========================================================

The others are of TCPStore's port and FileStore's file, which it has not.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from datetime import timedelta
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from stoker.exceptions import BadRequestError
from stoker_train.launch.backend import (
    KVRendezvousBackend,
    create_stoker_handler,
    dynamic_handler,
    get_handler,
)
from stoker_train.launch.kv_line import KvLine
from stoker_train.launch.store import KVStore
from tests.e2e._cluster import environment, head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("b"), num_cpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def line(cluster: LocalCluster) -> KvLine:
    return KvLine.to(cluster.info.gcs_url, token=cluster.info.token)


@pytest.fixture
def backend(line: KvLine) -> KVRendezvousBackend:
    return KVRendezvousBackend(line, f"run-{uuid.uuid4().hex}")


def written(backend: KVRendezvousBackend, state: bytes = b"first") -> Any:
    """Set the state, and return its token."""
    done = backend.set_state(state)
    assert done is not None and done[0] == state and done[2]
    return done[1]


def test_there_is_no_state_before_one_is_set(backend: KVRendezvousBackend) -> None:
    assert backend.name == "stoker"
    assert backend.get_state() is None


def test_the_state_and_its_token_are_read_as_they_were_set(backend: KVRendezvousBackend) -> None:
    token = written(backend, b"\x00\xff binary")
    assert backend.get_state() == (b"\x00\xff binary", token)
    assert backend.get_state() == (b"\x00\xff binary", token), "reading changes nothing"


def test_a_state_is_set_without_a_token_only_once(backend: KVRendezvousBackend) -> None:
    token = written(backend)
    assert backend.set_state(b"second") == (b"first", token, False)
    assert backend.get_state() == (b"first", token)


def test_the_right_token_sets_the_state_and_is_used_up(backend: KVRendezvousBackend) -> None:
    first = written(backend)
    done = backend.set_state(b"second", first)
    assert done is not None
    state, second, has_set = done
    assert (state, has_set) == (b"second", True) and second != first
    assert backend.set_state(b"third", first) == (b"second", second, False)
    assert backend.get_state() == (b"second", second)


def test_equal_states_have_tokens_of_their_own(backend: KVRendezvousBackend) -> None:
    first = written(backend, b"same")
    done = backend.set_state(b"same", first)
    assert done is not None and done[2] and done[1] != first
    assert backend.set_state(b"same", first) == (b"same", done[1], False)


@pytest.mark.parametrize("token", ["invalid", b"invalid", object(), 10**9])
def test_an_invalid_token_sets_nothing(backend: KVRendezvousBackend, token: Any) -> None:
    assert backend.set_state(b"never", token) is None
    held = written(backend)
    assert backend.set_state(b"never", token) == (b"first", held, False)


def test_runs_are_apart(line: KvLine, backend: KVRendezvousBackend) -> None:
    written(backend)
    assert KVRendezvousBackend(line, f"run-{uuid.uuid4().hex}").get_state() is None
    with pytest.raises(BadRequestError, match=r"--rdzv-id"):
        KVRendezvousBackend(line, "")


def test_of_many_that_change_the_state_each_change_has_one_winner(line: KvLine) -> None:
    run_id = f"run-{uuid.uuid4().hex}"
    wins: list[int] = []

    def change() -> None:
        mine = KVRendezvousBackend(line, run_id)
        won = 0
        while won < 5:
            found = mine.get_state()
            state, token = (b"0", None) if found is None else found
            done = mine.set_state(str(int(state) + 1).encode(), token)
            won += done is not None and done[2]
        wins.append(won)

    threads = [threading.Thread(target=change) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(WAIT_S)
    assert wins == [5, 5, 5]
    found = KVRendezvousBackend(line, run_id).get_state()
    assert found is not None and found[0] == b"15"


def test_a_cluster_that_does_not_answer_is_a_connection_error(monkeypatch: Any) -> None:
    monkeypatch.setattr("stoker_train.launch.kv_line._CALL_S", 0.3)
    away = KVRendezvousBackend(KvLine.to("http://127.0.0.1:9", token="t"), "run")
    with pytest.raises(RendezvousConnectionError, match="did not answer"):
        away.get_state()
    with pytest.raises(RendezvousConnectionError, match="did not answer"):
        away.set_state(b"x")


def params(run_id: str, **more: Any) -> RendezvousParameters:
    given = {"endpoint": "", "min_nodes": 2, "max_nodes": 2, "join_timeout": int(WAIT_S), **more}
    return RendezvousParameters(backend="stoker", run_id=run_id, **given)


def test_torch_s_handler_brings_two_nodes_together(line: KvLine) -> None:
    run_id = f"run-{uuid.uuid4().hex}"
    handlers = [dynamic_handler(line, params(run_id)) for _ in range(2)]
    met: dict[int, Any] = {}

    def join(index: int) -> None:
        met[index] = handlers[index].next_rendezvous()

    threads = [threading.Thread(target=join, args=(index,)) for index in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(2 * WAIT_S)
    assert sorted(one.rank for one in met.values()) == [0, 1]
    assert {one.world_size for one in met.values()} == {2}
    assert {one.bootstrap_store_info.master_addr for one in met.values()} == {"127.0.0.1"}
    met[0].store.set("k", "v")
    assert met[1].store.get("k") == b"v"
    assert {one.get_backend() for one in handlers} == {"stoker"}
    for one in handlers:
        one.shutdown()


def test_the_endpoint_names_the_cluster(cluster: LocalCluster) -> None:
    (plugin,) = (one for one in entry_points(group="torchrun.handlers") if one.name == "stoker")
    assert plugin.load() is get_handler and get_handler() is create_stoker_handler
    with pytest.raises(BadRequestError, match="not an address"):
        create_stoker_handler(params("run", endpoint="ftp://x"))


def test_the_read_timeout_is_the_store_s(line: KvLine) -> None:
    for given, wanted_s in (({}, 60), ({"read_timeout": "10"}, 10)):
        made: list[KVStore] = []

        def make_store(*args: Any, made: list[KVStore] = made, **kwargs: Any) -> KVStore:
            made.append(KVStore(*args, **kwargs))
            return made[-1]

        dynamic_handler(line, params("run", **given), make_store=make_store)
        assert [one.timeout for one in made] == [timedelta(seconds=wanted_s)]
    for wrong in ("0", "-10"):
        with pytest.raises(ValueError, match="no time to wait"):
            dynamic_handler(line, params("run", read_timeout=wrong))


SCRIPT = """
import os
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print("sum", value.item(), "run", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
dist.destroy_process_group()
"""


def test_torchrun_itself_forms_a_group_of_two_agents(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "stoker", "--rdzv-endpoint", cluster.info.gcs_url, "--rdzv-id", "r1",
        str(script),
    ]  # fmt: skip
    env = environment(cluster, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    agents = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        said = [one.communicate(timeout=3 * WAIT_S)[0] for one in agents]
    finally:
        for one in agents:
            one.kill()
    assert [one.returncode for one in agents] == [0, 0], said
    for text in said:
        assert "sum 3.0 run r1" in text, said
