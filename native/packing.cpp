#include "packing.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace ropeway {

namespace {

constexpr int kU4CodeBytes = kGroup * kTileColumns / 2;
constexpr int kS8CodeBytes = kGroup * kTileColumns;
constexpr int kScaleBytes = 2 * kTileColumns;

bool is_quantised(TensorType type) {
  return type == TensorType::Q8_0 || type == TensorType::Q4_0 || type == TensorType::Q4_1;
}

// Bytes of a file block of 32 values, and where its codes start.
struct BlockShape {
  int bytes, codes;
};
BlockShape block_shape(TensorType type) {
  switch (type) {
    case TensorType::Q8_0:
      return {34, 2};
    case TensorType::Q4_0:
      return {18, 2};
    default:
      return {20, 4};
  }
}

int value_bytes(Form form) { return form == Form::F32 ? 4 : 2; }

size_t group_bytes(const PackedMatrix& w) {
  if (w.form == Form::S8) return kS8CodeBytes + kScaleBytes;
  return kU4CodeBytes + (w.has_min ? 2 : 1) * kScaleBytes;
}

size_t tile_bytes(const PackedMatrix& w) {
  if (w.form == Form::U4 || w.form == Form::S8) return w.k / kGroup * group_bytes(w);
  return size_t(w.k) * kTileColumns * value_bytes(w.form);
}

// A file block keeps inputs 0..15 in the low nibbles of its 16 code bytes and 16..31 in the high ones.
int file_nibble(const uint8_t* codes, int input) { return input < 16 ? codes[input] & 15 : codes[input - 16] >> 4; }

// One output's group, from a file block to its place in the tile. A null block is padding: zero d and m.
void pack_group(const PackedMatrix& w, const uint8_t* block, int codes_at, int column, uint8_t* group) {
  int half = column / kLanes, lane = column % kLanes;
  uint8_t* scales = group + (w.form == Form::U4 ? kU4CodeBytes : kS8CodeBytes);
  if (!block) {
    static constexpr uint8_t kZeros[34] = {};
    block = kZeros;
  }
  std::memcpy(scales + 2 * column, block, 2);
  if (w.has_min) std::memcpy(scales + kScaleBytes + 2 * column, block + 2, 2);
  const uint8_t* codes = block + codes_at;
  if (w.form == Form::S8) {
    for (int i = 0; i < kGroup; i++) group[((i / 2) * 2 + half) * 16 + 2 * lane + i % 2] = codes[i];
    return;
  }
  for (int j = 0; j < 4; j++) {
    for (int t = 0; t < 4; t++) {
      int low = file_nibble(codes, packed_code_input(8 * j + t)),
          high = file_nibble(codes, packed_code_input(8 * j + 4 + t));
      group[(j * 2 + half) * 32 + 4 * lane + t] = uint8_t(low | high << 4);
    }
  }
}

void pack_values(const PackedMatrix& w, const uint8_t* row, int column, uint8_t* tile) {
  int size = value_bytes(w.form);
  for (int i = 0; i < w.k; i++) {
    uint8_t* to = tile + (size_t(i) * kTileColumns + column) * size;
    if (row) {
      std::memcpy(to, row + size_t(i) * size, size);
    } else {
      std::memset(to, 0, size);
    }
  }
}

// Row `column` of the tensors laid end to end; null past the end.
const uint8_t* find_row(std::span<const TensorRows> tensors, size_t bytes, int column) {
  for (const TensorRows& t : tensors) {
    if (column < t.num_rows) return t.data + size_t(column) * bytes;
    column -= t.num_rows;
  }
  return nullptr;
}

}  // namespace

TensorType tensor_type(std::string_view name) {
  static constexpr std::pair<std::string_view, TensorType> kTypes[] = {
      {"F32", TensorType::F32},   {"F16", TensorType::F16},   {"BF16", TensorType::BF16},
      {"Q8_0", TensorType::Q8_0}, {"Q4_0", TensorType::Q4_0}, {"Q4_1", TensorType::Q4_1}};
  for (const auto& [known, type] : kTypes)
    if (name == known) return type;
  throw std::invalid_argument("tensor type '" + std::string(name) + "' is not one of F32 F16 BF16 Q8_0 Q4_0 Q4_1");
}

