"""``stoker.train.KVStore``: what torch's own tests ask of every store, over a real control store.

torch's wheel comes without its tests. Of ``test/distributed/test_store.py`` (2026, by class; each case of
``StoreTestBase`` is here plain and behind one and two PrefixStores) these are asked here, by other means:

=============================================  ===========================================================
StoreTestBase: set_get_check, compare_set      what_is_set_is_got_and_counted, compare_set_has_one_winner
simple_wait                                    waits_have_a_deadline, a_wait_ends_when_another_sets_the_key
append, multi_set, multi_get                   append_makes_one_value_of_many, many_keys_in_one_call
clone                                          a_clone_is_the_same_store
queues, _nonblocking, _timeout                 queues_give_each_value_once_in_order
queues_bidirectional                           of_many_that_change_a_key_none_is_lost
PrefixStore: get_underlying_store, PrefixTCP:  prefixes_divide_a_store
underlying_non_prefix_store
TCPStore: numkeys_delkeys                      keys_are_counted_as_they_come_and_go
multi_worker_with_(non)fixed_world_size        many_clients_see_what_one_has_set
PythonStore: set_get                           torch_s_own_test_of_stores_in_python: torch's, unchanged
TestPythonStore: has_extended_api_roundtrip,   many_keys_in_one_call, append_makes_one_value_of_many: behind
append_, multi_get_, multi_set_roundtrip       prefixes they come here through C++
TestMultiThreadedWait: wait (plain, prefix)    a_wait_ends_when_another_sets_the_key
RendezvousTCP: timeout_set, timeout_doest_     waits_have_a_deadline: and the store goes on after it
break_client
Timeout: interrupt_doesnt_break_wait           a_signal_does_not_end_a_wait
InitPgWithNonUvStore                           a_process_group_forms_through_it
=============================================  ===========================================================

The others ask nothing of a store: they are of TCPStore's sockets, libuv and protocol, of FileStore's file, of
RPC, of the URLs of ``dist.rendezvous``, and of stores that lack methods.
"""

from __future__ import annotations

import signal
import threading
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier, synchronize

import stoker
from stoker.exceptions import BadRequestError
from stoker.train import KVStore
from stoker_train.launch.kv_line import KvLine
from tests.e2e._cluster import caught, driver, head, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.launch import LocalCluster

