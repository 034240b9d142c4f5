#include "dequantize.h"

#include <bit>
#include <cstring>

namespace ropeway {
namespace {

constexpr int kBlock = 32;  // values of a quantised block

uint16_t load_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
float load_f16(const uint8_t* p) { return f16_to_f32(load_u16(p)); }

// 4-bit codes: byte j holds code j in its low half and code j + 16 in its high half.
template <class Value>
void expand_nibbles(const uint8_t* codes, float* out, Value&& value) {
  for (int j = 0; j < kBlock / 2; ++j) {
    out[j] = value(codes[j] & 15);
    out[j + kBlock / 2] = value(codes[j] >> 4);
  }
}

}  // namespace

void dequantize_row(TensorType type, int k, const uint8_t* row, float* out) {
  const uint8_t* const end = row + row_bytes(type, k);
  switch (type) {
    case TensorType::F32:
      std::memcpy(out, row, static_cast<size_t>(k) * sizeof(float));
      break;
    case TensorType::F16:
      for (; row < end; row += 2) *out++ = load_f16(row);
      break;
    case TensorType::BF16:
      for (; row < end; row += 2) *out++ = std::bit_cast<float>(uint32_t{load_u16(row)} << 16);
      break;
    case TensorType::Q8_0:
      for (; row < end; row += 2 + kBlock) {
        const float d = load_f16(row);
        for (int j = 0; j < kBlock; ++j) *out++ = d * static_cast<float>(static_cast<int8_t>(row[2 + j]));
      }
      break;
    case TensorType::Q4_0:
      for (; row < end; row += 2 + kBlock / 2, out += kBlock) {
        const float d = load_f16(row);
        expand_nibbles(row + 2, out, [d](int code) { return d * static_cast<float>(code - 8); });
      }
      break;
    case TensorType::Q4_1:
      for (; row < end; row += 4 + kBlock / 2, out += kBlock) {
        const float d = load_f16(row), m = load_f16(row + 2);
        expand_nibbles(row + 4, out, [d, m](int code) { return d * static_cast<float>(code) + m; });
      }
      break;
  }
}

}  // namespace ropeway
