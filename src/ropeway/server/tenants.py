"""Who may call, on which terms and how much: API keys, the file that lists them, their rates. Knows no HTTP.

A key is kept as its HMAC under a secret of this process, so that looking one up takes no time that tells of its text,
and nothing that is logged or dumped holds one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ropeway.core.params import MAX_NAME_CHARACTERS, MAX_WEIGHT
from ropeway.errors import ConfigError, RateLimitedError

MAX_KEY_CHARACTERS = 512
MAX_PER_MIN = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTerms:
    """What a key is good for. tenant: whose requests they are; weight: its share beside 1 of others.

    requests_per_min, tokens_per_min: of this key, on average, with bursts of a minute's worth; None is no limit. Tokens
    are those of prompts and of answers.

    Raises ConfigError for a value out of range.
    """

    tenant: str
    weight: float = 1.0
    requests_per_min: int | None = None
    tokens_per_min: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or not 0 < len(self.tenant) <= MAX_NAME_CHARACTERS:
            raise ConfigError(f"tenant must be a name of 1 to {MAX_NAME_CHARACTERS} characters, not {self.tenant!r}")
        is_number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not is_number or not 0 < self.weight <= MAX_WEIGHT:
            raise ConfigError(f"weight must be a number above 0 and at most {MAX_WEIGHT:g}, not {self.weight!r}")
        for name in ("requests_per_min", "tokens_per_min"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= MAX_PER_MIN):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def terms_of_flags(keys: Iterable[str]) -> dict[str, KeyTerms]:
    """Terms of keys given without any: each is a tenant of its own, whose name follows from the key alone, so that what
    is kept on disk for it stays its own when keys come, go or change places. Raises ConfigError.
    """
    named: dict[str, KeyTerms] = {}
    for number, key in enumerate(keys, start=1):
        where = f"API key {number}"
        check_key(where, key)
        if key in named:
            raise ConfigError(f"{where} was given before")
        named[key] = KeyTerms(tenant=f"key-{_fingerprint(key)}")
    return named


def _fingerprint(key: str) -> str:
    """12 hexadecimal digits that name a key without telling it; not of the key alone: tables of such hashes exist."""
    return hashlib.sha256(b"ropeway tenant of key " + key.encode()).hexdigest()[:12]


def check_key(where: str, key: str) -> None:
    """Raises ConfigError, without the key, for one that no header can carry."""
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} must be 1 to {MAX_KEY_CHARACTERS} ASCII characters without spaces")


def load_key_file(path: Path) -> dict[str, KeyTerms]:
    """The keys of a file: an object (JSON) or tables (TOML, by the suffix .toml) of key -> the fields of `KeyTerms`.

    Raises ConfigError, which names entries by their place and tenant, never by their key.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"the key file {path} cannot be read: {reason}") from None
    try:
        entries = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        # Only where, not what: a message may quote the text.
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" (line {line})"
        kind = "TOML" if path.suffix == ".toml" else "JSON with every key once"
        raise ConfigError(f"the key file {path} is not valid {kind}{where}") from None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"the key file {path} must map at least one key to its terms")
    keys = {key: _terms(path, number, key, entry) for number, (key, entry) in enumerate(entries.items(), start=1)}
    weights: dict[str, float] = {}
    for terms in keys.values():
        if weights.setdefault(terms.tenant, terms.weight) != terms.weight:
            raise ConfigError(f"the key file {path} gives tenant {terms.tenant!r} two weights; give all its keys one")
    return keys


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key comes twice")
    return unique


def _terms(path: Path, number: int, key: str, entry: Any) -> KeyTerms:
    where = f"entry {number} of the key file {path}"
    check_key(f"the key of {where}", key)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with at least a tenant")
    known = [field.name for field in fields(KeyTerms)]
    unknown = sorted(entry.keys() - set(known))
    if unknown:
        raise ConfigError(f"{where} has the unknown field {unknown[0][:40]!r}; known: {', '.join(known)}")
    if "tenant" not in entry:
        raise ConfigError(f"{where} names no tenant")
    try:
        return KeyTerms(**entry)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


