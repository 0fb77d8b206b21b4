"""Values of settings: texts of the environment as typed values, and values as texts that tell no secret.

And the variables that look like settings and are none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Meta

from stoker_wire.errors import BadRequestError
from stoker_wire.suggestions import nearest

PREFIX = "STOKER_"
DEFAULT = "default"
"""The source of a setting that nobody has set."""
PASSED_ON_PREFIXES = ("STOKER_INTERNAL_", "STOKER_TEST_")
"""Variables that processes of Stoker hand to their children, and those of the tests."""

PASSED_ON = frozenset(
    {
        "STOKER_JOB_OUTPUT_DIR",
        "STOKER_KERNELS_BACKEND",
        "STOKER_KERNELS_TUNING",
        "STOKER_NODE_ID",
        "STOKER_SESSION_DIR",
        "STOKER_WORKER_ID",
    }
)
"""Further such variables, and those that stoker_kernels reads itself (it imports nothing of Stoker)."""

COMPOSE = frozenset(
    {
        "STOKER_EXTRAS",
        "STOKER_NODE_MEMORY",
        "STOKER_POSTGRES_IMAGE",
        "STOKER_PUBLISH_PORT",
        "STOKER_PYTHON_IMAGE",
        "STOKER_REDIS_IMAGE",
    }
)
"""Variables that only docker-compose.yml reads, from ``.env``, which people also load in their shells."""


_log = logging.getLogger(__name__)


class SettingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``stoker config``; ``source`` is ``default``, ``argument`` or the variable."""

    name: str
    variable: str
    value: str
    source: str
    meaning: str


_USERINFO = re.compile(r"://(?:(?!://).)*@", re.DOTALL)
"""To the last @ before another URL: what is not escaped in a password belongs to it all the same."""
_SECRET_PARAMETER = re.compile(r"([?&][^=&#]*(?:pass|secret|token)[^=&#]*=)[^&#]*", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a value without the user names and passwords of the URLs in it."""
    return _SECRET_PARAMETER.sub(r"\1***", _USERINFO.sub("://***@", text))


def meaning_of(hint: Any) -> str:
    return next(m.description or "" for m in hint.__metadata__ if isinstance(m, Meta))


def parsed(variable: str, text: str, hint: Any) -> Any:
    """Return a variable's text as the setting's type: JSON for objects, commas for lists."""
    bare = get_args(hint)[0]
    value: Any = text
    if get_origin(bare) is dict:
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise BadRequestError(
                f"{variable}={text!r} is not JSON\n{error}\n"
                f"""write it like {variable}='{{"name": 1}}'""",
                field=variable,
            ) from None
    elif get_origin(bare) is tuple:
        value = [part.strip() for part in text.split(",") if part.strip()]
    elif bare is bool:
        value = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text.lower(), text)
    return converted(variable, value, hint)


def converted(name: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequestError(
            f"{name}={value!r} does not fit\n{_fix_of(str(error))} (meaning: {meaning_of(hint)})",
            field=name,
        ) from None


def _fix_of(message: str) -> str:
    return "set it to a value that fits: " + message[:1].lower() + message[1:]


_WORDS = {
    "gpu_isolation": ("auto", "required", "off"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "log_format": ("auto", "json", "text"),
    "tls": ("off", "server", "mutual"),
}


def check_words(values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Lower settings that are one of a few words; BadRequestError names these for any other."""
    for name, words in _WORDS.items():
        if name in values:
            values[name] = values[name].lower()
            if values[name] not in words:
                source = sources[name] if sources[name] != "argument" else name
                raise BadRequestError(
                    f"{source}={values[name]!r}: set it to one of {', '.join(words)}", field=source
                )


def unknown_variables(environ: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the variables that look like a setting and name none, and warn of them."""
    known = {PREFIX + name.upper() for name in names}
    unknown = []
    for variable in sorted(environ):
        if (
            not variable.startswith(PREFIX)
            or variable in known
            or variable in PASSED_ON
            or variable in COMPOSE
            or variable.startswith(PASSED_ON_PREFIXES)
        ):
            continue
        near = nearest(variable, known)
        hint = f"; did you mean {near}?" if near else ""
        _log.warning("%s names no setting and is ignored%s", variable, hint)
        unknown.append(variable)
    return tuple(unknown)
