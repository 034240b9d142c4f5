// What the bindings share: columns as numpy hands them over, and native memory as numpy gets to see it.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>

#include "executable.h"

namespace ropeway {

template <class T>
using Array = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Keeps what an array lies in for as long as the array is there.
template <class T>
nanobind::capsule keep(T value) {
  auto kept = std::make_unique<T>(std::move(value));
  nanobind::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<T*>(p); });
  kept.release();
  return owner;
}

// An array that owns its values.
template <class T>
nanobind::object own(std::unique_ptr<T[]> values, std::initializer_list<size_t> shape) {
  T* const data = values.get();
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(data, shape, keep(std::move(values))));
}

// backends/batch.py's LayerSlice, or None.
inline std::optional<LayerSlice> layer_slice_of(nanobind::handle slice) {
  if (slice.is_none()) return {};
  return LayerSlice{nanobind::cast<int>(slice.attr("index")), nanobind::cast<int>(slice.attr("count"))};
}

}  // namespace ropeway
