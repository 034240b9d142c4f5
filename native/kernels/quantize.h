// Activations to integer codes, symmetric, nearest, ties to even.
//
// Coded (for U4): scale = amax of the row / (kMaxCode * kMaxMultiplier); per half group the least multiplier with which
// its codes fit in kMaxCode. So a step is amax of the half group / kMaxCode, rounded up to a multiple of the row's
// scale. Wide (for S8): per group, scale = amax / kMaxWideCode.
//
// Where the largest magnitude of a row (wide: of a group) is not finite, its scale is NaN and its codes are 0, so that
// this row, and no other, comes out NaN. One below kSmallest, where a reciprocal would overflow, counts as zero.
#pragma once

namespace ropeway {
namespace {

constexpr float kSmallest = 1e-30f;

// What a largest magnitude leads to: whether codes are other than 0, and the scale of codes up to max_code.
struct Range {
  bool is_used;
  float amax, scale;
};
inline Range find_range(int32_t bits, float max_code) {
  float amax;
  memcpy(&amax, &bits, 4);
  const bool is_finite = bits < 0x7f800000, is_used = is_finite && amax >= kSmallest;
  return {is_used, amax, is_used ? amax / max_code : is_finite ? 0.0f : __builtin_nanf("")};
}

// multipliers_per_x: kMaxMultiplier / amax of the row. All that differs between the halves is done for both at once.
inline void quantize_coded(const float* x, float multipliers_per_x, CodedGroup* group) {
  F32x8 v[4];
  for (int i = 0; i < 4; i++) v[i] = load_f32(x + 8 * i);
  const F32x8 amax = bits_as_f32(largest_of_each(max_i32(magnitude_bits(v[0]), magnitude_bits(v[1])),
                                                 max_i32(magnitude_bits(v[2]), magnitude_bits(v[3]))));
  const F32x8 least = ceil_f32(mul(amax, set_f32(multipliers_per_x)));
  const F32x8 multiplier = max_f32(min_f32(least, set_f32(kMaxMultiplier)), set_f32(1.0f));
  const F32x8 codes_per_x = div(set_f32(kMaxCode * multipliers_per_x), multiplier);
  const F32x8 per_x[2] = {low_half_twice(codes_per_x), high_half_twice(codes_per_x)};
  Bits256 q[4];
  for (int i = 0; i < 4; i++) q[i] = f32_to_i32(mul(v[i], per_x[i / 2]));
  store_codes(group->codes, q[0], q[1], q[2], q[3]);
  const Bits256 multipliers = i32_halves_as_i16_pair(f32_to_i32(multiplier));
  memcpy(group->multipliers, &multipliers, 4);
  group->sum = float(weighted_sum(group->codes, group->multipliers));
}

inline void quantize_coded_row(const float* x, int k, CodedGroup* groups, float* scale) {
  Bits256 largest = magnitude_bits(load_f32(x));
  for (int i = 8; i < k; i += 8) largest = max_i32(largest, magnitude_bits(load_f32(x + i)));
  const Range row = find_range(reduce_max_i32(largest), float(kMaxCode * kMaxMultiplier));
  *scale = row.scale;
  for (int i = 0; i < k; i += kGroup, groups++) {
    if (row.is_used) {
      quantize_coded(x + i, kMaxMultiplier / row.amax, groups);
    } else {
      *groups = {{}, {1, 1}, 0.0f};
    }
  }
}

inline void quantize_wide(const float* x, WideGroup* group) {
  F32x8 v[4];
  for (int i = 0; i < 4; i++) v[i] = load_f32(x + 8 * i);
  const Bits256 largest =
      max_i32(max_i32(magnitude_bits(v[0]), magnitude_bits(v[1])), max_i32(magnitude_bits(v[2]), magnitude_bits(v[3])));
  const Range range = find_range(reduce_max_i32(largest), kMaxWideCode);
  const F32x8 inverse = set_f32(range.is_used ? kMaxWideCode / range.amax : 0.0f);
  Bits256 q[4];
  for (int i = 0; i < 4; i++) q[i] = f32_to_i32(range.is_used ? mul(v[i], inverse) : zero_f32());
  store_i32_as_i16(group->codes, q[0], q[1]);
  store_i32_as_i16(group->codes + 16, q[2], q[3]);
  group->scale = range.scale;
}

void quantize_rows(const Activations& a, int row0, int row1) {
  const int num_groups = a.k / kGroup;
  for (int r = row0; r < row1; r++) {
    const float* x = a.x + r * a.ld_x;
    if (a.coded) quantize_coded_row(x, a.k, a.coded + size_t(r) * num_groups, a.scales + r);
    if (!a.wide) continue;
    WideGroup* wide = a.wide + size_t(r) * num_groups;
    for (int g = 0; g < num_groups; g++) quantize_wide(x + size_t(g) * kGroup, wide + g);
  }
}

}  // namespace
}  // namespace ropeway
