"""The gemm kernels: equal bits on every instruction set, range and partition; right against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway import _native
from ropeway.model.weights import Tensor, TensorType, dequantize

ISAS = _native.supported_isas()
QUANTISED = [TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1]
TYPES = list(TensorType)
MAX_CODE, MAX_MULTIPLIER, MAX_WIDE_CODE = np.float32(127), np.float32(1 << 14), np.float32(127 * 256)


def random_rows(tensor_type: TensorType, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """The bytes of n rows of k values with every code possible and scales of both signs."""
    if tensor_type is TensorType.F32:
        return rng.standard_normal((n, k), dtype=np.float32).view(np.uint8).ravel()
    halves = rng.standard_normal((n, k)).astype(np.float16)
    if tensor_type is TensorType.F16:
        return halves.view(np.uint8).ravel()
    if tensor_type is TensorType.BF16:
        bits = halves.astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8).ravel()
    blocks = rng.integers(0, 256, (n * k // 32, tensor_type.block_bytes), dtype=np.uint8)
    num_scales = 2 if tensor_type is TensorType.Q4_1 else 1
    scales = (rng.standard_normal((len(blocks), num_scales)) * 0.1).astype(np.float16)
    blocks[:, : 2 * num_scales] = scales.view(np.uint8)
    return blocks.ravel()


def pack(tensor_type: TensorType, n: int, k: int, seed: int = 0) -> tuple[_native.PackedMatrix, np.ndarray]:
    """A packed matrix and its values."""
    data = random_rows(tensor_type, n, k, np.random.default_rng(seed))
    return _native.pack(tensor_type, [data], k), dequantize(Tensor("w", tensor_type, (n, k), data))


def product(isa: str, w: _native.PackedMatrix, x: np.ndarray) -> np.ndarray:
    out = np.full((len(x), w.n), np.nan, np.float32)
    _native.gemm(isa, w, x, out, (0, len(x)), (0, w.n))
    return out


def activations(m: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, k), dtype=np.float32)


@pytest.mark.parametrize("tensor_type", TYPES)
@pytest.mark.parametrize("split", [(37,), (5, 16, 1, 15)])
def test_packing_is_exact(tensor_type: TensorType, split: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    tensors = [random_rows(tensor_type, n, 96, rng) for n in split]
    w = _native.pack(tensor_type, tensors, 96)
    expected = dequantize(Tensor("w", tensor_type, (37, 96), np.concatenate(tensors)))
    np.testing.assert_array_equal(w.unpack(), expected)


@pytest.mark.parametrize("tensor_type", [TensorType.Q4_0, TensorType.Q4_1])
def test_packed_size_is_that_of_the_file(tensor_type: TensorType) -> None:
    w, _ = pack(tensor_type, 64, 64)
    assert w.num_bytes == 64 * 64 // 32 * tensor_type.block_bytes


def quantisable_rows(k: int = 128) -> np.ndarray:
    """Rows with zeros, halves and rows too small to count, outliers, ties, denormals and the largest floats."""
    x = activations(9, k)
    x[1, :32] = 0
    x[2, 16:48] = 1e-38
    x[3] = 0
    x[3, :32] = np.arange(32) - 16.5
    x[4, 17] = 1e4
    x[5] = 0
    x[6] *= np.float32(1e-40)
    x[7, ::2] = np.finfo(np.float32).max
    x[8] *= np.float32(1e-29)
    return x


# Fewer groups than are quantised together, a multiple of those, others, and more than one run of them.
@pytest.mark.parametrize("k", [32, 128, 576, 2144])
@pytest.mark.parametrize("isa", ISAS)
def test_quantisation_matches_its_definition(isa: str, k: int) -> None:
    x = quantisable_rows(k)
    codes, multipliers, scales, sums, wide_codes, wide_scales = _native.quantize(isa, x)
    one, zero = np.float32(1), np.float32(0)

    row_amax = np.abs(x).max(axis=1, keepdims=True)
    is_used = row_amax >= 1e-30
    per_x = np.where(is_used, MAX_MULTIPLIER / np.where(is_used, row_amax, one), zero)
    halves = x.reshape(9, k // 16, 16)
    expected_multipliers = np.ceil(np.abs(halves).max(axis=2) * per_x).clip(1, MAX_MULTIPLIER)
    codes_per_x = MAX_CODE * per_x / expected_multipliers
    expected = np.rint(halves * codes_per_x[:, :, None]).astype(np.int8)
    np.testing.assert_array_equal(codes, expected.reshape(9, k))
    np.testing.assert_array_equal(multipliers, expected_multipliers)
    np.testing.assert_array_equal(scales, np.where(is_used, row_amax / (MAX_CODE * MAX_MULTIPLIER), zero))
    half_sums = expected.sum(axis=2, dtype=np.int32) * expected_multipliers.astype(np.int32)
    np.testing.assert_array_equal(sums, half_sums.reshape(9, k // 32, 2).sum(axis=2).astype(np.float32))

    groups = x.reshape(9, k // 32, 32)
    amax = np.abs(groups).max(axis=2)
    amax[amax < 1e-30] = 0
    inverse = np.divide(MAX_WIDE_CODE, amax, out=np.zeros_like(amax), where=amax > 0)
    np.testing.assert_array_equal(wide_codes, np.rint(groups * inverse[:, :, None]).reshape(9, k))
    np.testing.assert_array_equal(wide_scales, amax / MAX_WIDE_CODE)


@pytest.mark.parametrize("isa", ISAS)
def test_quantisation_error_is_bounded_by_each_half_group(isa: str) -> None:
    """Half a step of its own largest value, however large the row's others: an outlier is felt by its half alone."""
    uneven = np.float32(10) ** np.random.default_rng(8).integers(-3, 2, (64, 128)).astype(np.float32)
    x = np.concatenate([quantisable_rows(), activations(64, 128, seed=9) * uneven])
    codes, multipliers, scales, _, wide_codes, wide_scales = _native.quantize(isa, x)
    assert multipliers.min() == 1 and multipliers.max() == MAX_MULTIPLIER
    assert np.abs(codes).max() == MAX_CODE and np.abs(wide_codes).max() == MAX_WIDE_CODE
    exact = x.astype(np.float64)
    row_amax = np.abs(exact).max(axis=1, keepdims=True)
    half_amax = np.abs(exact.reshape(-1, 8, 16)).max(axis=2)
    step = half_amax / MAX_CODE + row_amax / (MAX_CODE * MAX_MULTIPLIER) + 1e-30
    error = np.abs(seen_by_u4(codes, multipliers, scales) - exact).reshape(-1, 8, 16).max(axis=2)
    assert (error <= 0.5001 * step).all()
    amax = np.abs(exact.reshape(-1, 4, 32)).max(axis=2)
    error = np.abs(wide_codes * np.repeat(wide_scales.astype(np.float64), 32, axis=1) - exact).reshape(-1, 4, 32)
    assert (error.max(axis=2) <= 0.502 * amax / MAX_WIDE_CODE + 1e-30).all()


