// What the gemm kernels share: the walk over column tiles, row blocks, blocks of K and row tiles.
//
// Few rows read the packed weights directly. With more, a block of K of one column tile is unpacked once into a panel
// that stays in the first-level cache, and every row tile reads it from there. Accumulators live in a buffer too, read
// and written once per group: the registers belong to the sums inside a group. Whatever the path, an output starts at
// zero and takes its groups (or inputs) in ascending order through the same operations, so its bits do not depend on
// the path.
#pragma once

// For the parts of an inner loop, however long the compiler finds it.
#define ROPEWAY_INLINE inline __attribute__((always_inline))

namespace ropeway {
namespace {

constexpr int kBlockRows = 96;  // rows that share an unpacked panel

// A block of K: steps (groups, or inputs for the float forms) [begin, begin + count).
struct StepRange {
  int begin, count;
};

// Writes the first `columns` of each row of kTileColumns accumulators.
inline void store_tile(const float* acc, int num_rows, int columns, float* out, int64_t ld_out) {
  for (int r = 0; r < num_rows; r++, acc += kTileColumns, out += ld_out) {
    if (columns == kTileColumns) {
      store_f32(out, load_f32(acc));
      store_f32(out + kLanes, load_f32(acc + kLanes));
    } else {
      for (int c = 0; c < columns; c++) out[c] = acc[c];
    }
  }
}

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Asks for the bytes of a step of packed weights some steps ahead: they come from memory once per product, in runs that
// the hardware's own prefetching, which stops at each page, does not keep up with. One row takes 0.8 of the time, 12
// to 32 rows 0.9, with cold weights.
template <class Source, int StepsAhead>
inline void prefetch_ahead(const uint8_t* weights) {
  for (int at = 0; at < Source::kStepBytes; at += 64) prefetch(weights + StepsAhead * Source::kStepBytes + at);
}

constexpr int kDirectStepsAhead = 8;  // where multiply reads packed weights; unpack asks for the next block

// What a row tile may ask memory for while it reads packed weights: so many cache lines at every step, from `from` on.
struct Fetch {
  const uint8_t* from;
  int lines_per_step;

  void step() {
    for (int i = 0; i < lines_per_step; i++, from += 64) prefetch(from);
  }
};

// Of row tile `tile` of num_tiles over a block of `count` steps. A lone tile asks for what is a few steps ahead. Of
// several each asks for its share of the next block (of this column tile or the next: they lie one after another), so
// that memory works beside all of them and not beside the first alone.
template <class Source>
inline Fetch fetch_of_tile(const uint8_t* weights, int count, int tile, int num_tiles) {
  constexpr int kLines = (Source::kStepBytes + 63) / 64;
  if (num_tiles == 1) return {weights + kDirectStepsAhead * Source::kStepBytes, kLines};
  const int lines = (kLines + num_tiles - 1) / num_tiles;
  return {weights + int64_t{count} * (Source::kStepBytes + int64_t{tile} * lines * 64), lines};
}

// The rows left over from whole row tiles: num_rows <= Rows.
template <class Kernel, class Source, int Rows>
inline void multiply_rest(const uint8_t* weights, StepRange steps, const Activations& a, int row, int num_rows,
                          float* acc, Fetch fetch) {
  if (num_rows == Rows) return Kernel::template multiply<Source, Rows>(weights, steps, a, row, acc, fetch);
  if constexpr (Rows > 1) multiply_rest<Kernel, Source, Rows - 1>(weights, steps, a, row, num_rows, acc, fetch);
}

// Kernel::multiply with the number of rows known to the compiler, over the row tiles of [row, row + num_rows). The
// last two tiles share their rows evenly: a tile of one or two rows would leave the ports waiting for its few sums.
template <class Kernel, class Source>
inline void multiply_rows(const uint8_t* weights, StepRange steps, const Activations& a, int row, int num_rows,
                          float* acc) {
  constexpr int kRows = Kernel::kRows;
  const int num_tiles = (num_rows + kRows - 1) / kRows;
  int tile = 0;
  const auto fetch = [&] { return fetch_of_tile<Source>(weights, steps.count, tile++, num_tiles); };
  for (; num_rows >= 2 * kRows || num_rows == kRows; num_rows -= kRows, row += kRows, acc += kRows * kTileColumns) {
    Kernel::template multiply<Source, kRows>(weights, steps, a, row, acc, fetch());
  }
  if constexpr (kRows > 1) {
    if (num_rows > kRows) {
      const int first = (num_rows + 1) / 2;
      multiply_rest<Kernel, Source, kRows>(weights, steps, a, row, first, acc, fetch());
      row += first, num_rows -= first, acc += first * kTileColumns;
    }
    if (num_rows > 0) multiply_rest<Kernel, Source, kRows - 1>(weights, steps, a, row, num_rows, acc, fetch());
  }
}

// A Kernel has: Packed and Panel, the two sources of weights (kStepBytes each); kDirectSteps and kPanelSteps, of a
// block of K in each; kRows, of its largest row tile; kDirectRows, the most rows that read Packed; unpack(packed,
// count, panel); multiply<Source, Rows>(weights, steps, a, row, acc, fetch); finish(a, row, num_rows, acc), once an
// output has all its inputs.
template <class Kernel>
void gemm_tiles(const PackedMatrix& w, const Activations& a, int row0, int row1, int col0, int col1, float* out,
                int64_t ld_out) {
  using Packed = typename Kernel::Packed;
  using Panel = typename Kernel::Panel;
  alignas(64) float acc[kBlockRows * kTileColumns];
  constexpr bool kIsUnpacked = !is_same<Packed, Panel>;
  alignas(64) uint8_t panel[kIsUnpacked ? Kernel::kPanelSteps * Panel::kStepBytes : 1];
  const int num_steps = w.k / Kernel::kStepInputs;
  for (int col = col0; col < col1; col += kTileColumns) {
    const uint8_t* tile = w.data + size_t(col / kTileColumns) * num_steps * Packed::kStepBytes;
    const int columns = col1 - col < kTileColumns ? col1 - col : kTileColumns;
    for (int row = row0; row < row1; row += kBlockRows) {
      const int num_rows = row1 - row < kBlockRows ? row1 - row : kBlockRows;
      memset(acc, 0, size_t(num_rows) * kTileColumns * sizeof(float));
      const bool is_direct = !kIsUnpacked || num_rows <= Kernel::kDirectRows;
      const int block = is_direct ? Kernel::kDirectSteps : Kernel::kPanelSteps;
      for (int step = 0; step < num_steps; step += block) {
        const int count = num_steps - step < block ? num_steps - step : block;
        const uint8_t* weights = tile + size_t(step) * Packed::kStepBytes;
        if (is_direct) {
          multiply_rows<Kernel, Packed>(weights, {step, count}, a, row, num_rows, acc);
        } else {
          Kernel::unpack(weights, count, panel);
          multiply_rows<Kernel, Panel>(panel, {step, count}, a, row, num_rows, acc);
        }
      }
      Kernel::finish(a, row, num_rows, acc);
      store_tile(acc, num_rows, columns, out + row * ld_out + col, ld_out);
    }
  }
}

}  // namespace
}  // namespace ropeway