size_t row_bytes(TensorType type, int k) {
  if (is_quantised(type)) {
    assert(k % kGroup == 0);
    return size_t(k) / kGroup * block_shape(type).bytes;
  }
  return size_t(k) * (type == TensorType::F32 ? 4 : 2);
}

PackedMatrix packed_shape(TensorType type, int n, int k) {
  PackedMatrix w{};
  switch (type) {
    case TensorType::F32:
      w.form = Form::F32;
      break;
    case TensorType::F16:
      w.form = Form::F16;
      break;
    case TensorType::BF16:
      w.form = Form::BF16;
      break;
    case TensorType::Q8_0:
      w.form = Form::S8;
      break;
    case TensorType::Q4_0:
    case TensorType::Q4_1:
      w.form = Form::U4;
      break;
  }
  w.has_min = type == TensorType::Q4_1;
  w.n = n;
  w.n_padded = (n + kTileColumns - 1) / kTileColumns * kTileColumns;
  w.k = k;
  return w;
}

size_t packed_bytes(const PackedMatrix& w) { return size_t(w.n_padded) / kTileColumns * tile_bytes(w); }

void pack_columns(const PackedMatrix& w, std::span<const TensorRows> tensors, int col0, int col1, uint8_t* data) {
  assert(col0 % kTileColumns == 0 && (col1 % kTileColumns == 0 || col1 == w.n));
  TensorType type = tensors[0].type;
  size_t bytes = row_bytes(type, w.k);
  int end = (col1 + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int column = col0; column < end; column++) {
    const uint8_t* row = find_row(tensors, bytes, column);
    uint8_t* tile = data + size_t(column / kTileColumns) * tile_bytes(w);
    if (!is_quantised(type)) {
      pack_values(w, row, column % kTileColumns, tile);
      continue;
    }
    BlockShape block = block_shape(type);
    for (int g = 0; g < w.k / kGroup; g++) {
      pack_group(w, row ? row + size_t(g) * block.bytes : nullptr, block.codes, column % kTileColumns,
                 tile + g * group_bytes(w));
    }
  }
}

float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  float magnitude = float(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

namespace {

uint16_t load_u16(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

float load_value(Form form, const uint8_t* p) {
  if (form == Form::F16) return f16_to_f32(load_u16(p));
  if (form == Form::BF16) return std::bit_cast<float>(uint32_t(load_u16(p)) << 16);
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

void unpack_group(const PackedMatrix& w, const uint8_t* group, int column, float* out) {
  int half = column / kLanes, lane = column % kLanes;
  const uint8_t* scales = group + (w.form == Form::U4 ? kU4CodeBytes : kS8CodeBytes);
  float d = f16_to_f32(load_u16(scales + 2 * column));
  if (w.form == Form::S8) {
    for (int i = 0; i < kGroup; i++) out[i] = d * float(int8_t(group[((i / 2) * 2 + half) * 16 + 2 * lane + i % 2]));
    return;
  }
  float m = w.has_min ? f16_to_f32(load_u16(scales + kScaleBytes + 2 * column)) : 0.0f;
  int offset = w.has_min ? 0 : 8;
  for (int i = 0; i < kGroup; i++) {
    uint8_t byte = group[(i / 8 * 2 + half) * 32 + 4 * lane + i % 4];
    int code = i % 8 < 4 ? byte & 15 : byte >> 4;
    out[packed_code_input(i)] = d * float(code - offset) + m;
  }
}

}  // namespace

void unpack_row(const PackedMatrix& w, int row, float* out) {
  const uint8_t* tile = w.data + size_t(row / kTileColumns) * tile_bytes(w);
  int column = row % kTileColumns;
  if (w.form == Form::U4 || w.form == Form::S8) {
    for (int g = 0; g < w.k / kGroup; g++) unpack_group(w, tile + g * group_bytes(w), column, out + g * kGroup);
    return;
  }
  int size = value_bytes(w.form);
  for (int i = 0; i < w.k; i++) out[i] = load_value(w.form, tile + (size_t(i) * kTileColumns + column) * size);
}

}  // namespace ropeway
