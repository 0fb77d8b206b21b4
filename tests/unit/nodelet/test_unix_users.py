"""The Unix user of a job: who may be one on this node, and what says why not."""

from __future__ import annotations

import os
import pwd

import pytest

from stoker_nodelet import unix_users
from stoker_nodelet.unix_users import UnixUser, UnixUsers, check_default, find_user
from stoker_wire.errors import RuntimeEnvSetupError, StartError

ALICE = pwd.struct_passwd(("alice", "x", 4242, 4343, "", "/home/alice", "/bin/sh"))


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> dict[str, pwd.struct_passwd]:
    """A user database of our own, and a nodelet that is root."""
    known = {
        "alice": ALICE,
        "toor": pwd.struct_passwd(("toor", "x", 0, 0, "", "/root", "/bin/sh")),
    }
    monkeypatch.setattr(unix_users.pwd, "getpwnam", known.__getitem__)
    monkeypatch.setattr(unix_users.os, "geteuid", lambda: 0)
    monkeypatch.setattr(unix_users.os, "getgrouplist", lambda name, gid: [gid, 7])
    return known


def refusal(name: str) -> str:
    with pytest.raises(RuntimeEnvSetupError) as caught:
        find_user(name, "n_1")
    return str(caught.value)


def test_an_account_has_its_groups(accounts: dict[str, pwd.struct_passwd]) -> None:
    user = find_user("alice", "n_1")
    assert user == UnixUser("alice", 4242, 4343, (4343, 7), "/home/alice", "/bin/sh")


def test_nobody_runs_as_root_for_want_of_an_account(
    accounts: dict[str, pwd.struct_passwd],
) -> None:
    assert "there is no Unix user 'bob' on node n_1" in refusal("bob")
    assert "'toor' is root on node n_1" in refusal("toor")


def test_a_nodelet_of_another_user_can_be_nobody_else(
    accounts: dict[str, pwd.struct_passwd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_users.os, "geteuid", lambda: 99)
    assert "cannot run anything as 'alice'" in refusal("alice")
    assert "start it as root or as alice" in refusal("alice")
    monkeypatch.setattr(unix_users.os, "geteuid", lambda: ALICE.pw_uid)
    assert find_user("alice", "n_1") is None, "it is that user, and shares all with its workers"


async def test_a_node_may_have_a_user_for_work_that_names_none(
    accounts: dict[str, pwd.struct_passwd],
) -> None:
    assert await UnixUsers("n_1").find("") is None
    found = await UnixUsers("n_1", default="alice").find("")
    assert found is not None and found.uid == ALICE.pw_uid
    with pytest.raises(RuntimeEnvSetupError, match="'bob'"):
        await UnixUsers("n_1", default="alice").find("bob")
    check_default("alice", "n_1")
    check_default("", "n_1")
    with pytest.raises(StartError, match="STOKER_RUN_AS='bob'"):
        check_default("bob", "n_1")


def test_the_environment_of_a_user_has_nothing_of_the_clusters_secrets(
    accounts: dict[str, pwd.struct_passwd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "the secret")
    monkeypatch.setenv("STOKER_DATABASE_URL", "postgresql://u:p@h/d")
    monkeypatch.setenv("HOME", "/root")
    user = find_user("alice", "n_1")
    assert user is not None
    environ = user.environ()
    assert not {"STOKER_TOKEN", "STOKER_DATABASE_URL"} & environ.keys()
    assert (environ["HOME"], environ["USER"], environ["LOGNAME"]) == (
        "/home/alice",
        "alice",
        "alice",
    )
    assert os.environ["HOME"] == "/root"
