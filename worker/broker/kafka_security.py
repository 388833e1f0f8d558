"""How a client proves to Kafka who it is: SASL with a name, a password or a token, and TLS. Reads no settings."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka.abc import AbstractTokenProvider

TokenSource = Callable[[], Awaitable[str]]
"""Gives a token that is valid now; asked again for every connection."""


class TokenError(OSError):
    """There is no token to connect with: the connection fails, and is tried again later."""


def token_from_file(path: Path) -> TokenSource:
    """Reads the file anew each time, so that whoever renews tokens only has to write it."""

    async def read() -> str:
        try:
            token = (await asyncio.to_thread(path.read_text, encoding="utf-8")).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"cannot read {path}: {type(error).__name__}") from None
        if not token:
            raise TokenError(f"{path} is empty")
        return token

    return read


def token_from_function(function: Callable[[], str]) -> TokenSource:
    """Calls the function in a thread, for it may ask an identity provider. What it raises is told by its kind only."""

    async def call() -> str:
        try:
            token = await asyncio.to_thread(function)
        except Exception as error:  # code of an operator: its message may hold a secret
            raise TokenError(f"the token provider failed with {type(error).__name__}") from None
        if not isinstance(token, str) or not token:
            raise TokenError("the token provider gave no text")
        return token

    return call


class _Provider(AbstractTokenProvider):  # type: ignore[misc]
    """aiokafka's interface over a `TokenSource`."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    async def token(self) -> str:
        return await self._source()


@dataclass(frozen=True, slots=True)
class KafkaSecurity:
    """`tls` is needed with SSL and SASL_SSL, `token` with OAUTHBEARER, name and password with the other mechanisms."""

    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: TokenSource | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    def client_arguments(self) -> dict[str, Any]:
        """Arguments that every aiokafka client takes."""
        return {
            "security_protocol": self.protocol,
            "sasl_mechanism": self.mechanism,
            "sasl_plain_username": self.username,
            "sasl_plain_password": self.password,
            "sasl_oauth_token_provider": None if self.token is None else _Provider(self.token),
            "ssl_context": self.tls,
        }
