#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace ropeway {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSlab = size_t{32} << 20;  // what is not used of it costs no memory

void ask_for_huge_pages(void* p, size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  madvise(p, num_bytes, MADV_HUGEPAGE);  // advice: a system without them goes on with small ones
#endif
}

}  // namespace

void FreeMemory::operator()(void* p) const { std::free(p); }

void* allocate_bytes(size_t num_bytes) {
  const size_t alignment = num_bytes >= kHugePage ? kHugePage : kCacheLine;
  const size_t num_allocated = (num_bytes + kCacheLine) / alignment * alignment + alignment;
  void* p = std::aligned_alloc(alignment, num_allocated);
  if (!p) throw std::bad_alloc();
#ifdef __SANITIZE_ADDRESS__
  // Rounding up leaves room that nobody asked for and that hides what is written past the end.
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(p) + num_bytes, num_allocated - num_bytes);
#endif
  if (alignment == kHugePage) ask_for_huge_pages(p, num_bytes / kHugePage * kHugePage);
  return p;
}

void* Arena::allocate_piece(size_t num_bytes) {
#ifdef __SANITIZE_ADDRESS__
  const bool is_alone = true;  // the sanitizer watches the ends of allocations
#else
  const bool is_alone = num_bytes > kSlab / 4;
#endif
  if (is_alone) return slabs_.emplace_back(static_cast<uint8_t*>(allocate_bytes(num_bytes))).get();
  const size_t num_taken = (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (num_taken > num_left_) {
    next_ = slabs_.emplace_back(static_cast<uint8_t*>(allocate_bytes(kSlab))).get();
    num_left_ = kSlab;
  }
  uint8_t* piece = next_;
  next_ += num_taken;
  num_left_ -= num_taken;
  return piece;
}

#ifdef __SANITIZE_ADDRESS__

// The sanitizer watches the ends of the heap's blocks, not those of mapped memory.
LazyZeros::LazyZeros(size_t num_bytes) : data_(std::calloc(num_bytes, 1)), num_bytes_(num_bytes) {
  if (!data_) throw std::bad_alloc();
}

LazyZeros::~LazyZeros() { std::free(data_); }

#else

LazyZeros::LazyZeros(size_t num_bytes) : num_bytes_(num_bytes) {
  data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
  ask_for_huge_pages(data_, num_bytes);
}

LazyZeros::~LazyZeros() {
  if (data_) munmap(data_, num_bytes_);
}

#endif

LazyZeros::LazyZeros(LazyZeros&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(other.num_bytes_) {}

}  // namespace ropeway
