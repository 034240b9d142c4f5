#include "tile_chunks.h"

#include <algorithm>

namespace ropeway {

TileChunks cut_tiles(int32_t num_tiles, double tile_multiply_adds, int num_threads, int32_t unit) {
  // A thread slowed by other work holds the rest up by a fine chunk at most; claiming one (about 0.1 us) does not show.
  constexpr double kCoarseMultiplyAdds = 2e6, kFineMultiplyAdds = 2.5e5;
  const auto whole_units = [&](int32_t tiles) { return std::max(unit, tiles / unit * unit); };
  const auto tiles_of = [&](double multiply_adds) {
    return whole_units(static_cast<int32_t>(std::min(1e6, multiply_adds / tile_multiply_adds)));
  };
  TileChunks chunks;
  chunks.num_tiles = num_tiles;
  const int32_t fair = whole_units(num_tiles / (4 * num_threads));
  chunks.coarse_tiles = std::min(tiles_of(kCoarseMultiplyAdds), fair);
  chunks.fine_tiles = std::min(tiles_of(kFineMultiplyAdds), chunks.coarse_tiles);
  const int32_t tail = chunks.fine_tiles < chunks.coarse_tiles ? num_threads * chunks.coarse_tiles : 0;
  chunks.num_coarse = (num_tiles - std::min(num_tiles, tail)) / chunks.coarse_tiles;
  const int32_t rest = num_tiles - chunks.num_coarse * chunks.coarse_tiles;
  chunks.num_chunks = chunks.num_coarse + (rest + chunks.fine_tiles - 1) / chunks.fine_tiles;
  return chunks;
}

}  // namespace ropeway
