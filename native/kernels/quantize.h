// Activations to int8 codes, symmetric, one scale per row and group of 32: scale = amax / 127, nearest, ties to even.
//
// A group whose largest magnitude is not finite gets scale and sum NaN and codes 0, so that its row, and no other,
// comes out NaN. A group below kSmallest, where 127 / amax would overflow, counts as zero.
#pragma once

namespace ropeway {
namespace {

constexpr float kSmallest = 1e-30f;

inline void quantize_group(const float* x, int8_t* codes, int16_t* codes16, float* scale, float* sum) {
  F32x8 v[4];
  for (int i = 0; i < 4; i++) v[i] = load_f32(x + 8 * i);
  Bits256 largest =
      max_i32(max_i32(magnitude_bits(v[0]), magnitude_bits(v[1])), max_i32(magnitude_bits(v[2]), magnitude_bits(v[3])));
  int32_t bits = reduce_max_i32(largest);
  float amax;
  memcpy(&amax, &bits, 4);
  bool is_finite = bits < 0x7f800000, is_used = is_finite && amax >= kSmallest;
  Bits256 q[4];
  F32x8 inverse = set_f32(is_used ? 127.0f / amax : 0.0f);
  for (int i = 0; i < 4; i++) q[i] = f32_to_i32(is_used ? mul(v[i], inverse) : zero_f32());
  store_i32_as_i8(codes, q[0], q[1], q[2], q[3]);
  if (codes16) {
    store_i32_as_i16(codes16, q[0], q[1]);
    store_i32_as_i16(codes16 + 16, q[2], q[3]);
  }
  *scale = is_used ? amax / 127.0f : is_finite ? 0.0f : __builtin_nanf("");
  *sum = *scale * float(reduce_add_i32(add_i32(add_i32(q[0], q[1]), add_i32(q[2], q[3]))));
}

void quantize_rows(const Activations& a, int row0, int row1) {
  int num_groups = a.k / kGroup;
  for (int r = row0; r < row1; r++) {
    const float* x = a.x + r * a.ld_x;
    for (int g = 0; g < num_groups; g++) {
      size_t at = size_t(r) * a.k + size_t(g) * kGroup, group = size_t(r) * num_groups + g;
      quantize_group(x + size_t(g) * kGroup, a.codes + at, a.codes16 ? a.codes16 + at : nullptr, a.scales + group,
                     a.sums + group);
    }
  }
}

}  // namespace
}  // namespace ropeway
