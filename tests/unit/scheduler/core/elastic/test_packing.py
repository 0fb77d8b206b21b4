"""Places: whatever fits in sum fits, and who keeps its count stays, unless a larger job needs the node."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, Snapshot, check, replicas_of
from stoker_scheduler.core.elastic.packing import counts_of, counts_with, pack, usable


def test_whatever_fits_in_sum_fits_in_place(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        size = random.choice((1, 2, 3, 4, 6, 8))
        nodes = {f"node-{index}": size for index in range(random.randint(1, 8))}
        present: dict[str, Allocation] = {}
        for _ in range(6):
            left, counts, number = size * len(nodes), {}, 0
            while left and random.random() < 0.95:
                choices = [count for count in counts_of(nodes, size) if count <= left]
                count = random.choice(choices)
                counts[f"job_{number}"] = count
                left -= count
                number += 1
            jobs = {name: ElasticJob(name, 0.0, present.get(name, ())) for name in counts}
            answer = pack(nodes, jobs, counts, size)
            check(Snapshot(nodes, tuple(jobs.values())), answer)
            assert {name: replicas_of(one) for name, one in answer.items()} == counts
            present = answer


def test_who_keeps_its_count_stays() -> None:
    nodes = {f"node-{index}": 4 for index in range(3)}
    present: dict[str, Allocation] = {
        "a": (("node-0", 2),),
        "b": (("node-1", 4), ("node-2", 4)),
        "c": (("node-0", 1),),
    }
    jobs = {name: ElasticJob(name, 0.0, one) for name, one in present.items()}
    answer = pack(nodes, jobs, {"a": 2, "b": 8, "c": 1}, 4)
    assert answer == present


def test_one_that_grows_keeps_the_nodes_it_has() -> None:
    nodes = {f"node-{index}": 4 for index in range(4)}
    jobs = {"a": ElasticJob("a", 0.0, (("node-2", 4),)), "b": ElasticJob("b", 0.0)}
    answer = pack(nodes, jobs, {"a": 8, "b": 4}, 4)
    assert "node-2" in dict(answer["a"])


def test_a_whole_node_is_emptied_by_the_fewest() -> None:
    nodes = {"node-0": 4, "node-1": 4}
    jobs = {
        "one": ElasticJob("one", 0.0, (("node-0", 1),)),
        "two": ElasticJob("two", 0.0, (("node-1", 2),)),
        "new": ElasticJob("new", 0.0),
    }
    answer = pack(nodes, jobs, {"one": 1, "two": 2, "new": 4}, 4)
    assert answer["two"] == (("node-1", 2),)
    assert answer["one"] == (("node-1", 1),)
    assert answer["new"] == (("node-0", 4),)


def test_a_job_on_a_node_that_is_gone_moves() -> None:
    jobs = {"a": ElasticJob("a", 0.0, (("lost", 4),))}
    assert pack({"node-0": 4}, jobs, {"a": 4}, 4) == {"a": (("node-0", 4),)}


def test_where_others_leave_parts_of_nodes_a_job_gets_the_next_smaller_count() -> None:
    jobs = {name: ElasticJob(name, float(i)) for i, name in enumerate(("a", "b", "c"))}
    nodes = {"node-0": 3, "node-1": 3, "node-2": 4}
    answer = pack(nodes, jobs, {"a": 4, "b": 4, "c": 2}, 4)
    assert sorted(map(replicas_of, answer.values())) == [2, 2, 4]
    check(Snapshot(nodes, tuple(jobs.values()), size=4), answer)
    at_least = {name: ElasticJob(name, 0.0, min_replicas=4) for name in ("a", "b")}
    assert pack(nodes, at_least, {"a": 4, "b": 4}, 4) == {"b": (("node-2", 4),)}


def test_uneven_nodes_are_never_given_away_twice(seed: int) -> None:
    random = Random(seed)
    for _ in range(300):
        size = random.choice((2, 4, 8))
        nodes = {f"node-{i}": random.randint(0, size + 1) for i in range(random.randint(1, 8))}
        choices = counts_of(nodes, size)
        if not choices:
            continue
        counts = {f"job_{i}": random.choice(choices) for i in range(random.randint(1, 8))}
        jobs = {name: ElasticJob(name, 0.0) for name in counts}
        answer = pack(nodes, jobs, counts, size)
        check(Snapshot(nodes, tuple(jobs.values()), size=size), answer)
        assert answer, "whatever is a count fits on the empty nodes"
        again = {name: ElasticJob(name, 0.0, answer.get(name, ())) for name in counts}
        kept = {name: replicas_of(one) for name, one in answer.items()}
        assert pack(nodes, again, kept, size) == answer, "who keeps its count stays"


def test_a_job_whose_limits_have_no_count_gets_its_least(seed: int) -> None:
    random = Random(seed)
    for _ in range(300):
        size = random.choice((2, 3, 4, 8))
        nodes = {f"node-{i}": random.randint(1, size) for i in range(random.randint(1, 6))}
        nodes["whole"] = size
        jobs = {}
        for index in range(random.randint(1, 5)):
            least = random.randint(1, 2 * size)
            most = least + random.choice((0, 0, 1, 8))
            jobs[f"job_{index}"] = ElasticJob(
                f"job_{index}", 0.0, min_replicas=least, max_replicas=most
            )
        counts, regular = counts_with(nodes, size, jobs.values()), counts_of(nodes, size)
        chosen = {}
        for name, job in jobs.items():
            can = [n for n, ok in zip(counts, usable(job, counts, regular), strict=True) if ok]
            if can:
                chosen[name] = random.choice(can)
                alone = pack(nodes, {name: job}, {name: chosen[name]}, size)
                assert replicas_of(alone[name]) == chosen[name], "the empty nodes have room"
        answer = pack(nodes, jobs, chosen, size)
        check(Snapshot(nodes, tuple(jobs.values()), size=size), answer)
        spanning = [node for one in answer.values() if len(one) > 1 for node, _ in one]
        assert len(set(spanning)) == len(spanning), "two jobs that span nodes share one"
        again = {name: replace(job, allocation=answer.get(name, ())) for name, job in jobs.items()}
        kept = {name: replicas_of(one) for name, one in answer.items()}
        assert pack(nodes, again, kept, size) == answer, "who keeps its count stays"


def test_only_a_job_that_has_no_other_count_gets_an_odd_one() -> None:
    nodes = {"node-0": 4, "node-1": 4}
    rigid = ElasticJob("a", 0.0, min_replicas=3, max_replicas=3)
    across = ElasticJob("b", 0.0, min_replicas=6, max_replicas=7)
    free = ElasticJob("c", 0.0, max_replicas=7)
    counts, regular = counts_with(nodes, 4, (rigid, across, free)), counts_of(nodes, 4)
    assert counts == (1, 2, 3, 4, 6, 8)
    assert regular == (1, 2, 4, 8)
    assert usable(rigid, counts, regular) == [one == 3 for one in counts]
    assert usable(across, counts, regular) == [one == 6 for one in counts]
    assert usable(free, counts, regular) == [one in (1, 2, 4) for one in counts]
    assert counts_with({"node-0": 2}, 4, (rigid,)) == (1, 2), "no node has room for it"
    assert pack(nodes, {"b": across}, {"b": 6}, 4) == {"b": (("node-0", 4), ("node-1", 2))}
