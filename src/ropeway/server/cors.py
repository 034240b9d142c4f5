"""Which pages of other origins a browser may let use the server. Knows no routes and no keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ropeway.errors import ConfigError

# What scripts of an allowed origin may read of an answer beside its body.
EXPOSED_HEADERS = ("x-request-id", "retry-after")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsRules:
    """What browsers are told. "*" stands for all; credentials are cookies, not API keys, which are headers.

    Raises ConfigError for what no browser would make sense of.
    """

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allows_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.origins:
            parts = urlsplit(origin)
            is_origin = parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"
            if origin not in ("*", "null") and not is_origin:
                raise ConfigError(
                    f"--allowed-origins holds {origin[:100]!r}; an origin is SCHEME://HOST[:PORT] without a path, or *"
                )
        if self.allows_credentials and "*" in self.origins:
            raise ConfigError("--allow-credentials would let every page act for its visitor: name --allowed-origins")

    def wrap(self, app: Any) -> Any:
        """The application behind these rules; preflights are answered here, so they need no key."""
        from starlette.middleware.cors import CORSMiddleware

        return CORSMiddleware(
            app,
            allow_origins=self.origins,
            allow_methods=self.methods,
            allow_headers=self.headers,
            allow_credentials=self.allows_credentials,
            expose_headers=EXPOSED_HEADERS,
        )


def listed(flag: str, values: Sequence[str]) -> tuple[str, ...]:
    """The texts of a flag that may be repeated, each value one text or a JSON list of texts. Raises ConfigError."""
    texts: list[str] = []
    for value in values:
        if not value.lstrip().startswith("["):
            texts.append(value)
            continue
        try:
            items = json.loads(value)
        except ValueError:
            items = None
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f'{flag} {value[:100]} is no JSON list of texts; write \'["one", "two"]\', or repeat it')
        texts += items
    return tuple(dict.fromkeys(texts))
