#include "bindings_kernels.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "memory.h"
#include "packing.h"
#include "roofline.h"
#include "thread_pool.h"
#include "tile_chunks.h"

namespace nb = nanobind;

namespace ropeway {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Range = std::tuple<int, int>;

// A packed matrix that owns its bytes.
struct OwnedMatrix {
  PackedMatrix w;
  std::vector<uint8_t> storage;
};

OwnedMatrix pack(const std::string& type_name, const std::vector<Bytes>& tensors, int k) {
  TensorType type = tensor_type(type_name);
  bool is_blocked = type == TensorType::Q8_0 || type == TensorType::Q4_0 || type == TensorType::Q4_1;
  if (k < 1 || (is_blocked && k % kGroup != 0))
    throw std::invalid_argument("k = " + std::to_string(k) + " does not suit " + type_name);
  std::vector<TensorRows> rows;
  int n = 0;
  for (const Bytes& t : tensors) {
    if (t.size() % row_bytes(type, k) != 0) throw std::invalid_argument("tensor is not whole rows of k values");
    rows.push_back({type, int(t.size() / row_bytes(type, k)), t.data()});
    n += rows.back().num_rows;
  }
  if (n < 1) throw std::invalid_argument("no rows to pack");
  OwnedMatrix m{packed_shape(type, n, k), {}};
  m.storage.resize(packed_bytes(m.w) + 64);
  uint8_t* data = m.storage.data() + (-reinterpret_cast<uintptr_t>(m.storage.data()) & 63);
  pack_columns(m.w, rows, 0, n, data);
  m.w.data = data;
  return m;
}

// Room for both quantised views of M rows of k inputs.
struct QuantisedRows {
  std::vector<CodedGroup> coded;
  std::vector<float> scales;
  std::vector<WideGroup> wide;
  Activations a;

  explicit QuantisedRows(const Floats& x) {
    if (x.stride(1) != 1) throw std::invalid_argument("rows of x must be contiguous");
    size_t groups = x.shape(0) * (x.shape(1) / kGroup);
    coded.resize(groups);
    scales.resize(x.shape(0));
    wide.resize(groups);
    a = {x.data(), x.stride(0), int32_t(x.shape(1)), coded.data(), scales.data(), wide.data()};
  }
};

void gemm_range(const std::string& isa, const OwnedMatrix& m, const Floats& x, Output& out, Range rows, Range columns) {
  const Kernels& kernels = select_kernels(isa);
  auto [row0, row1] = rows;
  auto [col0, col1] = columns;
  bool are_rows_inside = 0 <= row0 && row0 <= row1 && row1 <= int(x.shape(0)) && row1 <= int(out.shape(0));
  bool are_columns_inside = 0 <= col0 && col0 <= col1 && col1 <= m.w.n && col1 <= int(out.shape(1));
  bool are_tiles = col0 % kTileColumns == 0 && (col1 % kTileColumns == 0 || col1 == m.w.n);
  if (!are_rows_inside || !are_columns_inside || !are_tiles || int(x.shape(1)) != m.w.k || out.stride(1) != 1) {
    throw std::invalid_argument("ranges or shapes do not fit");
  }
  QuantisedRows q(x);
  if (m.w.form == Form::U4 || m.w.form == Form::S8) kernels.quantize_rows(q.a, row0, row1);
  kernels.gemm(m.w, q.a, row0, row1, col0, col1, out.data(), out.stride(0));
}

template <class T>
nb::object to_array(std::vector<T> values, size_t rows, size_t columns) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(owned->data(), {rows, columns}, owner));
}

nb::tuple quantize(const std::string& isa, const Floats& x) {
  if (x.shape(1) % kGroup != 0) throw std::invalid_argument("columns of x must be a multiple of 32");
  QuantisedRows q(x);
  const Kernels& kernels = select_kernels(isa);
  kernels.quantize_rows(q.a, 0, int(x.shape(0)));
  const size_t rows = x.shape(0), k = x.shape(1);
  std::vector<int8_t> codes;
  std::vector<int16_t> multipliers, wide_codes;
  std::vector<float> sums, wide_scales;
  for (const CodedGroup& group : q.coded) {
    codes.resize(codes.size() + kGroup);
    for (int i = 0; i < kGroup; i++) codes[codes.size() - kGroup + kernels.code_input(i)] = group.codes[i];
    multipliers.insert(multipliers.end(), group.multipliers, group.multipliers + 2);
    sums.push_back(group.sum);
  }
  for (const WideGroup& group : q.wide) {
    wide_codes.insert(wide_codes.end(), group.codes, group.codes + kGroup);
    wide_scales.push_back(group.scale);
  }
  return nb::make_tuple(to_array(std::move(codes), rows, k), to_array(std::move(multipliers), rows, k / kHalfGroup),
                        to_array(std::move(q.scales), rows, 1), to_array(std::move(sums), rows, k / kGroup),
                        to_array(std::move(wide_codes), rows, k), to_array(std::move(wide_scales), rows, k / kGroup));
}

nb::object unpack(const OwnedMatrix& m) {
  std::vector<float> values(size_t(m.w.n) * m.w.k);
  for (int r = 0; r < m.w.n; r++) unpack_row(m.w, r, values.data() + size_t(r) * m.w.k);
  return to_array(std::move(values), m.w.n, m.w.k);
}

