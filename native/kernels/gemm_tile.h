// What the gemm kernels share: the walk over column tiles, row blocks, blocks of K and row tiles.
//
// The first row tile reads a block of K of one column tile as packed and, where several follow, leaves it unpacked in a
// panel in the first-level cache, which they read. Accumulators live in a buffer too, read
// and written once per group: the registers belong to the sums inside a group. Whatever the path, an output starts at
// zero and takes its groups (or inputs) in ascending order through the same operations, so its bits do not depend on
// the path. A kernel may take several column tiles at once: what it loads of a row then serves all of them.
#pragma once

// For the parts of an inner loop, however long the compiler finds it.
#define ROPEWAY_INLINE inline __attribute__((always_inline))

namespace ropeway {
namespace {

constexpr int kBlockRows = 96;                         // rows that share a panel
constexpr int kAccFloats = kBlockRows * kTileColumns;  // accumulators of a column tile

// A block of K: steps (groups, or inputs for the float forms) [begin, begin + count).
struct StepRange {
  int begin, count;
};

// Writes the first `columns` of each row of kTileColumns accumulators.
inline void store_columns(const float* acc, int num_rows, int columns, float* out, int64_t ld_out) {
  for (int r = 0; r < num_rows; r++, acc += kTileColumns, out += ld_out) {
    if (columns == kTileColumns) {
      store_tile(out, load_tile(acc));
    } else {
      for (int c = 0; c < columns; c++) out[c] = acc[c];
    }
  }
}

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// What a row tile asks memory for: so many cache lines every Kernel::kStepsPerFetch steps, from `from` on. Weights come
// from memory once per product, in runs that the hardware's own prefetching, which stops at each page, does not keep up
// with.
struct Fetch {
  const uint8_t* from;
  size_t tile_bytes;  // from a column tile to the next
  int num_lines;

