"""Addresses of books, servers and stores: parsing, and redaction of secrets.

Invariant: every message, page and report shows an address through `redacted`. It works on parsed parts (libpq's parser
for PostgreSQL, urllib's otherwise); an address that cannot be parsed is hidden completely.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from rollbook.core.files import check_regular

HIDDEN = "***"
POSTGRES = ("postgresql://", "postgres://")
RAY = "ray://"
"""Prefix of the address of a book that a Ray actor serves."""
_SCRAM_KEYS = ("scram_client_key", "scram_server_key")
_SINGLE_SLASH_URL = re.compile(r"\s*[a-z][a-z0-9+.-]+:/(?!/).*[:@?]", re.IGNORECASE | re.DOTALL)
_ENCODING_HINT = "special characters in a user name or password are percent-encoded (%40 for @, %2F for /)"
_SECRET_WORDS = frozenset({"apikey", "authorization", "cookie", "credentials", "passphrase", "passwd", "password"})
_SECRET_KEYS = ("api_key", "access_key", "private_key", "secret_key")
_SECRET_ENDINGS = (*_SECRET_KEYS, "_secret", "access_token", "api_token", "auth_token", "hf_token")
_STRICT_WORDS = frozenset({"auth", "secret", "session", "sig", "signature", "token"})


def is_secret_name(name: str, strict: bool = False) -> bool:
    """Return whether an option, a header or a parameter of this name holds a secret.

    Args:
        name: The name.
        strict: Whether names such as `token` and `key` count, as in headers and URLs.

    Returns:
        Whether the value must be hidden.

    >>> [is_secret_name(name) for name in ("X-Api-Key", "api_key_env", "token")], is_secret_name("token", strict=True)
    ([True, False, False], True)
    """
    normalized = name.lower().replace("-", "_")
    words = set(normalized.split("_"))
    return (
        bool(words & _SECRET_WORDS)
        or normalized.endswith(_SECRET_ENDINGS)
        or (strict and (normalized == "key" or bool(words & _STRICT_WORDS)))
    )


_CONFIG_BOOK = re.compile(r'^book: "?([a-z]+://[^"\n]*)"?\s*(?:#.*)?$', re.MULTILINE)


def check_book_is_here(folder: str | os.PathLike[str]) -> None:
    """Raise `ValueError` if the configuration in the folder of a run has the address of a book elsewhere.

    The address is not opened: a folder is not trusted to choose the server that a password is sent to.

    Args:
        folder: The folder.

    Raises:
        ValueError: The configuration has an address.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(os.path.join(folder, "config.yaml"), "w") as file:
    ...         _ = file.write("book: postgresql://ana:word@db/runs")
    ...     check_book_is_here(folder)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: ...: the book of this run is at postgresql://ana:***@db/runs; pass this address
    """
    path = os.path.join(folder, "config.yaml")
    check_regular(path)
    try:
        with open(path, encoding="utf-8") as file:
            match = _CONFIG_BOOK.search(file.read(1 << 20))
    except (OSError, UnicodeDecodeError):
        return
    if match is not None:
        raise ValueError(f"{os.fspath(folder)}: the book of this run is at {redacted(match[1])}; pass this address")


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostgresAddress:
    """A PostgreSQL URL with the parameter `schema` of Rollbook.

    Attributes:
        base: The URL without parameters.
        query: The parameters except `schema`.
        schema: Schema of the book.
        parameters: Decoded values by libpq's names.

    >>> PostgresAddress.parse("postgresql://ana:word@db/runs?schema=demo").shown()
    'postgresql://ana:***@db/runs?schema=demo'
    """

    base: str = field(repr=False)
    query: str = field(repr=False)
    schema: str
    parameters: dict[str, str] = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse a `postgresql://` URL.

        Args:
            url: The URL.

        Returns:
            The address.

        Raises:
            ValueError: The URL is not valid.
        """
        scheme, _, rest = url.partition("://")
        # As in libpq, the user ends with the first @ before a slash.
        stop = next((i for i, character in enumerate(rest) if character in "@/"), len(rest))
        user = rest[: stop + 1] if rest[stop : stop + 1] == "@" else ""
        server, _, query = rest.removeprefix(user).partition("?")
        if "@" in server:
            raise ValueError(f"url: got '{scheme}://{HIDDEN}' with an @ after its user, expected one: {_ENCODING_HINT}")
        pairs = [pair for pair in query.split("&") if pair]
        named = [(unquote(pair.partition("=")[0]), pair) for pair in pairs]
        schema = next((unquote(pair.partition("=")[2]) for name, pair in named if name == "schema"), "rollbook")
        if not schema.isidentifier() or len(schema) > 63:
            raise ValueError(f"schema: got {schema!r}, expected a name of letters, digits and underscores")
        base = f"{scheme}://{user}{server}"
        others = "&".join(pair for name, pair in named if name == "ssl" or name in _keywords())
        parameters = _conninfo(f"{base}?{others}")
        if parameters is None:
            raise ValueError(f"url: got '{scheme}://{HIDDEN}', which cannot be parsed: {_ENCODING_HINT}")
        if not all(port.isdecimal() for port in parameters.get("port", "").split(",") if port):
            raise ValueError(f"url: got '{scheme}://{HIDDEN}' with a port that is not a number: {_ENCODING_HINT}")
        address = cls(base, others, schema, parameters)
        for name, _ in named:
            if name not in ("schema", "ssl") and name not in _keywords():
                raise ValueError(f"url: got {address.shown()!r} with {name!r}, expected parameters of libpq, or schema")
        return address

    @property
    def plain(self) -> str:
        """The URL for libpq: without `schema`, with its secrets."""
        return f"{self.base}?{self.query}" if self.query else self.base

    def with_schema(self, schema: str) -> str:
        """Return the address with another schema.

        Args:
            schema: Name of the schema.

        Returns:
            The new address.
        """
        return f"{self.base}?{self.query}{'&' if self.query else ''}schema={schema}"

    def shown(self) -> str:
        """Return the address without its secrets."""
        values = {
            name: HIDDEN if _is_hidden(name) else quote(value, safe="") for name, value in self.parameters.items()
        }
        user, password = values.pop("user", ""), values.pop("password", "")
        hosts, ports = (self.parameters.get(name, "").split(",") for name in ("host", "port"))
        values.pop("host", None), values.pop("port", None)
        ports = ports * len(hosts) if len(ports) == 1 else ports
        server = ",".join(
            _bracketed(host) + (f":{port}" if port else "") for host, port in zip(hosts, ports, strict=False)
        )
        name = values.pop("dbname", "")
        query = "&".join(f"{key}={value}" for key, value in values.items())
        query += ("&" if query else "") + f"schema={self.schema}" if self.schema != "rollbook" else ""
        login = f"{user}{f':{password}' if password else ''}@" if user or password else ""
        return f"postgresql://{login}{server}/{name}" + (f"?{query}" if query else "")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else quote(host, safe="")


