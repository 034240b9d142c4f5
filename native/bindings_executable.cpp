// Binds the thread pool and the executable: takes a ForwardBatch (backends/batch.py) apart and hands logits out without
// a copy.
#include "bindings_executable.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings_arrays.h"
#include "bindings_rows.h"
#include "executable.h"
#include "isa.h"
#include "released_call.h"

namespace nb = nanobind;

namespace ropeway {
namespace {

template <class T>
std::span<const T> span(const Array<T>& array) {
  return {array.data(), array.shape(0)};
}

template <class T>
Array<T> attribute(nb::handle object, const char* name) {
  Array<T> array;
  if (!nb::try_cast(object.attr(name), array, false))
    throw std::invalid_argument(std::string("forward batch: ") + name + " has the wrong type or is not contiguous");
  return array;
}

struct Table {
  Array<int32_t> block_ids;
  Array<int64_t> offsets;
};

// The arrays of a ForwardBatch; holds on to them.
struct ForwardArrays {
  const Array<int32_t> token_ids, positions, query_indptr, kv_lens, out_rows;
  std::vector<Table> tables;
  ForwardBatch view;

  explicit ForwardArrays(nb::handle batch)
      : token_ids(attribute<int32_t>(batch, "token_ids")),
        positions(attribute<int32_t>(batch, "positions")),
        query_indptr(attribute<int32_t>(batch, "query_indptr")),
        kv_lens(attribute<int32_t>(batch, "kv_lens")),
        out_rows(attribute<int32_t>(batch, "out_rows")),
        view{span(token_ids), span(positions), span(query_indptr), span(kv_lens), span(out_rows), {}} {
    for (nb::handle table : batch.attr("tables"))
      tables.push_back({attribute<int32_t>(table, "block_ids"), attribute<int64_t>(table, "offsets")});
    for (const Table& table : tables) view.tables.push_back({span(table.block_ids), span(table.offsets)});
    view.layer_slice = layer_slice_of(batch.attr("layer_slice"));
  }
};

using LogitsArray = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

LogitsArray run_forward(Executable& executable, const ForwardBatch& batch) {
  std::shared_ptr<float[]> logits;
  executable.last_call = call_released([&] { logits = executable.forward(batch); });
  return LogitsArray(logits.get(), {batch.out_rows.size(), static_cast<size_t>(executable.vocab_size())}, keep(logits));
}

// A StepRows lies as the executable wants it: taking the arrays of a ForwardBatch apart costs some 50 us where a pass
// has just had the caches.
LogitsArray forward(Executable& executable, nb::handle batch) {
  if (nb::isinstance<BoundRows>(batch))
    return run_forward(executable, nb::cast<const BoundRows&>(batch).rows.forward_batch());
  return run_forward(executable, ForwardArrays(batch).view);
}

void copy_blocks(Executable& executable, int group, const Array<int32_t>& source_ids,
                 const Array<int32_t>& destination_ids) {
  nb::gil_scoped_release released;
  executable.copy_blocks(group, span(source_ids), span(destination_ids));
}

int add_matrix(Executable& executable, const std::string& type, int n, int k, const Array<uint8_t>& data) {
  const TensorType parsed = tensor_type(type);
  nb::gil_scoped_release released;
  return executable.add_matrix(parsed, n, k, span(data));
}

RowOp rope_op(int x, int turns, int head_dim, int rotary_dim, bool is_interleaved) {
  RowOp op{.kind = RowOpKind::Rope, .out = x, .table = turns};
  op.rope_shape = {head_dim, rotary_dim, is_interleaved};
  return op;
}

void bind_row_ops(nb::module_& m) {
  nb::class_<RowOp>(m, "RowOp", "One op of a rows phase: buffers and tables by index.")
      .def_static(
          "turns", [](int turns) { return RowOp{.kind = RowOpKind::Turns, .table = turns}; }, nb::arg("turns"))
      .def_static(
          "embed",
          [](int out, int embedding) { return RowOp{.kind = RowOpKind::Embed, .out = out, .table = embedding}; },
          nb::arg("out"), nb::arg("embedding"))
      .def_static(
          "norm",
          [](int out, int x, int vector, float eps) {
            return RowOp{.kind = RowOpKind::Norm, .out = out, .a = x, .table = vector, .eps = eps};
          },
          nb::arg("out"), nb::arg("x"), nb::arg("vector"), nb::arg("eps"))
      .def_static(
          "bias", [](int x, int vector) { return RowOp{.kind = RowOpKind::Bias, .out = x, .a = x, .table = vector}; },
          nb::arg("x"), nb::arg("vector"))
      .def_static(
          "quantize", [](int x) { return RowOp{.kind = RowOpKind::Quantize, .out = x}; }, nb::arg("x"))
      .def_static("rope", &rope_op, nb::arg("x"), nb::arg("turns"), nb::arg("head_dim"), nb::arg("rotary_dim"),
                  nb::arg("is_interleaved"))
      .def_static(
          "kv_write",
          [](int k, int v, int layer, int group) {
            return RowOp{.kind = RowOpKind::KvWrite, .out = k, .a = k, .b = v, .table = group, .layer = layer};
          },
          nb::arg("k"), nb::arg("v"), nb::arg("layer"), nb::arg("group"))
      .def_static(
          "silu_gate",
          [](int out, int gate, int up) { return RowOp{.kind = RowOpKind::SiluGate, .out = out, .a = gate, .b = up}; },
          nb::arg("out"), nb::arg("gate"), nb::arg("up"))
      .def_static(
          "add", [](int out, int a, int b) { return RowOp{.kind = RowOpKind::Add, .out = out, .a = a, .b = b}; },
          nb::arg("out"), nb::arg("a"), nb::arg("b"))
      .def_static(
          "select_rows", [](int out, int x) { return RowOp{.kind = RowOpKind::SelectRows, .out = out, .a = x}; },
          nb::arg("out"), nb::arg("x"));
}

std::vector<Product> products(const std::vector<std::pair<int, int>>& pairs) {
  std::vector<Product> found;
  for (const auto& [matrix, out] : pairs) found.push_back({matrix, out});
  return found;
}

nb::tuple as_seconds(const CallTimes& times) {
  return nb::make_tuple(static_cast<double>(times.native_ns) * 1e-9, static_cast<double>(times.lock_wait_ns) * 1e-9);
}

nb::dict profile(const Executable& executable) {
  nb::dict times;
  for (const PhaseTime& time : executable.profile())
    times[time.label.c_str()] = nb::make_tuple(time.num_runs, static_cast<double>(time.total_ns) * 1e-9);
  return times;
}

}  // namespace

void bind_executable(nb::module_& m) {
  m.def("available_cpus", &available_cpus, "Processors this process may run on.");
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads for everything native; the caller of a job is one of them.")
      .def(nb::init<int>(), nb::arg("num_threads"))
      .def_prop_ro("num_threads", &ThreadPool::num_threads);
  bind_row_ops(m);
  nb::class_<Executable>(m, "Executable", "A lowered Program with its weights and KV pool.")
      .def(
          "__init__",
          [](Executable* self, ThreadPool& pool, std::optional<std::string> isa, int block_size, int num_kv_blocks) {
            std::optional<std::string_view> name;
            if (isa) name = *isa;
            new (self) Executable(select_kernels(name), pool, block_size, num_kv_blocks);
          },
          nb::arg("pool"), nb::kw_only(), nb::arg("isa").none(), nb::arg("block_size"), nb::arg("num_kv_blocks"),
          nb::keep_alive<1, 2>())
      .def("add_buffer", &Executable::add_buffer, nb::arg("width"))
      .def("add_cache_group", &Executable::add_cache_group, nb::arg("num_layers"), nb::arg("num_kv_heads"),
           nb::arg("head_dim"))
      .def("add_matrix", &add_matrix, nb::arg("type"), nb::arg("n"), nb::arg("k"), nb::arg("data"))
      .def(
          "add_embedding",
          [](Executable& executable, const std::string& type, int n, int k, const Array<uint8_t>& data) {
            return executable.add_embedding(tensor_type(type), n, k, span(data));
          },
          nb::arg("type"), nb::arg("n"), nb::arg("k"), nb::arg("data"), nb::keep_alive<1, 5>())
      .def("add_tied_embedding", &Executable::add_tied_embedding, nb::arg("matrix"))
      .def(
          "add_vector",
          [](Executable& executable, const Array<float>& values) { return executable.add_vector(span(values)); },
          nb::arg("values"))
      .def(
          "add_turns",
          [](Executable& executable, const Array<double>& frequencies) {
            return executable.add_turns(span(frequencies));
          },
          nb::arg("frequencies"))
      .def("add_rows_phase", &Executable::add_rows_phase, nb::arg("label"), nb::arg("is_selected"), nb::arg("ops"))
      .def(
          "add_product_phase",
          [](Executable& executable, std::string label, bool is_selected, int x,
             const std::vector<std::pair<int, int>>& pairs) {
            executable.add_product_phase(std::move(label), is_selected, x, products(pairs));
          },
          nb::arg("label"), nb::arg("is_selected"), nb::arg("x"), nb::arg("products"))
      .def(
          "add_attention_phase",
          [](Executable& executable, std::string label, int out, int q, int group, int layer, int num_heads,
             float scale) {
            executable.add_attention_phase(std::move(label), {out, q, group, layer, num_heads, scale});
          },
          nb::arg("label"), nb::arg("out"), nb::arg("q"), nb::arg("group"), nb::arg("layer"), nb::arg("num_heads"),
          nb::arg("scale"))
      .def("set_logits", &Executable::set_logits, nb::arg("buffer"))
      .def("add_cut", &Executable::add_cut, nb::arg("buffers"),
           "A boundary between layers before the next phase; buffers: what a row that stops here goes on from.")
      .def_prop_ro("num_layers", &Executable::num_layers)
      .def("copy_blocks", &copy_blocks, nb::arg("group"), nb::arg("source_ids"), nb::arg("destination_ids"),
           "Copies whole blocks, pair after pair. Raises ValueError for ids outside the pool.")
      .def("forward", &forward, nb::arg("batch"),
           "logits[R, vocab] of a ForwardBatch or of StepRows. Raises ValueError for one that does not fit.")
      .def_prop_ro("packed_bytes", &Executable::packed_bytes)
      .def_prop_ro("kv_bytes", &Executable::kv_bytes)
      .def_prop_ro(
          "work",
          [](const Executable& executable) {
            const Work& work = executable.work();
            return nb::make_tuple(work.int8_multiply_adds, work.f32_multiply_adds, work.bytes_read);
          },
          "int8 multiply-adds, float32 multiply-adds and bytes read, since the start.")
      .def_prop_ro(
          "last_call", [](const Executable& executable) { return as_seconds(executable.last_call); },
          "Of the last forward: seconds without the interpreter lock, then seconds until it was had again.")
      .def("set_profiling", &Executable::set_profiling, nb::arg("is_on"),
           "Turns timing on or off, and clears the times.")
      .def("profile", &profile, "Label of a phase -> (runs, seconds).");
}

}  // namespace ropeway
