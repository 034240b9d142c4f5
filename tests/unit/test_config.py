"""Intent becomes facts: the KV pool, the effective context, and every way to ask for too much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ropeway.config import (
    MAX_DEFAULT_KV_BYTES,
    WORKING_MEMORY_BYTES,
    EngineConfig,
    ModelFacts,
    format_bytes,
    parse_bytes,
    resolve,
)
from ropeway.errors import ConfigError, OutOfMemoryError

GIB = 1 << 30
MODEL = ModelFacts(name="m", context_length=8192, kv_bytes_per_token=23040, weights_bytes=100 << 20)
BLOCK_BYTES = 16 * MODEL.kv_bytes_per_token


def free_for_pool(pool_bytes: int) -> int:
    return int(MODEL.weights_bytes * 1.15) + WORKING_MEMORY_BYTES + pool_bytes


def test_default_pool_is_capped() -> None:
    facts = resolve(EngineConfig(), MODEL, 64 * GIB)
    assert facts.num_kv_blocks == MAX_DEFAULT_KV_BYTES // BLOCK_BYTES
    assert facts.kv_cache_bytes <= MAX_DEFAULT_KV_BYTES
    assert (facts.max_model_len, facts.warnings) == (8192, ())


def test_default_pool_is_half_of_what_is_free() -> None:
    facts = resolve(EngineConfig(), MODEL, free_for_pool(GIB))
    assert facts.num_kv_blocks == GIB // 2 // BLOCK_BYTES


def test_default_pool_is_no_more_than_could_be_used() -> None:
    facts = resolve(EngineConfig(max_num_seqs=3, max_model_len=100), MODEL, 64 * GIB)
    assert facts.num_kv_blocks == 3 * 7


def test_exact_pool() -> None:
    facts = resolve(EngineConfig(num_kv_blocks=600, block_size=16), MODEL, 64 * GIB)
    assert (facts.num_kv_blocks, facts.kv_cache_bytes) == (600, 600 * BLOCK_BYTES)


def test_pool_in_bytes() -> None:
    assert resolve(EngineConfig(kv_cache_memory="512M"), MODEL, 64 * GIB).num_kv_blocks == (512 << 20) // BLOCK_BYTES


def test_small_pool_warns_and_shrinks_the_context() -> None:
    facts = resolve(EngineConfig(num_kv_blocks=10), MODEL, 64 * GIB)
    assert facts.max_model_len == 160
    assert len(facts.warnings) == 1
    assert "160" in facts.warnings[0] and "8192" in facts.warnings[0] and "kv_cache_memory" in facts.warnings[0]


@pytest.mark.parametrize("options", [{"num_kv_blocks": 3000}, {"kv_cache_memory": "1100M"}])
def test_more_than_is_free_is_refused_with_the_numbers(options: dict[str, object]) -> None:
    with pytest.raises(OutOfMemoryError, match=r"1\.0 GiB are free .* at most 2912 blocks"):
        resolve(EngineConfig.from_options(options), MODEL, free_for_pool(GIB))


def test_the_prefix_cache_is_on_but_for_the_baselines() -> None:
    def has_cache(**options: object) -> bool:
        return resolve(EngineConfig.from_options(options), MODEL, free_for_pool(GIB)).has_prefix_cache

    assert has_cache() and has_cache(enable_prefix_caching=True)
    assert not has_cache(enable_prefix_caching=False) and not has_cache(batching="static")
    with pytest.raises(ConfigError, match="without a prefix cache"):
        EngineConfig(enable_prefix_caching=True, batching="static-padded")
    with pytest.raises(ConfigError, match="must be True or False, not 'yes'"):
        EngineConfig.from_options({"enable_prefix_caching": "yes"})


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match="200.0 MiB are free"):
        resolve(EngineConfig(), MODEL, 200 << 20)


def test_context_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match="9000 is more than the 8192"):
        resolve(EngineConfig(max_model_len=9000), MODEL, 64 * GIB)


def test_pool_smaller_than_a_block() -> None:
    with pytest.raises(ConfigError, match="one block of 16 tokens takes 360.0 KiB"):
        resolve(EngineConfig(kv_cache_memory=1000), MODEL, 64 * GIB)


def test_served_names() -> None:
    assert resolve(EngineConfig(), MODEL, 64 * GIB).served_model_names == ("m",)
    assert resolve(EngineConfig(served_model_name="a"), MODEL, 64 * GIB).served_model_names == ("a",)
    assert resolve(EngineConfig(served_model_name=["a", "b/c"]), MODEL, 64 * GIB).served_model_names == ("a", "b/c")


def test_latency_targets_turn_into_seconds() -> None:
    facts = resolve(EngineConfig(slo_ttft_ms=1500, slo_tpot_ms=40.0, objective="latency"), MODEL, 64 * GIB)
    assert (facts.slo_ttft_s, facts.slo_tpot_s, facts.objective) == (1.5, 0.04, "latency")
    assert resolve(EngineConfig(), MODEL, 64 * GIB).slo_tpot_s is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"frobnicate": 5}, "known options"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"block_size": "16"}, "block_size"),
        ({"num_kv_blocks": -1}, "num_kv_blocks"),
        ({"num_kv_blocks": 5, "kv_cache_memory": "1G"}, "give one"),
        ({"kv_cache_memory": "lots"}, "512M"),
        ({"batching": "dynamic"}, "continuous"),
        ({"backend": "torch"}, "native"),
        ({"isa": ""}, "isa"),
        ({"served_model_name": ["a", ""]}, "served_model_name"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_wrong_options_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("2G", 2 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("7k", 7 << 10),
        ("123", 123),
        (9, 9),
        ("2gb", 2 * GIB),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "1 000", "12MM", "nan", 0, -5, True, None, 1.5, "9" * 40])
def test_wrong_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match="x must be a size"):
        parse_bytes("x", text)  # type: ignore[arg-type]


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (5, 2048, 3 << 20, 5 * GIB)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_facts_are_frozen() -> None:
    facts = resolve(EngineConfig(), MODEL, 64 * GIB)
    with pytest.raises(AttributeError):
        facts.block_size = 3  # type: ignore[misc]
    assert replace(facts, block_size=3).block_size == 3
