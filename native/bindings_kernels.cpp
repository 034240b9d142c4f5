#include "bindings_kernels.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "packing.h"

namespace nb = nanobind;

namespace ropeway {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Range = std::tuple<int, int>;

TensorType tensor_type(const std::string& name) {
  static constexpr const char* kNames[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"};
  for (int i = 0; i < 6; i++) {
    if (name == kNames[i]) return TensorType(i);
  }
  throw std::invalid_argument("tensor type '" + name + "' is not one of F32 F16 BF16 Q8_0 Q4_0 Q4_1");
}

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

// Room for the quantised view of M rows of k inputs; `shift` bytes past alignment, to test that none is assumed.
struct QuantisedRows {
  std::vector<int8_t> codes;
  std::vector<int16_t> codes16;
  std::vector<float> scales, sums;
  Activations a;

  explicit QuantisedRows(const Floats& x) {
    if (x.stride(1) != 1) throw std::invalid_argument("rows of x must be contiguous");
    size_t count = x.shape(0) * x.shape(1), groups = x.shape(0) * (x.shape(1) / kGroup);
    codes.resize(count);
    codes16.resize(count);
    scales.resize(groups);
    sums.resize(groups);
    a = {x.data(), x.stride(0), int32_t(x.shape(1)), codes.data(), codes16.data(), scales.data(), sums.data()};
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
  select_kernels(isa).quantize_rows(q.a, 0, int(x.shape(0)));
  size_t rows = x.shape(0), k = x.shape(1);
  return nb::make_tuple(to_array(std::move(q.codes), rows, k), to_array(std::move(q.codes16), rows, k),
                        to_array(std::move(q.scales), rows, k / kGroup), to_array(std::move(q.sums), rows, k / kGroup));
}

nb::object unpack(const OwnedMatrix& m) {
  std::vector<float> values(size_t(m.w.n) * m.w.k);
  for (int r = 0; r < m.w.n; r++) unpack_row(m.w, r, values.data() + size_t(r) * m.w.k);
  return to_array(std::move(values), m.w.n, m.w.k);
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
        "codes, codes16 [M, k], scales, sums [M, k / 32] of float32 x [M, k].");
  m.def("gemm", &gemm_range, nb::arg("isa"), nb::arg("w"), nb::arg("x"), nb::arg("out"), nb::arg("rows"),
        nb::arg("columns"), "out[rows, columns] = x[rows] @ w[columns]^T; the rest of out is left alone.");
}

}  // namespace ropeway
