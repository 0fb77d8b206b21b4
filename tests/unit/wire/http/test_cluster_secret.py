"""The secret follows its file, and nothing that could not be started with takes its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import StartError
from stoker_wire.http.auth import Credential, load_secrets, load_token, write_private
from stoker_wire.http.cluster_secret import ClusterSecret, find_secret, secret_id
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD, NEW = "the old secret of some length", "the new secret of some length"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    write_private(file, f"{OLD}\n")
    return file


def test_a_file_has_the_secret_that_signs_and_one_more(path: Path) -> None:
    write_private(path, f"{OLD}\n\n# next: of tomorrow\n{NEW}\n")
    assert load_secrets(path) == (OLD, NEW)
    assert load_token(path) == OLD
    write_private(path, f"{OLD}\n{OLD}\n")
    assert load_secrets(path) == (OLD,)
    write_private(path, f"#{OLD}\n")
    assert load_secrets(path) == (f"#{OLD}",), "a secret may begin with anything"
    write_private(path, f"{OLD}\n{NEW}\na third\n")
    with pytest.raises(StartError, match=r"holds 3 secrets\.?\nleave 2 lines"):
        load_secrets(path)


def test_a_change_is_taken_over_and_told_once(path: Path) -> None:
    secret, changes = ClusterSecret.of_file(path), []
    secret.on_change(lambda: changes.append(secret.values))
    secret.look()
    assert (changes, secret.ids) == ([], (secret_id(OLD),))
    write_private(path, f"{NEW}\n{OLD}\n")
    secret.look()
    secret.look()
    assert changes == [(NEW, OLD)]
    assert (secret.id, secret.ids) == (secret_id(NEW), (secret_id(NEW), secret_id(OLD)))
    write_private(path, f"{NEW}\n{OLD}\n\n")
    secret.look()
    assert len(changes) == 1, "the file changed, and its secrets did not"


@pytest.mark.parametrize("host", ["", "10.0.0.1"])
def test_a_file_that_cannot_be_used_leaves_the_secret_as_it_was_and_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    secret = ClusterSecret.of_file(path, host)
    broken: list[Callable[[], object]] = [
        lambda: path.write_text(f"{OLD}\n{NEW}\na third\n"),
        lambda: path.write_text(""),
        path.unlink,
    ]
    if host:
        broken.insert(0, lambda: path.write_text(f"{OLD}\nshort\n"))
    for number, break_it in enumerate(broken):
        break_it()
        if path.exists():
            os.utime(path, ns=(0, number))  # the clock of a file system may be slow
        caplog.clear()
        secret.look()
        secret.look()
        assert secret.values == (OLD,)
        assert [one.levelname for one in caplog.records] == ["WARNING"]
    write_private(path, f"{NEW}\n")
    secret.look()
    assert secret.values == (NEW,)


def test_a_secret_that_was_given_as_text_stays(path: Path) -> None:
    given = find_secret(Settings(token=OLD, token_file=str(path)))
    write_private(path, f"{NEW}\n")
    given.look()
    assert (given.path, given.values) == (None, (OLD,))
    assert find_secret(Settings(token_file=str(path))).values == (NEW,)


def test_a_credential_follows_its_file(path: Path) -> None:
    credential = Credential("given")
    credential.follow(str(path))
    assert (credential.token, credential.header) == (OLD, f"Bearer {OLD}")
    write_private(path, f"{NEW}\n")
    assert credential.token == OLD, "it is looked at once a second"
    credential._look_at_s = 0.0
    assert credential.header == f"Bearer {NEW}"
    path.unlink()
    credential._look_at_s = 0.0
    assert credential.token == NEW


def test_a_file_is_replaced_whole_and_is_its_owners_alone(path: Path) -> None:
    before = path.stat().st_ino
    write_private(path, f"{NEW}\n")
    assert path.stat().st_ino != before
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["token"]
