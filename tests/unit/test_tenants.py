"""API keys: what a file may say, who is behind a key, and rates, on a clock of the test's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ropeway.errors import ConfigError, RateLimitedError
from ropeway.server.config import ServerConfig
from ropeway.server.tenants import Bucket, Caller, KeyRing, KeyTerms, load_key_file, terms_of_flags

TOML = """
["sk-one"]
tenant = "lab"
weight = 2.0
requests_per_min = 60
["sk-two"]
tenant = "lab"
weight = 2.0
tokens_per_min = 1000
"""
SECRET = "sk-never-shown"


def test_a_file_is_json_or_toml(tmp_path: Path) -> None:
    toml, plain = tmp_path / "keys.toml", tmp_path / "keys.json"
    toml.write_text(TOML)
    terms = {
        "sk-one": KeyTerms(tenant="lab", weight=2.0, requests_per_min=60),
        "sk-two": KeyTerms(tenant="lab", weight=2.0, tokens_per_min=1000),
    }
    assert load_key_file(toml) == terms
    plain.write_text(json.dumps({"sk-one": {"tenant": "lab", "weight": 2, "requests_per_min": 60}}))
    assert load_key_file(plain) == {"sk-one": terms["sk-one"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "at least one key"),
        ("{}", "at least one key"),
        (f'{{"{SECRET}": {{"tenant": "a"}}, "{SECRET}": {{"tenant": "b"}}}}', "every key once"),
        (f'{{"{SECRET}": "a"}}', "entry 1 .* must be an object"),
        (f'{{"{SECRET}": {{}}}}', "names no tenant"),
        (f'{{"{SECRET} spaced": {{"tenant": "a"}}}}', "without spaces"),
        (f'{{"{SECRET}": {{"tenant": ""}}}}', "tenant must be a name"),
        (f'{{"{SECRET}": {{"tenant": "a", "weight": 0}}}}', "weight must be a number above 0"),
        (f'{{"{SECRET}": {{"tenant": "a", "weight": true}}}}', "weight must be a number above 0"),
        (f'{{"{SECRET}": {{"tenant": "a", "requests_per_min": 1.5}}}}', "requests_per_min must be a whole number"),
        (f'{{"{SECRET}": {{"tenant": "a", "tokens_per_min": 0}}}}', "tokens_per_min must be a whole number"),
        (f'{{"{SECRET}": {{"tenant": "a", "rate": 1}}}}', "unknown field 'rate'"),
        (f'{{"{SECRET}": {{"tenant": "a"}}, "x": {{"tenant": "a", "weight": 2}}}}', "tenant 'a' two weights"),
    ],
)
def test_a_bad_file_is_told_without_its_keys(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_key_file(path)
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_key_file(tmp_path / "none.json")
    path = tmp_path / "keys.toml"
    path.write_text(f'["{SECRET}"\ntenant = "a"')
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        load_key_file(path)
    assert SECRET not in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_key_file(path)


def test_keys_of_flags_are_tenants_of_their_own() -> None:
    named = {key: terms.tenant for key, terms in terms_of_flags([SECRET, "b"]).items()}
    assert named == {key: terms.tenant for key, terms in terms_of_flags(["b", "new", SECRET]).items() if key != "new"}
    assert len(set(named.values())) == 2
    assert named["b"] == "key-64bf23db6dfb"  # of every version: batches on disk are their owner's by this name
    assert all(re.fullmatch("key-[0-9a-f]{12}", name) for name in named.values())
    for keys in (["a", "a"], [""], ["a b"], ["é"], ["x" * 513]):
        with pytest.raises(ConfigError, match="API key"):
            terms_of_flags(keys)


def test_who_is_behind_a_key() -> None:
    ring = KeyRing({"one": KeyTerms(tenant="a"), "two": KeyTerms(tenant="b")}, "boss")
    one = ring.caller(b"one")
    assert one is not None and one.tenant == "a" and not one.is_admin
    assert ring.caller(b"On") is ring.caller(b"one ") is ring.caller(b"\xff") is ring.caller(b"") is None
    boss = ring.caller(b"boss")
    assert boss is not None and boss.is_admin and boss.may_see("a")
    assert one.may_see("a") and not one.may_see("b")
    ring.replace({"one": KeyTerms(tenant="c", weight=3)})
    assert ring.caller(b"one") is one and one.tenant == "c" and one.weight == 3.0
    assert ring.caller(b"two") is None and ring.caller(b"boss") is boss
    assert not KeyRing({}, "boss").anyone.is_admin and KeyRing({}).anyone.is_admin


def test_secrets_are_not_in_what_is_printed() -> None:
    config = ServerConfig(api_keys={SECRET: KeyTerms(tenant="a")}, admin_api_key=SECRET)
    ring = KeyRing(config.api_keys, config.admin_api_key)
    assert SECRET not in repr(config) and SECRET not in repr(vars(ring))


def test_a_bucket_fills_at_its_rate_and_no_higher() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == 1.0 and bucket.wait_s(1, 1.0) == 0.0
    bucket.take(100, 1.0)  # into debt
    assert bucket.wait_s(1, 1.0) == 100.0
    bucket.take(-1000, 1.0)
    assert bucket.wait_s(60, 1.0) == 0.0 and bucket.wait_s(1000, 10_000.0) == 0.0
    bucket.take(61, 10_000.0)
    assert bucket.wait_s(1, 10_000.0) == 2.0


def test_rates_of_a_key() -> None:
    now_s = 0.0
    caller = Caller(KeyTerms(tenant="a", requests_per_min=2, tokens_per_min=600), clock=lambda: now_s)
    caller.admit()
    caller.charge(700)
    with pytest.raises(RateLimitedError, match="600 tokens per minute") as caught:
        caller.admit()
    assert caught.value.retry_after_s == pytest.approx(10.1)
    now_s = 11.0
    caller.admit()  # the refused one did not count
    with pytest.raises(RateLimitedError, match="2 requests per minute") as caught:
        caller.admit()
    assert caught.value.retry_after_s == pytest.approx(19.0)
    caller.renew(KeyTerms(tenant="a", requests_per_min=2))  # what was used counts on
    with pytest.raises(RateLimitedError):
        caller.admit()
    caller.renew(KeyTerms(tenant="a"))
    for _ in range(100):
        caller.admit()