def seen_by_u4(codes: np.ndarray, multipliers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float64) * np.repeat(multipliers, 16, axis=1) * codes


@pytest.mark.parametrize("tensor_type", TYPES)
@pytest.mark.parametrize("k", [32, 96, 576, 1184])
def test_product_is_close_to_float64(tensor_type: TensorType, k: int) -> None:
    w, values = pack(tensor_type, 40, k)
    x = activations(13, k)
    if tensor_type in QUANTISED:
        codes, multipliers, scales, _, wide_codes, wide_scales = _native.quantize(ISAS[0], x)
        if tensor_type is TensorType.Q8_0:
            seen = wide_codes * np.repeat(wide_scales.astype(np.float64), 32, axis=1)
        else:
            seen = seen_by_u4(codes, multipliers, scales)
    else:
        seen = x.astype(np.float64)
    expected = seen @ values.astype(np.float64).T
    # Float32 chains of up to k (or 2 k / 32) roundings. Q4's code and min terms cancel, so both count: |code| <= 15.
    scale = 1.0 if tensor_type not in (TensorType.Q4_0, TensorType.Q4_1) else 15.0
    bound = scale * (np.abs(seen) @ np.abs(values.astype(np.float64)).T)
    assert np.max(np.abs(product(ISAS[0], w, x) - expected) / bound) < 1e-6


@pytest.mark.parametrize("tensor_type", QUANTISED)
def test_integer_part_is_exact_at_its_limits(tensor_type: TensorType) -> None:
    """Codes and activations at their extremes, scales 1: integers below 2^24 come out exactly."""
    has_min = tensor_type is TensorType.Q4_1
    blocks = random_rows(tensor_type, 32, 64, np.random.default_rng(5)).reshape(-1, tensor_type.block_bytes)
    blocks[:, : 4 if has_min else 2] = np.array([1, -8][: 1 + has_min], np.float16).view(np.uint8)
    header = 4 if has_min else 2
    blocks[::2, header:] = 0x80 if tensor_type is TensorType.Q8_0 else 0xFF
    blocks[1::4, header:] = 0x7F if tensor_type is TensorType.Q8_0 else 0
    w = _native.pack(tensor_type, [blocks.ravel()], 64)
    values = dequantize(Tensor("w", tensor_type, (32, 64), blocks.ravel()))
    x = np.random.default_rng(6).choice(np.array([-127, 127], np.float32), (9, 64))
    x[0], x[1] = 127, -127
    for isa in ISAS:
        np.testing.assert_array_equal(product(isa, w, x), (x.astype(np.float64) @ values.T).astype(np.float32))


