// Memory for vectors: aligned, and in huge pages where the system has them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ropeway {

struct FreeMemory {
  void operator()(void* p) const;
};
template <class T>
using Memory = std::unique_ptr<T[], FreeMemory>;

// Aligned to cache lines, not initialised. Throws std::bad_alloc.
void* allocate_bytes(size_t num_bytes);
template <class T>
Memory<T> allocate(int64_t n) {
  return Memory<T>(static_cast<T*>(allocate_bytes(static_cast<size_t>(n) * sizeof(T))));
}

// Many pieces that are freed together, side by side: in huge pages though each is smaller than one. A model's weights
// and activations in small pages are more than the processor's table of pages holds, and every one costs a walk.
class Arena {
 public:
  // n values, not initialised, aligned to cache lines; they live as long as the arena. Throws std::bad_alloc.
  template <class T>
  T* allocate(int64_t n) {
    return static_cast<T*>(allocate_piece(static_cast<size_t>(n) * sizeof(T)));
  }

 private:
  void* allocate_piece(size_t num_bytes);

  std::vector<Memory<uint8_t>> slabs_;
  uint8_t* next_ = nullptr;
  size_t num_left_ = 0;
};

// Zeros that cost no memory until they are touched. Throws std::bad_alloc.
class LazyZeros {
 public:
  explicit LazyZeros(size_t num_bytes);
  ~LazyZeros();
  LazyZeros(LazyZeros&& other) noexcept;
  LazyZeros(const LazyZeros&) = delete;
  LazyZeros& operator=(const LazyZeros&) = delete;
  void* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  void* data_;
  size_t num_bytes_;
};

}  // namespace ropeway
