"""Makes pages that are read off the code, for ``make docs``.

Settings, events and errors are kept in the repository, and ``tests/unit/test_docs.py`` fails when they
are not current. The command line and the HTTP API of each service, in ``docs/reference/``, are long and
change with every line of help, so they are only made for the site and not kept.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scripts.operations import SERVICES, documents
from stoker.cli import root
from stoker_wire.errors import error_classes
from stoker_wire.http.error_pages.page import PAGES, page_of, summary_of
from stoker_wire.messages import events
from stoker_wire.settings import Settings, default_session_root

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 100
_MADE = "<!-- Made by `make docs` from {}: change the text there. -->"
_ABOUT_SERVICES = {
    "gcs": "The control store: what people and programs ask for. Its address is that of the cluster.",
    "gateway": "What a [gateway](../gateway.md) adds; all else that it is asked it hands to a gcs.",
    "scheduler": "Who runs where. Drivers and the gcs ask it.",
    "nodelet": "One machine: its workers, objects and logs.",
}


def kept_pages() -> dict[Path, str]:
    """Return the pages that the repository has, by path."""
    made = {
        "settings.md": settings_page(),
        "events.md": events_page(),
        "errors/README.md": errors_page(),
        **{f"errors/{code}.md": error_page(code) for code in PAGES},
    }
    return {DOCS / name: text for name, text in made.items()}


def site_pages() -> dict[Path, str]:
    """Return the pages that only the site has, by path."""
    made = {
        "cli.md": cli_page(),
        **{f"http-{name}.md": text for name, text in http_pages()},
    }
    return {DOCS / "reference" / name: text for name, text in made.items()}


def settings_page() -> str:
    """Return the page of settings: as ``stoker config`` shows them."""
    rows = "".join(
        f"| `{one.variable}` | {_code(one.value)} | {_cell(one.meaning)} |\n"
        for one in Settings().describe()
    ).replace(default_session_root(), "/tmp/stoker-UID")
    return (
        f"# Settings\n\n{_MADE.format('wire/stoker_wire/settings.py')}\n\n"
        "Each is a variable of the environment, which a process reads when it starts. `stoker config` shows "
        "the values that hold here and where they come from. Times are seconds, sizes are bytes.\n\n"
        f"| variable | default | meaning |\n|---|---|---|\n{rows}"
    )


def events_page() -> str:
    """Return the page of the event catalogue, by entity."""
    meanings = _meanings_of_events()
    entities: dict[str, list[events.EventKind]] = defaultdict(list)
    for kind in events.EventKind:
        entities[kind.partition(".")[0]].append(kind)
    head = (
        f"# Events\n\n{_MADE.format('wire/stoker_wire/messages/events.py')}\n\n"
        "The gcs writes an event for every change, in the transaction of the change. `GET /v1/events` lists "
        "and follows them (`stoker list events`), `kind=job.` takes those of one entity. The payload is the "
        "record of the entity after the change; `/openapi.json` of the gcs has its members.\n"
    )
    parts = [head]
    for entity, kinds in entities.items():
        rows = "".join(
            f"| `{kind}` | `{events.PAYLOADS[kind].__name__}` | {_cell(meanings.get(kind.name, ''))} |\n"
            for kind in kinds
        )
        parts.append(f"## {entity}\n\n| kind | payload | meaning |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def _meanings_of_events() -> dict[str, str]:
    """Return the text below each member of ``EventKind``."""
    (body,) = ast.parse(inspect.getsource(events.EventKind)).body
    assert isinstance(body, ast.ClassDef)
    found, name = {}, ""
    for node in body.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                found[name] = markdown(text)
    return found


def error_page(code: str) -> str:
    """Return the page of an error code."""
    made = _MADE.format("wire/stoker_wire/errors.py and wire/stoker_wire/http/error_pages/")
    title, _, rest = page_of(code).partition("\n")
    return f"{title}\n\n{made}\n{rest}"


def errors_page() -> str:
    """Return the list of all codes."""
    rows = "".join(
        f"| [`{code}`]({code}.md) | `{cls.__name__}` | {cls.status} | {_cell(summary_of(code))} |\n"
        for code, cls in error_classes().items()
    )
    return (
        f"# Errors\n\n{_MADE.format('wire/stoker_wire/errors.py')}\n\n"
        "Every error has a code that is stable across versions: in problem documents (RFC 9457) as `code`, "
        "in Python as `error.code`. `stoker docs CODE` prints its page in a terminal, without a network.\n\n"
        f"| code | exception | HTTP | meaning |\n|---|---|---|---|\n{rows}"
    )


def cli_page() -> str:
    """Return the help of every command."""
    made = _MADE.format("the commands in sdk/stoker/cli/")
    parts = [f"# Command line\n\n{made}\n\nWhat `--help` of each command says.\n"]
    for words, command in _commands(root, ("stoker",)):
        context = click.Context(command, info_name=" ".join(words), terminal_width=WIDTH)
        help_ = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"## {' '.join(words)}\n\n```text\n{help_}\n```\n")
    return "\n".join(parts)


def _commands(
    command: click.Command, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            if not below.hidden:
                yield from _commands(below, (*words, name))


def http_pages() -> Iterator[tuple[str, str]]:
    """Yield each service with the page of its API."""
    made = documents()
    for name in SERVICES:
        roles = {
            (getattr(route, "method", "GET"), _plain(route.path)): sorted(route.roles)
            for route in SERVICES[name]
        }
        head = (
            f"# HTTP API of the {name}\n\n{_MADE.format('the route tables')}\n\n{_ABOUT_SERVICES[name]} "
            "Its own OpenAPI document has the same for programs. An operation that people may call has roles "
            "of people; the others are called by Stoker's processes ([roles](../roles.md)).\n"
        )
        yield name, "\n".join([head, *_tags(made[name], roles), _types(made[name])])


def _plain(path: str) -> str:
    """Return a path without the patterns of its parts, as OpenAPI has it."""
    return "/".join(
        f"{{{part[1:-1].partition(':')[0]}}}" if part.startswith("{") else part
        for part in path.split("/")
    )


def _tags(made: dict[str, Any], roles: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    for tag in made["tags"]:
        operations = "\n".join(
            _operation(method.upper(), path, one, roles.get((method.upper(), path), []))
            for path, ways in made["paths"].items()
            for method, one in ways.items()
            if one["tags"] == [tag["name"]]
        )
        yield f"## {tag['name']}\n\n{tag['description']}\n\n{operations}"


def _operation(method: str, path: str, one: dict[str, Any], roles: list[str]) -> str:
    query = ", ".join(f"`{p['name']}`" for p in one.get("parameters", []) if p.get("in") == "query")
    facts = {
        "operation": f"`{one['operationId']}`",
        "roles": ", ".join(roles) or "any",
        "query": query,
        "body": _contents(one.get("requestBody", {})),
        "answers": "; ".join(
            f"{status} {_contents(reply)}".strip()
            for status, reply in one["responses"].items()
            if status < "4"
        ),
    }
    lines = "".join(f"- **{name}**: {fact}\n" for name, fact in facts.items() if fact)
    return f"### `{method} {path}`\n\n{one['summary']}.\n\n{lines}"


def _contents(holder: dict[str, Any]) -> str:
    """Return the types of a body, each once: those of JSON, else the media type."""
    found = [
        _type(content["schema"]) if kind.endswith("json") and "schema" in content else f"`{kind}`"
        for kind, content in holder.get("content", {}).items()
        if kind not in ("application/problem+json", "application/msgpack")
    ]
    return " or ".join(dict.fromkeys(found))


def _types(made: dict[str, Any]) -> str:
    parts = ["## Types\n"]
    for name, schema in sorted(made["components"]["schemas"].items()):
        about = markdown(schema.get("description", ""))
        parts.append(f"### {name}\n\n{about}\n" if about else f"### {name}\n")
        if values := schema.get("enum"):
            parts.append(", ".join(f"`{value}`" for value in values) + "\n")
        if members := schema.get("properties"):
            needed = schema.get("required", [])
            rows = "".join(
                f"| `{member}` | {_cell(_type(of))} | {'yes' if member in needed else ''} |\n"
                for member, of in members.items()
            )
            parts.append(f"| member | type | required |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def _type(schema: dict[str, Any]) -> str:
    """Return a schema in a few words, with links to types of the page."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for either in ("anyOf", "oneOf"):
        if either in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[either]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return kind if isinstance(kind, str) else " or ".join(kind or ["any"])


def markdown(docstring: str) -> str:
    """Return a docstring's text as Markdown."""
    return inspect.cleandoc(docstring).replace("``", "`") if docstring else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _code(value: str) -> str:
    return f"`{_cell(value)}`" if value else ""
