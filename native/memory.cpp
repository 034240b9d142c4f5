#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <utility>

namespace ropeway {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

void ask_for_huge_pages(void* p, size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  madvise(p, num_bytes, MADV_HUGEPAGE);  // advice: a system without them goes on with small ones
#endif
}

}  // namespace

void FreeMemory::operator()(void* p) const { std::free(p); }

void* allocate_bytes(size_t num_bytes) {
  const size_t alignment = num_bytes >= kHugePage ? kHugePage : kCacheLine;
  void* p = std::aligned_alloc(alignment, (num_bytes + kCacheLine) / alignment * alignment + alignment);
  if (!p) throw std::bad_alloc();
  if (alignment == kHugePage) ask_for_huge_pages(p, num_bytes / kHugePage * kHugePage);
  return p;
}

LazyZeros::LazyZeros(size_t num_bytes) : num_bytes_(num_bytes) {
  data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
  ask_for_huge_pages(data_, num_bytes);
}

LazyZeros::LazyZeros(LazyZeros&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(other.num_bytes_) {}

LazyZeros::~LazyZeros() {
  if (data_) munmap(data_, num_bytes_);
}

}  // namespace ropeway