  template <int Columns = 1>
  ROPEWAY_INLINE void step() {
    for (int i = 0; i < num_lines; i++, from += 64)
      for (int c = 0; c < Columns; c++) prefetch_weights(from + c * tile_bytes);
  }
};

// The weights that a row tile works through, and where it leaves them unpacked, if it does.
struct TileWeights {
  const uint8_t* data;
  size_t tile_bytes;  // from a column tile to the next
  StepRange steps;
  const uint8_t* next;  // the block after: of these column tiles or of the next ones
  Fetch fetch;
  uint8_t* panel;
};

// Of row tile `tile` of num_tiles over a block. A lone tile asks for what is a few steps ahead, where that lies in one
// run. Of several each asks for its share of the next block, so that memory works beside all of them and not beside the
// first alone.
template <class Kernel>
inline Fetch fetch_of_tile(const TileWeights& weights, int tile, int num_tiles) {
  constexpr int kStepBytes = Kernel::Packed::kStepBytes, kSteps = Kernel::kStepsPerFetch;
  constexpr int kLines = (kSteps * kStepBytes + 63) / 64;
  if (num_tiles == 1 && Kernel::kColumns == 1)
    return {weights.data + Kernel::kStepsAhead * kStepBytes, weights.tile_bytes, kLines};
  const int count = weights.steps.count;
  const int lines = (kLines + num_tiles - 1) / num_tiles, num_fetches = (count + kSteps - 1) / kSteps;
  const int first_line = tile * lines * num_fetches;  // of the next block
  return {weights.next + int64_t{first_line} * 64, weights.tile_bytes, tile * lines < kLines ? lines : 0};
}

// Kernel::multiply with the number of rows known to the compiler; num_rows <= Rows.
template <class Kernel, class Source, bool IsKept, int Rows>
inline void multiply_tile(const TileWeights& weights, const Activations& a, int row, int num_rows, float* acc) {
  if (num_rows == Rows) return Kernel::template multiply<Source, IsKept, Rows>(weights, a, row, acc);
  if constexpr (Rows > 1) multiply_tile<Kernel, Source, IsKept, Rows - 1>(weights, a, row, num_rows, acc);
}

// The row tiles of [row, row + num_rows) over a block. The last two share their rows evenly: a tile of one or two rows
// would leave the ports waiting for its few sums.
template <class Kernel>
inline void multiply_rows(TileWeights weights, const Activations& a, int row, int num_rows, float* acc) {
  using Packed = typename Kernel::Packed;
  using Panel = typename Kernel::Panel;
  constexpr int kRows = Kernel::kRows;
  constexpr bool kIsUnpacked = !is_same<Packed, Panel>;
  const TileWeights packed = weights;
  const int num_tiles = (num_rows + kRows - 1) / kRows;
  const bool has_panel = kIsUnpacked && num_tiles >= kMinPanelTiles;
  for (int tile = 0; tile < num_tiles; tile++) {
    const int rows = num_rows <= kRows ? num_rows : num_rows < 2 * kRows ? (num_rows + 1) / 2 : kRows;
    weights.fetch = fetch_of_tile<Kernel>(packed, tile, num_tiles);
    if (!has_panel) {
      multiply_tile<Kernel, Packed, false, kRows>(weights, a, row, rows, acc);
    } else if (tile == 0) {
      multiply_tile<Kernel, Packed, kIsUnpacked, kRows>(weights, a, row, rows, acc);
    } else {
      weights.data = weights.panel, weights.tile_bytes = Kernel::kPanelSteps * Panel::kStepBytes;
      multiply_tile<Kernel, Panel, false, kRows>(weights, a, row, rows, acc);
    }
    row += rows, num_rows -= rows, acc += rows * kTileColumns;
  }
}

// A Kernel has: Packed and Panel, the two sources of weights (kStepBytes each); kPanelSteps and kDirectSteps, the most
// of a block of K with a panel and without; kStepsAhead, what a lone row tile fetches ahead; kStepsPerFetch; kRows, of
// its largest row tile; kColumns, the column tiles that it takes at once, of which [col0, col1) holds a multiple;
// multiply<Source, IsKept, Rows>(weights, a, row, acc), which unpacks into the panel if IsKept, accumulators and panels
// of column tiles one after another; finish(a, row, num_rows, acc), once the outputs of a column tile have all their
// inputs.
template <class Kernel>
void gemm_tiles(const PackedMatrix& w, const Activations& a, int row0, int row1, int col0, int col1, float* out,
                int64_t ld_out) {
  using Packed = typename Kernel::Packed;
  constexpr int kColumns = Kernel::kColumns;
  alignas(64) float acc[kColumns * kAccFloats];
  alignas(64) uint8_t panel[kColumns * Kernel::kPanelSteps * Kernel::Panel::kStepBytes];
  const int num_steps = w.k / Kernel::kStepInputs;
  // A lone row tile goes through K of a column tile at once. Otherwise blocks are of one size, so that each fetches the
  // whole of the next.
  const int num_tiles = (row1 - row0 + Kernel::kRows - 1) / Kernel::kRows;
  const int max_block = num_tiles == 1 && kColumns == 1 ? num_steps
                        : num_tiles < kMinPanelTiles    ? Kernel::kDirectSteps
                                                        : Kernel::kPanelSteps;
  const int num_blocks = (num_steps + max_block - 1) / max_block, block = (num_steps + num_blocks - 1) / num_blocks;
  const size_t tile_bytes = size_t(num_steps) * Packed::kStepBytes;
  const uint8_t* tile = w.data + size_t(col0 / kTileColumns) * tile_bytes;
  if (num_tiles > 1 || kColumns > 1)  // nobody fetched the first
    for (int at = 0; at < block * Packed::kStepBytes; at += 64)
      for (int c = 0; c < kColumns; c++) prefetch(tile + c * tile_bytes + at);
  for (int col = col0; col < col1; col += kColumns * kTileColumns, tile += kColumns * tile_bytes) {
    for (int row = row0; row < row1; row += kBlockRows) {
      const int num_rows = row1 - row < kBlockRows ? row1 - row : kBlockRows;
      for (int c = 0; c < kColumns; c++)
        memset(acc + c * kAccFloats, 0, size_t(num_rows) * kTileColumns * sizeof(float));
      // Results of many outputs lie in memory: without this, 96 rows take 1.18 times as long.
      for (int r = row; r < row + num_rows; r++)
        for (int c = 0; c < kColumns; c++) prefetch(out + r * ld_out + col + c * kTileColumns);
      for (int step = 0; step < num_steps; step += block) {
        const int count = num_steps - step < block ? num_steps - step : block;
        const uint8_t* data = tile + size_t(step) * Packed::kStepBytes;
        const uint8_t* next =
            step + count < num_steps ? data + size_t(count) * Packed::kStepBytes : tile + kColumns * tile_bytes;
        multiply_rows<Kernel>({data, tile_bytes, {step, count}, next, {}, panel}, a, row, num_rows, acc);
      }
      for (int c = 0; c < kColumns; c++) {
        const int first = col + c * kTileColumns;
        const int columns = col1 - first < kTileColumns ? col1 - first : kTileColumns;
        Kernel::finish(a, row, num_rows, acc + c * kAccFloats);
        store_columns(acc + c * kAccFloats, num_rows, columns, out + row * ld_out + first, ld_out);
      }
    }
  }
}

}  // namespace
}  // namespace ropeway