WAIT_S = 40.0
SHORT = timedelta(seconds=0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("k"), num_cpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def line(cluster: LocalCluster) -> KvLine:
    return KvLine.to(cluster.info.gcs_url, token=cluster.info.token)


@pytest.fixture(params=["plain", "prefixed", "twice prefixed"])
def store(request: pytest.FixtureRequest, line: KvLine) -> dist.Store:
    """A store of the test's own; also behind torch's prefixes, which call it through C++."""
    made = fresh(line)
    for _ in range(["plain", "prefixed", "twice prefixed"].index(request.param)):
        made = dist.PrefixStore("p", made)
    return made


def fresh(line: KvLine, timeout: float = WAIT_S) -> KVStore:
    return KVStore(f"test-{uuid.uuid4().hex}", timeout, line=line)


def both(first: Callable[[], object], second: Callable[[], object], name: str = "first") -> None:
    """Run two calls at once, the first in a thread of that name, and have their errors here."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(one,), name=own)
        for own, one in ((name, first), ("second", second))
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(2 * WAIT_S)
    assert not errors, errors
    assert not any(one.is_alive() for one in threads)


# -- one process ----------------------------------------------------------------------------------


def test_what_is_set_is_got_and_counted(store: dist.Store) -> None:
    before = store.num_keys()
    store.set("first", "1")
    store.set("second", b"\x00\xff")
    store.set("first", "2")
    store.set("", "a key without a name")
    assert store.get("first") == b"2"
    assert store.get("second") == b"\x00\xff"
    assert store.get("") == b"a key without a name"
    assert store.num_keys() == before + 3
    assert store.check(["first", "second"]) and not store.check(["first", "third"])
    assert store.check([])


def test_counters_begin_at_nothing_and_may_fall(store: dist.Store) -> None:
    assert [store.add("n", 1), store.add("n", 5), store.add("n", -10)] == [1, 6, -4]
    assert store.get("n") == b"-4"
    store.set("n", "40")
    assert store.add("n", 2) == 42
    assert store.add("other", 0) == 0 and store.check(["other"])


def test_compare_set_has_one_winner_and_says_what_holds(store: dist.Store) -> None:
    assert store.compare_set("k", "expected", "new") == b"expected", "it is absent, and stays so"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.get("k") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def test_a_key_that_is_deleted_is_not_there(store: dist.Store) -> None:
    store.set("k", "v")
    if isinstance(store, dist.PrefixStore):
        assert store.delete_key("k")
        assert not store.delete_key("k")
    else:
        assert store.delete_key("k") is True
        assert store.delete_key("k") is False
    assert not store.check(["k"])
    error = caught(lambda: store.wait(["k"], SHORT), dist.DistStoreError)
    assert "'" in str(error) and "k'" in str(error)
    store.set("k", "again")
    assert store.get("k") == b"again"


def test_append_makes_one_value_of_many(store: dist.Store) -> None:
    store.append("new", "po")
    store.append("new", "tato")
    store.set("old", "foo")
    store.append("old", b"\xff")
    assert store.get("new") == b"potato" and store.get("old") == b"foo\xff"


def test_many_keys_in_one_call(store: dist.Store) -> None:
    store.multi_set(["a", "b"], ["1", "\u00fc"])
    store.set("c", b"\xfe")
    assert store.multi_get(["a", "b", "c", "a"]) == [b"1", "\u00fc".encode(), b"\xfe", b"1"]
    assert store.multi_get([]) == []
    assert store.has_extended_api()


def test_waits_have_a_deadline_and_name_the_keys(line: KvLine) -> None:
    store = fresh(line, 0.2)
    assert store.timeout == timedelta(seconds=0.2)
    for call in (
        lambda: store.get("late"),
        lambda: store.wait(["late"]),
        lambda: store.multi_get(["late"]),
        lambda: dist.PrefixStore("p", store).wait(["late"], SHORT),
    ):
        said = str(caught(call, dist.DistStoreError))
        assert "wait timeout after 200 ms" in said and "late'" in said
    store.set("there", "")
    error = caught(lambda: store.wait(["there", *"abcdefg"], SHORT), dist.DistStoreError)
    assert "'a', 'b', 'c', 'd', 'e' and 2 more" in str(error)
    store.set_timeout(timedelta(seconds=WAIT_S))
    assert store.timeout == timedelta(seconds=WAIT_S)
    assert store.clone().timeout == timedelta(seconds=WAIT_S)


def test_prefixes_divide_a_store(line: KvLine) -> None:
    store = fresh(line)
    one, other = dist.PrefixStore("one", store), dist.PrefixStore("other", store)
    one.set("k", "1")
    other.set("k", "2")
    assert (one.get("k"), other.get("k")) == (b"1", b"2")
    assert store.list_keys() == ["one/k", "other/k"]
    assert one.underlying_store is store
    twice = dist.PrefixStore("more", one)
    assert twice._underlying_non_prefix_store is store
    twice.set("k", "3")
    assert store.get("one/more/k") == b"3"
    twice.delete_key("k")
    with pytest.raises(ValueError, match=r"(?i)none|null"):
        dist.PrefixStore("p", None)
    assert store.clear() == 2 and store.num_keys() == 0
    assert fresh(line).num_keys() == 0, "another prefix is another store"


def test_keys_longer_than_the_kv_takes_are_keys(line: KvLine) -> None:
    store = fresh(line)
    long = "x" * 2000
    store.set(long + "1", "1")
    store.set(long + "2", "2")
    assert store.multi_get([long + "2", long + "1"]) == [b"2", b"1"]
    assert store.num_keys() == 2


def test_queues_give_each_value_once_in_order(line: KvLine) -> None:
    store = fresh(line, 0.3)
    for value in ("a", b"\xff", "c"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3 and store.queue_len("other") == 0
    assert [store.queue_pop("q") for _ in range(2)] == [b"a", b"\xff"]
    assert store.queue_pop("q", block=False) == b"c"
    empty = caught(lambda: store.queue_pop("q", block=False), RuntimeError)
    assert type(empty).__name__ == "QueueEmptyError" or isinstance(empty, dist.DistStoreError)
    said = caught(lambda: store.queue_pop("q"), dist.DistStoreError)
    assert "'q' was empty" in str(said)
    assert store.num_keys() == 0


def test_a_queue_is_there_as_long_as_it_has_values(line: KvLine) -> None:
    store = fresh(line)
    assert not store.check(["q"]) and store.queue_len("q") == 0
    store.queue_push("q", "1")
    store.set("k", "v")
    assert store.check(["q", "k"]) and not store.check(["q", "other"])
    store.wait(["q", "k"], SHORT)
    said = str(caught(lambda: store.wait(["q", "other"], SHORT), dist.DistStoreError))
    assert "nobody set 'other'" in said
    store.queue_pop("q")
    assert not store.check(["q"])
    assert "nobody set 'q'" in str(caught(lambda: store.wait(["q"], SHORT), dist.DistStoreError))


def test_keys_are_counted_as_they_come_and_go(store: dist.Store) -> None:
    for key in ("a", "b", "c"):
        store.add(key, 1)
    store.set("b", "2")
    assert store.num_keys() == 3
    store.delete_key("a")
    store.delete_key("c")
    assert store.num_keys() == 1
    store.set("d", "3")
    assert (store.num_keys(), store.get("b"), store.get("d")) == (2, b"2", b"3")


def test_torch_s_own_test_of_stores_in_python(line: KvLine) -> None:
    dist._test_python_store(fresh(line))


def test_a_clone_is_the_same_store(store: dist.Store) -> None:
    other = store.clone()
    assert isinstance(other, dist.Store)
    store.set("k", "v")
    assert other.get("k") == b"v"


def test_a_store_goes_on_after_a_wait_in_vain(line: KvLine) -> None:
    store = fresh(line)
    store.set_timeout(SHORT)
    caught(lambda: store.get("k"), dist.DistStoreError)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_signal_does_not_end_a_wait(line: KvLine) -> None:
    store, waits = fresh(line), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:

        def wait() -> None:
            waits.set()
            store.wait(["k"])

        def interrupt() -> None:
            waits.wait(WAIT_S)
            (waiting,) = (one for one in threading.enumerate() if one.name == "waiting")
            for _ in range(3):
                signal.pthread_kill(waiting.ident, signal.SIGUSR1)
            store.clone().set("k", "v")

        both(wait, interrupt, name="waiting")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_makes_no_sense_is_refused_with_the_fix(line: KvLine) -> None:
    with pytest.raises(BadRequestError, match=r"prefix of a KVStore is empty.?\ngive"):
        KVStore("", line=line)
    with pytest.raises(BadRequestError, match=r"no time to wait.?\ngive seconds"):
        KVStore("p", 0, line=line)
    store = fresh(line)
    store.set("k", "text")
    with pytest.raises(dist.DistStoreError):
        store.add("k", 1)
    with pytest.raises(BadRequestError, match="not an address"):
        KvLine.to("ftp://x", token="t")


# -- several processes, as threads with clients of their own -----------------------------------------


def test_a_wait_ends_when_another_sets_the_key(store: dist.Store) -> None:
    both(lambda: store.wait(["k"], timedelta(seconds=WAIT_S)), lambda: store.set("k", "v"))
    both(lambda: store.get("other"), lambda: store.set("other", "v"))


def test_of_many_that_change_a_key_none_is_lost(line: KvLine) -> None:
    store = fresh(line)
    other = store.clone()

    def change(mine: KVStore, letter: str) -> None:
        for _ in range(10):
            mine.append("text", letter)
            mine.add("n", 1)
            mine.queue_push("q", letter)

    both(lambda: change(store, "a"), lambda: change(other, "b"))
    text = store.get("text").decode()
    assert sorted(text) == ["a"] * 10 + ["b"] * 10
    assert store.get("n") == b"20"
    taken: list[bytes] = []
    both(
        lambda: taken.extend(store.queue_pop("q") for _ in range(10)),
        lambda: taken.extend(other.queue_pop("q") for _ in range(10)),
    )
    assert sorted(taken) == [b"a"] * 10 + [b"b"] * 10 and store.queue_len("q") == 0


def test_many_clients_see_what_one_has_set(line: KvLine) -> None:
    store = fresh(line)
    store.set("key", "value")
    for number in range(5):
        client = store.clone()
        assert client.get("key") == b"value"
        client.set(f"new {number}", "1")
        assert client.compare_set(f"new {number}", "1", "2") == b"2"
    assert [store.get(f"new {number}") for number in range(5)] == [b"2"] * 5


def test_torch_s_barrier_is_passed_once_all_have_come(line: KvLine) -> None:
    store = fresh(line)
    store.barrier("alone", 1, SHORT)
    both(lambda: store.barrier("two", 2), lambda: store.clone().barrier("two", 2))


def test_torchelastic_s_helpers_work_on_it(store: dist.Store) -> None:
    said: dict[int, list[bytes]] = {}

    def rank(number: int) -> None:
        said[number] = synchronize(store, f"data {number}".encode(), number, 2, "x", WAIT_S)
        barrier(store, 2, "done", WAIT_S)

    both(lambda: rank(0), lambda: rank(1))
    assert said == {number: [b"data 0", b"data 1"] for number in (0, 1)}


# -- process groups --------------------------------------------------------------------------------

GROUP = """
    import os, sys
    import torch, torch.distributed as dist
    import stoker
    from stoker.train import KVStore
    torch.set_num_threads(1)
    rank = int(os.environ["WHO"])
    if os.environ["JOINS"]:
        stoker.init(log_to_driver=False)
    namespace = "gloo"
    store = KVStore("group", 60, namespace=namespace)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    value = torch.full((3,), float(rank + 1))
    dist.all_reduce(value)
    inner = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    assert inner._underlying_non_prefix_store is store
    pair = dist.new_group([0, 1])
    dist.barrier(group=pair)
    print("sum", value.tolist(), flush=True)
    sys.stdin.read()
    dist.destroy_process_group()
"""


def test_a_process_group_forms_through_it_with_and_without_a_runtime(cluster: LocalCluster) -> None:
    net = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with (
        driver(cluster, GROUP, WHO="0", JOINS="", **net) as first,
        driver(cluster, GROUP, WHO="1", JOINS="1", **net) as second,
    ):
        assert line_of(first, "sum") == line_of(second, "sum") == "[3.0, 3.0, 3.0]"


def test_in_a_driver_it_is_in_the_job_s_namespace(cluster: LocalCluster) -> None:
    stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
    try:
        store = KVStore("mine", WAIT_S)
        store.set("k", "v")
        assert stoker.kv.get("mine/k/k") == b"v"
        store.clear()
        assert stoker.kv.keys("mine/") == []
    finally:
        stoker.shutdown()
