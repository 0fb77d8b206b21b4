"""Settings come from variables with types, sources and clear failures."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_wire.errors import BadRequestError, UnknownOptionError
from stoker_wire.process.setting_values import COMPOSE
from stoker_wire.settings import Settings


def test_values_are_read_with_their_types() -> None:
    settings = Settings.from_env(
        {
            "STOKER_NUM_CPUS": "4",
            "STOKER_RESOURCES": '{"disk": 2}',
            "STOKER_LOG_TO_DRIVER": "no",
            "STOKER_ALLOWED_HOSTS": "a.example, b.example",
            "STOKER_HEARTBEAT_S": "0.25",
            "STOKER_LOG_LEVEL": "DEBUG",
            "STOKER_REDIS_URL": "",
            "HOME": "/nowhere",
        }
    )
    assert settings.num_cpus == 4.0
    assert settings.resources == {"disk": 2.0}
    assert settings.log_to_driver is False
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert settings.heartbeat_s == 0.25
    assert settings.log_level == "debug"
    assert settings.redis_url == ""


def test_arguments_win_over_variables_and_none_means_not_given() -> None:
    settings = Settings.from_env({"STOKER_PORT": "1", "STOKER_HOST": "h"}, port=2, host=None)
    assert (settings.port, settings.host) == (2, "h")
    assert settings.sources == {"port": "argument", "host": "STOKER_HOST"}


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("STOKER_PORT", "http", "int"),
        ("STOKER_PORT", "70000", "<= 65535"),
        ("STOKER_HEARTBEAT_S", "0", "> 0"),
        ("STOKER_RESOURCES", "gpu=1", "is not JSON"),
        ("STOKER_LABELS", '{"a": 1}', "str"),
        ("STOKER_LOG_LEVEL", "loud", "one of debug, info"),
        ("STOKER_TASK_HISTORY", "maybe", "bool"),
    ],
)
def test_a_bad_value_names_the_variable_and_the_fix(variable: str, text: str, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        Settings.from_env({variable: text})
    assert caught.value.field == variable
    assert variable in str(caught.value)
    assert says in str(caught.value)


def test_an_unknown_variable_is_warned_of_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = Settings.from_env({"STOKER_GCS_ULR": "x", "STOKER_TEST_SEED": "1"})
    assert settings.unknown == ("STOKER_GCS_ULR",)
    assert "did you mean STOKER_GCS_URL?" in caplog.text
    assert "SEED" not in caplog.text


def test_what_the_compose_file_reads_is_known_to_every_command() -> None:
    text = (Path(__file__).parents[3] / "docker-compose.yml").read_text()
    read = set(re.findall(r"\$\{(STOKER_\w+)", text))
    assert read >= COMPOSE
    assert Settings.from_env(dict.fromkeys(read, "7")).unknown == ()


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'num_gpus'"):
        Settings.from_env({}, num_gpu=1)


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("DATABASE_URL", "postgresql+asyncpg://me:pw@db:5432/x", "postgresql+asyncpg://***@db:5432/x"),
        ("DATABASE_URL", "postgresql://me:p/w@1?#@db/x", "postgresql://***@db/x"),
        ("DATABASE_URL", "postgresql://db/x?user=me&password=pw&a=1", "postgresql://db/x?user=me&password=***&a=1"),
        ("REDIS_URL", "redis://:pw@redis/0", "redis://***@redis/0"),
        ("ADDRESS", "http://a:p,w@h1:7600,http://b:pw@h2", "http://***@h1:7600,http://***@h2"),
        ("GCS_URL", "http://h1:7600,http://h2:7600", "http://h1:7600,http://h2:7600"),
        ("ALLOWED_HOSTS", "http://me:pw@h", '["http://***@h"]'),
    ],
)  # fmt: skip
def test_passwords_in_urls_are_masked(variable: str, value: str, shown: str) -> None:
    settings = Settings.from_env({f"STOKER_{variable}": value})
    rows = {row.variable: row.value for row in settings.describe()}
    assert rows[f"STOKER_{variable}"] == shown
    assert "pw" not in "".join(rows.values())


def test_describe_has_a_meaning_for_every_setting_and_hides_the_token() -> None:
    rows = {row.name: row for row in Settings.from_env({"STOKER_TOKEN": "secret"}).describe()}
    assert set(rows) == set(Settings.__struct_fields__) - {"sources", "unknown"}
    assert all(
        row.meaning and row.variable == "STOKER_" + row.name.upper() for row in rows.values()
    )
    assert (rows["token"].value, rows["token"].source) == ("(set)", "STOKER_TOKEN")
    assert rows["host"].source == "default"
    assert "secret" not in str(rows)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("settings", {"aiohttp", "difflib", "asyncio"}),
        ("http.auth", {"aiohttp", "difflib", "asyncio"}),
        ("http.client", {"aiohttp.web", "prometheus_client"}),
    ],
)
def test_importing_stays_light(module: str, unwanted: set[str]) -> None:
    code = f"import sys, stoker_wire.{module}; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not unwanted & set(loaded.stdout.split())
