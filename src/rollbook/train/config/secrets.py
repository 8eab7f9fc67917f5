"""Secrets of a configuration: refused as text, and taken from environment variables, `${NAME}`, where they are used.

Invariant: a `Config` holds no secret, so that it can be shown, written and logged. What can hold one is a URL, a header
and an option that is named like one; nowhere else is `${NAME}` more than text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from rollbook.core.addresses import is_secret_name, url_secrets
from rollbook.train.config.kinds import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
Leaf = Callable[[str, str, bool], str]
"""(path, text, whether its name is a secret's) -> the text to have in its place."""


def check_secrets(values: Mapping[str, Any]) -> None:
    """Refuse secrets that are written out.

    Args:
        values: A configuration as plain values.

    Raises:
        ConfigError: A URL, a header or an option holds one. The message names the key and does not quote the value.

    >>> check_secrets({"engine": {"url": "https://ana:${WORD}@host", "options": {"headers": {"X-Run": "7"}}}})
    >>> check_secrets({"engine": {"options": {"headers": {"Authorization": "Bearer abc"}}}})
    Traceback (most recent call last):
        ...
    rollbook.train.config.kinds.ConfigError: engine.options.headers.Authorization: got a secret as text, which
    config.yaml and --show-config would show, expected an environment variable: "${NAME}"
    """
    _mapped(values, "", _checked)


def expanded(value: Any, path: str) -> Any:
    """Replace `${NAME}` in the URLs, headers and secret options of a value by environment variables.

    Args:
        value: A value of a configuration.
        path: The path of its key.

    Raises:
        ConfigError: A variable is not set.

    >>> os.environ["WORD"] = "a/b"
    >>> expanded({"url": "https://ana:${WORD}@host", "headers": {"X-Api-Key": "${WORD}"}, "text": "${WORD}"}, "options")
    {'url': 'https://ana:a%2Fb@host', 'headers': {'X-Api-Key': 'a/b'}, 'text': '${WORD}'}
    """
    return _mapped(value, path, _expanded)


def _mapped(value: Any, path: str, leaf: Leaf, headers: bool = False, secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _mapped(
                each,
                f"{path}.{name}" if path else str(name),
                leaf,
                name == "headers" or headers,
                secret or is_secret_name(str(name), strict=headers),
            )
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(item, f"{path}.{i}", leaf, headers, secret) for i, item in enumerate(value)]
    if isinstance(value, str) and value:
        return leaf(path, value, secret)
    return value


def _checked(path: str, text: str, secret: bool) -> str:
    try:
        secrets = [text] if secret else list(url_secrets(text).values())
    except ImportError:
        secrets = []  # without psycopg no book in PostgreSQL is opened
    except ValueError as error:
        raise ConfigError(path, str(error).removeprefix("url: ")) from None
    if all(_VARIABLE.search(part) for part in secrets):
        return text
    raise ConfigError(
        path,
        "got a secret as text, which config.yaml and --show-config would show, expected an environment variable: "
        + ('"${NAME}"' if secret else 'as in "https://user:${NAME}@host"'),
    )


def _expanded(path: str, text: str, secret: bool) -> str:
    is_url = "://" in text

    def variable(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        if found is None:
            raise ConfigError(path, f"got {match[0]}, and {match[1]} is not set in the environment")
        return quote(found, safe="") if is_url else found

    return _VARIABLE.sub(variable, text) if secret or is_url else text
