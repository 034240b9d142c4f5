// How the column tiles of products that run side by side are cut into chunks, which threads claim in order. Knows no
// weights and no threads.
#pragma once
#include <cstdint>

namespace ropeway {

// Tiles [begin(c), begin(c + 1)) are chunk c: num_coarse chunks of coarse_tiles, the rest of fine_tiles. A coarse chunk
// reads a long run of weights; when the fine ones are claimed last, threads that went at different speeds end together.
struct TileChunks {
  int32_t num_tiles = 0, num_chunks = 0;
  int32_t coarse_tiles = 1, num_coarse = 0, fine_tiles = 1;

  int32_t begin(int32_t chunk) const {
    const int32_t num_fine = chunk > num_coarse ? chunk - num_coarse : 0;
    const int32_t tile = (chunk - num_fine) * coarse_tiles + num_fine * fine_tiles;
    return tile < num_tiles ? tile : num_tiles;
  }
};

// tile_multiply_adds: of one tile, over all rows. unit: tiles that a kernel takes together; a chunk, but for the last,
// holds a multiple of it.
TileChunks cut_tiles(int32_t num_tiles, double tile_multiply_adds, int num_threads, int32_t unit);

}  // namespace ropeway
