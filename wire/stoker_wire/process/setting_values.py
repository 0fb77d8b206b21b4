"""Values of settings: texts of the environment as typed values, and values as texts that tell no secret."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Meta

from stoker_wire.errors import BadRequestError


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