// Seconds of one product of x[M, k] with m on a pool, the quantisation apart: the mean over
// num_products in a row, each with the next of `copies` copies of the weights, so that they come from memory if
// together they outgrow the caches.
double time_gemm(const std::string& isa, const OwnedMatrix& m, const Floats& x, ThreadPool& pool, int copies,
                 int num_products) {
  if (int(x.shape(1)) != m.w.k || copies < 1 || num_products < 1) {
    throw std::invalid_argument("time_gemm: shapes or counts do not fit");
  }
  const Kernels& kernels = select_kernels(isa);
  const int num_rows = int(x.shape(0));
  QuantisedRows q(x);
  if (m.w.form == Form::U4 || m.w.form == Form::S8) kernels.quantize_rows(q.a, 0, num_rows);
  Arena memory;
  const int64_t ld_out = m.w.n_padded | (2 * kLanes);  // as the executable's buffers
  float* const out = memory.allocate<float>(num_rows * ld_out);
  std::fill_n(out, num_rows * ld_out, 0.0f);
  std::vector<uint8_t*> weights;
  for (int i = 0; i < copies; i++) {
    weights.push_back(memory.allocate<uint8_t>(int64_t(packed_bytes(m.w))));
    std::copy_n(m.w.data, packed_bytes(m.w), weights.back());
  }
  const TileChunks chunks = cut_tiles(m.w.n_padded / kTileColumns, double(m.w.k) * kTileColumns * num_rows,
                                      pool.num_threads(), tiles_together(m.w.form));
  std::vector<int32_t> num_chunks(num_products, chunks.num_chunks);
  nb::gil_scoped_release released;
  const auto run = [&](int num_phases) {
    pool.run(num_chunks.data(), num_phases, [&](int phase, int chunk, int) {
      PackedMatrix w = m.w;
      w.data = weights[phase % copies];
      kernels.gemm(w, q.a, 0, num_rows, chunks.begin(chunk) * kTileColumns,
                   std::min(w.n, chunks.begin(chunk + 1) * kTileColumns), out, ld_out);
    });
  };
  run(1);  // wakes the threads
  const auto start = std::chrono::steady_clock::now();
  run(num_products);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / num_products;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("supported_isas", &supported_isas, "Names of the instruction sets this machine can run, best first.");
  m.def(
      "selected_isa", [](std::optional<std::string> name) { return std::string(select_kernels(name).name); },
      nb::arg("name") = nb::none(),
      "The set a name (or ROPEWAY_ISA, or this machine) leads to; ValueError if it cannot run here.");
  nb::class_<OwnedMatrix>(m, "PackedMatrix")
      .def_prop_ro("n", [](const OwnedMatrix& p) { return p.w.n; })
      .def_prop_ro("k", [](const OwnedMatrix& p) { return p.w.k; })
      .def_prop_ro("num_bytes", [](const OwnedMatrix& p) { return packed_bytes(p.w); })
      .def("unpack", &unpack, "The weights as float32 [n, k].");
  m.def("pack", &pack, nb::arg("type"), nb::arg("tensors"), nb::arg("k"),
        "Packs the rows of one or more tensors of a GGUF type, laid end to end.");
  m.def("quantize", &quantize, nb::arg("isa"), nb::arg("x"),
        "Of float32 x [M, k]: codes [M, k], multipliers [M, k / 16], scales [M, 1], sums [M, k / 32]; and, wide, codes "
        "[M, k], scales [M, k / 32]. kernels.h says what they mean.");
  m.def("gemm", &gemm_range, nb::arg("isa"), nb::arg("w"), nb::arg("x"), nb::arg("out"), nb::arg("rows"),
        nb::arg("columns"), "out[rows, columns] = x[rows] @ w[columns]^T; the rest of out is left alone.");
  m.def("time_gemm", &time_gemm, nb::arg("isa"), nb::arg("w"), nb::arg("x"), nb::arg("pool"), nb::arg("copies"),
        nb::arg("num_products"), "Mean seconds of one product; see benchmarks/kernels.py.");
  m.def(
      "peak_int8_per_s",
      [](ThreadPool& pool, double seconds, std::optional<std::string> isa) {
        return peak_int8_per_s(pool, select_kernels(isa).name, seconds);
      },
      nb::arg("pool"), nb::arg("seconds"), nb::arg("isa") = nb::none(), nb::call_guard<nb::gil_scoped_release>(),
      "Multiply-adds per second of the ports as this instruction set uses them; ValueError for scalar.");
  m.def(
      "peak_f32_per_s",
      [](ThreadPool& pool, double seconds, std::optional<std::string> isa) {
        return peak_f32_per_s(pool, select_kernels(isa).name, seconds);
      },
      nb::arg("pool"), nb::arg("seconds"), nb::arg("isa") = nb::none(), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_bytes_per_s",
      [](ThreadPool& pool, size_t num_bytes, double seconds) { return read_bytes_per_s(pool, num_bytes, seconds); },
      nb::arg("pool"), nb::arg("num_bytes"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ropeway
