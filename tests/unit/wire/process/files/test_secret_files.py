"""stoker_wire.process.files.secret_files: passwords that a service reads from files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stoker_wire.errors import StartError
from stoker_wire.http import auth
from stoker_wire.process.files import secret_files
from stoker_wire.process.files.secret_files import read_secret, with_password

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with a password of every difficult sign."""
    path = tmp_path / "password"
    path.write_text("a:b@c/d?e#f %é\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("url", "becomes"),
    [
        (
            "postgresql+asyncpg://stoker@postgres:5432/stoker?ssl=require",
            "postgresql+asyncpg://stoker:a%3Ab%40c%2Fd%3Fe%23f%20%25%C3%A9@postgres:5432/stoker?ssl=require",
        ),
        ("redis://[::1]:6379/0", "redis://:a%3Ab%40c%2Fd%3Fe%23f%20%25%C3%A9@[::1]:6379/0"),
    ],
)
def test_a_url_gets_the_password_of_the_file(secret: Path, url: str, becomes: str) -> None:
    assert with_password(url, str(secret)) == becomes


def test_a_url_stays_as_it_is_without_a_file() -> None:
    assert with_password("redis://:x@h/0", "") == "redis://:x@h/0"
    assert with_password("", "/nowhere") == ""


def test_two_passwords_are_an_error_that_shows_neither(secret: Path) -> None:
    with pytest.raises(StartError, match="take it out of the URL") as caught:
        with_password("redis://:hunter2@h/0", str(secret))
    assert "hunter2" not in str(caught.value)


def test_an_absent_an_empty_and_an_open_file_say_what_to_do(secret: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="write it there"):
        read_secret(tmp_path / "absent")
    secret.chmod(0o644)
    with pytest.raises(StartError, match=r"(?s)mode 0644.*chmod 600"):
        read_secret(secret)
    secret.write_text("\n")
    secret.chmod(0o600)
    with pytest.raises(StartError, match="is empty"):
        read_secret(secret)


def test_a_password_that_another_user_chose_is_refused(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.chmod(0o600)
    if (mine := os.geteuid()) == 0:
        os.chown(secret, 1001, -1)
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1000)
    with pytest.raises(StartError, match=f"(?s)another user.*chown {mine + 1000} {secret}"):
        read_secret(secret)


def test_a_mounted_secret_may_have_any_mode_and_a_link_to_elsewhere_may_not(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "run-secrets"
    (mounts / "..data").mkdir(parents=True)
    (mounts / "..data/token").write_text("word")
    (mounts / "token").symlink_to("..data/token")  # as Kubernetes does
    (mounts / "outside").symlink_to(secret)
    secret.chmod(0o644)
    monkeypatch.setattr(secret_files, "MOUNTS", mounts)
    assert read_secret(mounts / "token") == auth.load_token(mounts / "token") == "word"
    for load in (read_secret, auth.load_token):
        with pytest.raises(StartError, match="chmod 600"):
            load(mounts / "outside")