@pytest.mark.parametrize("tensor_type", TYPES)
def test_instruction_sets_agree_bit_for_bit(tensor_type: TensorType) -> None:
    k = 544 if tensor_type in QUANTISED else 531
    for n in (1, 7, 8, 15, 16, 17, 33):
        w, _ = pack(tensor_type, n, k, seed=n)
        for m in (1, 2, 3, 4, 5, 6, 7, 11, 13):
            x = activations(m, k, seed=m)
            results = [product(isa, w, x).view(np.uint32) for isa in ISAS]
            for result in results[1:]:
                np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tensor_type", TYPES)
def test_a_row_has_the_same_bits_in_any_batch_and_range(isa: str, tensor_type: TensorType) -> None:
    k, n, m = 608, 57, 101
    w, _ = pack(tensor_type, n, k)
    x = activations(m, k)
    whole = product(isa, w, x)
    rng = np.random.default_rng(7)
    for _ in range(6):
        row_cuts = [0, *sorted(int(r) for r in rng.choice(np.arange(1, m), int(rng.integers(1, 12)), replace=False)), m]
        column_cuts = [0, *sorted(int(c) for c in rng.choice([16, 32, 48], 2, replace=False)), n]
        out = np.full((m, n), np.nan, np.float32)
        for rows in zip(row_cuts, row_cuts[1:], strict=False):
            for columns in zip(column_cuts, column_cuts[1:], strict=False):
                _native.gemm(isa, w, x, out, rows, columns)
        np.testing.assert_array_equal(out.view(np.uint32), whole.view(np.uint32))
    for r in (0, 50, 100):
        np.testing.assert_array_equal(product(isa, w, x[r : r + 1]).view(np.uint32), whole[r : r + 1].view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
def test_column_tiles_taken_together_have_the_bits_of_each_alone(isa: str) -> None:
    """Odd and even counts of them, the last one cut short; rows around the sizes of tiles and of blocks."""
    k = 608
    for n in (25, 32, 41, 80):
        w, _ = pack(TensorType.Q8_0, n, k, seed=n)
        for m in (1, 11, 12, 13, 24, 25, 37, 96, 97):
            x = activations(m, k, seed=m)
            alone = np.full((m, n), np.nan, np.float32)
            for column in range(0, n, 16):
                _native.gemm(isa, w, x, alone, (0, m), (column, min(n, column + 16)))
            np.testing.assert_array_equal(product(isa, w, x).view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tensor_type", TYPES)
def test_nothing_outside_the_range_is_written(isa: str, tensor_type: TensorType) -> None:
    w, _ = pack(tensor_type, 43, 64)
    x = activations(9, 64)
    whole = product(isa, w, x)
    ranges = [((2, 5), (16, 32)), ((0, 9), (32, 43)), ((8, 9), (0, 16)), ((4, 4), (0, 43)), ((0, 9), (16, 16))]
    for rows, columns in ranges:
        out = np.full((9, 50), 7.0, np.float32)
        expected = out.copy()
        expected[slice(*rows), slice(*columns)] = whole[slice(*rows), slice(*columns)]
        _native.gemm(isa, w, x, out, rows, columns)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tensor_type", TYPES)
def test_no_alignment_is_assumed_of_activations_and_results(isa: str, tensor_type: TensorType) -> None:
    w, _ = pack(tensor_type, 24, 64)
    x = activations(7, 64)
    shifted = np.zeros(7 * 67 + 1, np.float32)[1:].reshape(7, 67)[:, :64]
    shifted[:] = x
    out = np.zeros(7 * 29 + 1, np.float32)[1:].reshape(7, 29)
    _native.gemm(isa, w, shifted, out, (0, 7), (0, 24))
    np.testing.assert_array_equal(out[:, :24], product(isa, w, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor_type", TYPES)
def test_a_row_that_is_not_finite_spoils_no_other(isa: str, tensor_type: TensorType, bad: float) -> None:
    w, _ = pack(tensor_type, 33, 96)
    x = activations(8, 96)
    clean = product(isa, w, x)
    x[3, 70] = bad
    out = product(isa, w, x)
    others = [r for r in range(8) if r != 3]
    np.testing.assert_array_equal(out[others].view(np.uint32), clean[others].view(np.uint32))
    if tensor_type in QUANTISED or np.isnan(bad):
        assert np.isnan(out[3]).all()
    else:
        assert not np.isfinite(out[3]).any()


def test_instruction_set_is_chosen_by_name_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROPEWAY_ISA", raising=False)
    assert _native.selected_isa() == ISAS[0]
    monkeypatch.setenv("ROPEWAY_ISA", "scalar")
    assert _native.selected_isa() == "scalar"
    assert _native.selected_isa(ISAS[0]) == ISAS[0]
    monkeypatch.setenv("ROPEWAY_ISA", "avx9")
    with pytest.raises(ValueError, match=r"ROPEWAY_ISA: .*'avx9'.*supported: .*scalar"):
        _native.selected_isa()
    with pytest.raises(ValueError, match="'sse'"):
        _native.selected_isa("sse")
