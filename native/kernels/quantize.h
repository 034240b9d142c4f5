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

// What differs between halves is done for eight of them, and what goes across the lanes of a vector for as many vectors
// as there are lanes; and all that is needed of a run of groups before any of its codes, since a processor does not
// look far enough ahead to work on the next groups while these wait. One group at a time takes twice as long.
constexpr int kGroupsTogether = 4, kGroupsPerRun = 64;

// Of 4 * num_fours groups: the multipliers of their halves, and what to multiply their inputs by.
inline void find_multipliers(const float* x, int num_fours, float multipliers_per_x, int16_t* multipliers,
                             float* codes_per_x) {
  for (int i = 0; i < num_fours; i++, x += kGroupsTogether * kGroup, multipliers += 8, codes_per_x += 8) {
    Bits256 largest[8];
    for (int half = 0; half < 8; half++) {
      const float* from = x + half * kHalfGroup;
      largest[half] = max_i32(magnitude_bits(load_f32(from)), magnitude_bits(load_f32(from + kLanes)));
    }
    const F32x8 least = ceil_f32(mul(bits_as_f32(max_of_each(largest)), set_f32(multipliers_per_x)));
    const F32x8 multiplier = max_f32(min_f32(least, set_f32(kMaxMultiplier)), set_f32(1.0f));
    store_f32(codes_per_x, div(set_f32(kMaxCode * multipliers_per_x), multiplier));
    store_i32_as_i16(multipliers, f32_to_i32(multiplier));
  }
}

// kGroupsTogether groups.
inline void code_groups(const float* x, const int16_t* multipliers, const float* codes_per_x, CodedGroup* groups) {
  Bits256 weighted[kGroupsTogether];
  for (int g = 0; g < kGroupsTogether; g++, x += kGroup, multipliers += 2, codes_per_x += 2) {
    Bits256 q[4];
    for (int i = 0; i < 4; i++) q[i] = f32_to_i32(mul(load_f32(x + 8 * i), broadcast_f32(codes_per_x + i / 2)));
    const Bits256 codes = pack_codes(q[0], q[1], q[2], q[3]);
    store_bits(groups[g].codes, codes);
    memcpy(groups[g].multipliers, multipliers, sizeof(groups[g].multipliers));
    weighted[g] = weigh_codes(codes, multipliers);
  }
  float sums[8];
  store_f32(sums, i32_to_f32(sum_of_each(weighted)));
  for (int g = 0; g < kGroupsTogether; g++) groups[g].sum = sums[g];
}

// num_groups: a multiple of kGroupsTogether. multipliers_per_x: kMaxMultiplier / amax of the row.
inline void quantize_coded(const float* x, int num_groups, float multipliers_per_x, CodedGroup* groups) {
  int16_t multipliers[2 * kGroupsPerRun];
  float codes_per_x[2 * kGroupsPerRun];
  for (int begin = 0; begin < num_groups; begin += kGroupsPerRun) {
    const int count = num_groups - begin < kGroupsPerRun ? num_groups - begin : kGroupsPerRun;
    const float* run = x + begin * kGroup;
    find_multipliers(run, count / kGroupsTogether, multipliers_per_x, multipliers, codes_per_x);
    for (int g = 0; g < count; g += kGroupsTogether)
      code_groups(run + g * kGroup, multipliers + 2 * g, codes_per_x + 2 * g, groups + begin + g);
  }
}

// The bits of the largest magnitude of a row; k is a multiple of 32.
inline int32_t largest_of_row(const float* x, int k) {
  Bits256 largest[4];
  for (int i = 0; i < 4; i++) largest[i] = magnitude_bits(load_f32(x + 8 * i));
  for (int at = kGroup; at < k; at += kGroup)
    for (int i = 0; i < 4; i++) largest[i] = max_i32(largest[i], magnitude_bits(load_f32(x + at + 8 * i)));
  return reduce_max_i32(max_i32(max_i32(largest[0], largest[1]), max_i32(largest[2], largest[3])));
}

inline void quantize_coded_row(const float* x, int k, CodedGroup* groups, float* scale) {
  const Range row = find_range(largest_of_row(x, k), float(kMaxCode * kMaxMultiplier));
  *scale = row.scale;
  const int num_groups = k / kGroup, rest = num_groups % kGroupsTogether, whole = num_groups - rest;
  if (!row.is_used) {
    for (int g = 0; g < num_groups; g++) groups[g] = {{}, {1, 1}, 0.0f};
    return;
  }
  const float multipliers_per_x = kMaxMultiplier / row.amax;
  quantize_coded(x, whole, multipliers_per_x, groups);
  if (rest == 0) return;
  float padded[kGroupsTogether * kGroup] = {};
  CodedGroup coded[kGroupsTogether];
  memcpy(padded, x + whole * kGroup, rest * kGroup * sizeof(float));
  quantize_coded(padded, kGroupsTogether, multipliers_per_x, coded);
  memcpy(groups + whole, coded, rest * sizeof(CodedGroup));
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