@functools.cache
def _keywords() -> dict[str, bool]:
    """Return the parameters of libpq, and whether each is a secret."""
    try:
        from psycopg import pq
    except ImportError:
        raise ImportError("a book in PostgreSQL needs psycopg: install the extra 'postgres' of Rollbook") from None
    return {
        option.keyword.decode(): option.dispchar == b"*" or option.keyword.decode() in _SCRAM_KEYS
        for option in pq.Conninfo.get_defaults()
    }


def _is_hidden(name: str) -> bool:
    return _keywords().get(name, False)


def _conninfo(text: str) -> dict[str, str] | None:
    """Parse a URL or `key=value` pairs with libpq; return `None` if that fails."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return {name: str(value) for name, value in conninfo_to_dict(text).items()}
    except psycopg.ProgrammingError:  # its message would quote secrets
        return None


# --- any address ------------------------------------------------------------------------------------------------------


def redacted(address: str | os.PathLike[str]) -> str:
    """Hide the secrets of an address.

    Args:
        address: A URL, a `key=value` string of libpq, a path or another text.

    Returns:
        The address with secrets replaced; a text without secrets as it is.

    >>> redacted("postgresql://ana:word@db1,db2:5433/runs?sslpassword=x&schema=demo")
    'postgresql://ana:***@db1,db2:5433/runs?sslpassword=***&schema=demo'
    >>> redacted("https://token@host:8000/score?v=1"), redacted("host=db password='a b'"), redacted("runs/a=b")
    ('https://***@host:8000/score?v=***', 'host=db password=***', 'runs/a=b')
    >>> redacted("postgresql:/ana:word@db/runs")
    'postgresql://ana:***@db/runs'
    """
    text = os.fspath(address)
    if not isinstance(text, str):
        return HIDDEN
    if _SINGLE_SLASH_URL.match(text):  # a typo, or a URL that was converted to a path
        text = text.replace(":/", "://", 1)
    if "::" in text and "://" in text:  # fsspec's chains: simplecache::s3://key:secret@bucket
        return "::".join(map(redacted, text.split("::")))
    try:
        if text.startswith(POSTGRES):
            parsed = PostgresAddress.parse(text)
            return parsed.shown() if any(map(_is_hidden, parsed.parameters)) else text
        if "://" in text:
            return _redacted_url(text)
        return _redacted_pairs(text)
    except (ImportError, ValueError):
        return f"{text.partition('://')[0]}://{HIDDEN}" if "://" in text else HIDDEN


def _redacted_url(text: str) -> str:
    parts = urlsplit(text)
    _ = parts.port  # raises if it is not a number, which happens if a password has a slash
    _, at, host = parts.netloc.rpartition("@")
    if not at and "@" in text:  # after the host: a user name or password has a slash
        return f"{parts.scheme}://{HIDDEN}@{text.rpartition('@')[2]}"
    query = "&".join(f"{quote(name)}={HIDDEN}" for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    if (not at and not parts.query) or not parts.scheme:
        return text
    return urlunsplit((parts.scheme, f"{HIDDEN}@{host}" if at else host, parts.path, query, ""))


def is_conninfo(text: str) -> bool:
    """Return whether a text is a `key=value` string of libpq, such as `host=db dbname=runs`.

    Args:
        text: The text.

    Returns:
        Whether it has that form.

    >>> is_conninfo("host=db dbname=runs"), is_conninfo("runs/a=b")
    (True, False)
    """
    names = [entry.partition("=")[0] for entry in text.split() if "=" in entry]
    return bool({"host", "hostaddr", "dbname", "password", "service"} & set(names))


def _redacted_pairs(text: str) -> str:
    if not is_conninfo(text):
        return text
    parameters = _conninfo(text)
    if parameters is None:
        return HIDDEN
    parameters = dict(sorted(parameters.items()))
    return " ".join(f"{name}={HIDDEN if _is_hidden(name) else value}" for name, value in parameters.items())


def url_secrets(text: str) -> dict[str, str]:
    """Find the secrets in a URL or a `key=value` string of libpq.

    Args:
        text: The text.

    Returns:
        The secrets by their names; empty for other texts.

    >>> url_secrets("https://ana:word@host/?token=x&v=1"), url_secrets("postgresql://ana@db/runs"), url_secrets("a b://c@d")
    ({'user info': 'ana:word', 'token': 'x'}, {}, {})
    """
    if is_conninfo(text):
        return {name: value for name, value in (_conninfo(text) or {}).items() if _is_hidden(name)}
    scheme = text.partition("://")[0]
    if "://" not in text or not scheme.replace("+", "").replace(":", "").isalnum():
        return {}
    if text.startswith(POSTGRES):
        parameters = PostgresAddress.parse(text).parameters
        return {name: value for name, value in parameters.items() if _is_hidden(name)}
    parts = urlsplit(text)
    user = parts.netloc.rpartition("@")[0]
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    return ({"user info": user} if user else {}) | {
        name: secret for name, secret in pairs if is_secret_name(name, True)
    }


def without_user(url: str) -> tuple[str, tuple[str, str] | None]:
    """Split the user part off an http(s) URL.

    Args:
        url: The URL.

    Returns:
        The URL without it, and the user name and password or `None`.

    >>> without_user("http://ana:a%40b@host/score")
    ('http://host/score', ('ana', 'a@b'))
    """
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password)) if at else None


__all__ = [
    "HIDDEN",
    "POSTGRES",
    "RAY",
    "PostgresAddress",
    "check_book_is_here",
    "is_conninfo",
    "is_secret_name",
    "redacted",
    "url_secrets",
    "without_user",
]
