// Memory for vectors: aligned, and in huge pages where the system has them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

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
