"""docker-compose.yml: what each container may and may not, as a security team reads the file.

That it works so on a real engine is tests/engine/test_compose.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((REPO / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
STORES = {"postgres", "redis"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_limits_and_nothing_to_write_or_to_gain(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"] <= 4096
    assert not service.get("privileged")
    assert set(service.get("cap_add", [])) <= (
        {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"} if name == "postgres" else set()
    )


@pytest.mark.parametrize("name", SERVICES)
def test_no_secret_is_in_an_environment_or_a_command_line(name: str) -> None:
    service = SERVICES[name]
    for variable, value in service.get("environment", {}).items():
        if re.search("TOKEN|PASSWORD|SECRET", variable):
            assert variable.endswith("_FILE")
            assert value.removeprefix("/run/secrets/") in service["secrets"]
        assert not re.search(r"://[^/@]*:[^/@]*@", value), f"{variable} has a password"
    assert "$" not in str(service.get("command", "")).replace("$$(cat /run/secrets/", "")


def test_each_secret_is_a_file_of_the_private_folder_and_goes_to_those_who_need_it() -> None:
    files = [secret["file"] for secret in COMPOSE["secrets"].values()]
    assert len(set(files)) == 3
    assert all(file.startswith(".secrets/") for file in files)
    holders = {
        secret: {name for name, service in SERVICES.items() if secret in service.get("secrets", ())}
        for secret in COMPOSE["secrets"]
    }
    assert holders["token"] == {"gcs", "gcs2", "scheduler", "nodelet"}
    assert holders["postgres-password"] == {"postgres", "migrate", "gcs", "gcs2"}
    assert holders["redis-password"] == {"redis", "gcs", "gcs2"}
    ignored = (REPO / ".gitignore").read_text().splitlines()
    assert ".secrets/" in ignored
    assert "!.secrets" not in (REPO / ".dockerignore").read_text()


def test_where_user_code_runs_no_database_is_reached() -> None:
    assert COMPOSE["networks"]["data"] == {"internal": True}
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert all(networks[store] == {"data"} for store in STORES)
    assert networks["nodelet"] == networks["scheduler"] == networks["gateway"] == {"cluster"}
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"gateway"}
    assert all(port.startswith("127.0.0.1:") for port in published["gateway"])


def test_every_image_can_be_pinned_to_a_digest() -> None:
    variables = re.findall(r"\$\{(STOKER_\w+_IMAGE):-([^}]+)\}", str(COMPOSE))
    assert sorted(tag for _, tag in variables) == ["postgres:15", "python:3.11-slim", "redis:7"]
    own = {service["image"] for service in SERVICES.values() if "_IMAGE" not in service["image"]}
    assert own == {"stoker:local"}
    assert not re.search(r"^FROM (?!\$\{PYTHON_IMAGE\})", (REPO / "Dockerfile").read_text(), re.M)