class Bucket:
    """per_min a minute on average. It holds a minute's worth at most, is full at first, and may go into debt."""

    def __init__(self, per_min: float, now_s: float) -> None:
        self.per_min = per_min
        self._level = per_min
        self._as_of_s = now_s

    def wait_s(self, num: float, now_s: float) -> float:
        """Seconds until it holds num, or is full if that is less; 0 where it does now."""
        self._refill(now_s)
        return max(0.0, min(num, self.per_min) - self._level) * 60 / self.per_min

    def take(self, num: float, now_s: float) -> None:
        self._refill(now_s)
        self._level = min(self._level - num, self.per_min)

    def _refill(self, now_s: float) -> None:
        self._level = min(self.per_min, self._level + (now_s - self._as_of_s) * self.per_min / 60)
        self._as_of_s = now_s


class Caller:
    """Whoever sends a request: on whose account it goes, and what is left of the rates. is_admin: may operate the
    server, and see the requests of every tenant.
    """

    def __init__(
        self, terms: KeyTerms | None, *, is_admin: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_admin = is_admin
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self.renew(terms)

    def renew(self, terms: KeyTerms | None) -> None:
        """Other terms for the same key: what was used of a rate that stays counts on."""
        self.tenant = "" if terms is None else terms.tenant
        self.weight = 1.0 if terms is None else float(terms.weight)
        rates = {} if terms is None else {"requests": terms.requests_per_min, "tokens": terms.tokens_per_min}
        known, now_s = self._buckets, self._clock()
        self._buckets = {}
        for what, per_min in rates.items():
            if per_min is not None:
                same = what in known and known[what].per_min == per_min
                self._buckets[what] = known[what] if same else Bucket(per_min, now_s)

    def admit(self) -> None:
        """One more request. Raises RateLimitedError where that exceeds a rate; it then counts for nothing."""
        now_s = self._clock()
        for what, bucket in self._buckets.items():
            wait_s = bucket.wait_s(1, now_s)
            if wait_s > 0:
                raise RateLimitedError(
                    f"this API key may use {bucket.per_min:g} {what} per minute; try again in {wait_s:.1f} s",
                    retry_after_s=wait_s,
                )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1, now_s)

    def charge(self, num_tokens: int) -> None:
        """Tokens of its prompts and answers; a negative number gives back. They may exceed what is left: then it has
        to wait for longer.
        """
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_tokens, self._clock())

    def may_see(self, tenant: str) -> bool:
        """Whether a request of that tenant exists, as far as this caller is told."""
        return self.is_admin or tenant == self.tenant


class KeyRing:
    """The keys in use, and the callers behind them.

    keys: none asks nobody for one. admin_key: operates the server; it opens every path.
    """

    def __init__(self, keys: Mapping[str, KeyTerms], admin_key: str | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self._admin_digest = None if admin_key is None else self._digest(admin_key.encode())
        self._admin = Caller(None, is_admin=True)
        self._anyone = Caller(None, is_admin=admin_key is None)
        self.replace(keys)

    @property
    def has_keys(self) -> bool:
        return bool(self._callers)

    @property
    def anyone(self) -> Caller:
        """A caller of whom no key is asked. It may operate the server where that needs no key either."""
        return self._anyone

    def replace(self, keys: Mapping[str, KeyTerms]) -> None:
        """Other keys. Those that stay keep their callers, so requests under way and used rates count on."""
        callers: dict[bytes, Caller] = {}
        for key, terms in keys.items():
            digest = self._digest(key.encode())
            caller = callers[digest] = self._callers.get(digest) or Caller(terms)
            caller.renew(terms)
        self._callers = callers

    def weight_of(self, tenant: str) -> float:
        """What its keys say; 1 where it has none now."""
        return next((each.weight for each in self._callers.values() if each.tenant == tenant), 1.0)

    def caller(self, key: bytes) -> Caller | None:
        """Who has this key; None where nobody does."""
        digest = self._digest(key)
        if self._admin_digest is not None and hmac.compare_digest(digest, self._admin_digest):
            return self._admin
        return self._callers.get(digest)

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")
