"""The two slots of commits: which are kept, and that nothing writes to one that is read."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
import torch

from stoker.exceptions import NotFoundError
from stoker_train.elastic.state.commits import Commits
from stoker_train.elastic.state.trees import FlatState, flatten


def flat_of(value: float, size: int = 5) -> FlatState:
    return flatten({"a": torch.full((size,), float(value)), "n": torch.tensor(float(value))})


def add(commits: Commits, step: int, flat: FlatState) -> None:
    commits.add(step, flat, [False] * len(flat.tensors))


def test_the_last_two_are_kept_and_are_copies() -> None:
    commits = Commits()
    live = flat_of(0)
    for step in range(5):
        live.tensors[0].fill_(step)
        add(commits, step, live)
    assert commits.steps == (3, 4)
    assert commits.get(3).tensors[0].tolist() == [3.0] * 5
    with pytest.raises(NotFoundError, match="no commit of step 1 is kept"):
        commits.get(1)


def test_buffers_are_used_again() -> None:
    commits = Commits()
    places = set()
    for step in range(8):
        add(commits, step, flat_of(step))
        places.add(commits.get(step).tensors[0].data_ptr())
    assert len(places) == 2
    # What grows keeps what fits, as when an optimizer makes its state.
    before = commits.get(6).tensors[0].data_ptr()
    add(commits, 8, flatten({"a": torch.ones(5), "more": torch.ones(7), "n": torch.tensor(1.0)}))
    assert commits.get(8).tensors[0].data_ptr() == before


def test_the_same_step_again_replaces_itself() -> None:
    commits = Commits()
    for step in (1, 2, 2):
        add(commits, step, flat_of(step))
    assert commits.steps == (1, 2)
    with commits.hold(2) as held:
        add(commits, 2, flat_of(9))
        assert held.tensors[0].tolist() == [2.0] * 5
        assert commits.steps == (2,)
        assert commits.get(2).tensors[0].tolist() == [9.0] * 5


def test_commits_behind_which_the_job_went_back_are_void() -> None:
    commits = Commits()
    for step in (10, 20):
        add(commits, step, flat_of(step))
    commits.forget(above=10)
    assert commits.steps == (10,)
    add(commits, 12, flat_of(12))
    assert commits.steps == (10, 12)


def test_a_commit_that_is_held_is_not_written_to(seed: int) -> None:
    draw = random.Random(seed)
    commits, step = Commits(), 0
    for _ in range(30):
        with ExitStack() as stack:
            held = []
            for _ in range(draw.randint(1, 6)):
                step += 1
                add(commits, step, flat_of(step))
                assert commits.steps[-1] == step
                if draw.random() < 0.5:
                    one = draw.choice(commits.steps)
                    held.append((one, stack.enter_context(commits.hold(one))))
                for number, commit in held:
                    assert commit.tensors[0].tolist() == [float(number)] * 5
        assert len(commits.steps) >= min(2, step)
    for _ in range(4):
        step += 1
        add(commits, step, flat_of(step))
    assert commits.steps == (step - 1, step)


def test_what_others_read_takes_the_place_of_the_older_commit() -> None:
    commits = Commits()
    for step in (1, 2):
        add(commits, step, flat_of(step))
    read = commits.scratch(flat_of(7))
    assert read.tensors[0].tolist() == [7.0] * 5
    assert commits.steps == (2,)
