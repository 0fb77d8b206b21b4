"""URIs of code: those that are taken, and what is said of others."""

from __future__ import annotations

import pytest

from stoker.runtime.options.fetching.uris import CodeUri, is_uri, parse

HASH = "ab" * 32


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("https://h/a.zip", CodeUri("https", "https://h/a.zip", "/a.zip")),
        (
            f"https://h/a.tar.gz?sig=1#sha256={HASH}",
            CodeUri("https", "https://h/a.tar.gz?sig=1", "/a.tar.gz", sha256=HASH),
        ),
        ("s3://bucket/a.whl", CodeUri("s3", "s3://bucket/a.whl", "/a.whl")),
        ("git+https://h/a/b", CodeUri("git+https", "https://h/a/b", "/a/b")),
        ("git+https://h/a/b@v1", CodeUri("git+https", "https://h/a/b", "/a/b", "v1")),
        (
            "git+ssh://git@h/a/b@feature/x",
            CodeUri("git+ssh", "ssh://git@h/a/b", "/a/b", "feature/x"),
        ),
        ("GIT+file:///a@0", CodeUri("git+file", "file:///a", "/a", "0")),
    ],
)
def test_the_parts(text: str, parts: CodeUri) -> None:
    assert is_uri(text)
    assert parse(text) == parts


def test_paths_hashes_and_folders_are_no_uris() -> None:
    assert not any(is_uri(one) for one in (".", "/a/b", "C:\\a", HASH, "a:b", None, 3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h/a.zip", "https://, for anybody"),
        (f"http://h/a.zip#sha256={HASH}", "https://, for anybody"),
        ("https://h/a.exe", r"ends in one of \.zip"),
        ("https://h/a.zip#sha256=1", "#sha256= and 64 digits"),
        ("https://h/a.zip#md5=1", "#sha256= and 64 digits"),
        ("https://me:secret@h/a.zip", "without a password"),
        ("git+https://token@h/a", "without a password"),
        ("git+https://h/a#sha256=1", "@ and a commit"),
        ("git+https://h/a@--upload-pack=x", "a commit, tag or branch"),
        ("git+https://h/a@a..b", "a commit, tag or branch"),
        ("git+http://h/a", r"one of https://, git\+https://"),
        ("git+ext://sh -c x", "a URI such as"),
        ("zip://a.py::s3://b/c.zip", "one of https://"),
        ("https://h/a b.zip", "a URI such as"),
        ("https://h/a\n.zip", "a URI such as"),
        ("https://[h/a.zip", "a URI such as"),
        (f"https://h/{'a' * 5000}.zip", "a URI such as"),
    ],
)
def test_others_are_refused_with_what_was_expected(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse(text)


def test_what_is_shown_has_no_signature() -> None:
    assert parse("https://h/a.zip?sig=secret").shown == "https://h/a.zip"
