// Binds the row store: reads the columns of a StepPlan, and shows a step's rows to numpy under the names of
// backends/batch.py.
#include "bindings_rows.h"

#include <algorithm>
#include <string>

#include "bindings_arrays.h"

namespace nb = nanobind;

namespace ropeway {
namespace {

// The integers of a tuple or list; truth values count as 0 and 1.
template <class T = int32_t>
std::vector<T> ints(nb::handle values) {
  const nb::object items = nb::steal(PySequence_Fast(values.ptr(), "a tuple or list of integers is needed"));
  if (!items.is_valid()) throw nb::python_error();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.ptr());
  PyObject** item = PySequence_Fast_ITEMS(items.ptr());
  std::vector<T> out;
  out.reserve(size_t(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    const long value = PyLong_AsLong(item[i]);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    if (value < 0 || value > INT32_MAX) throw ImpossibleStep(std::to_string(value) + " is out of range");
    out.push_back(static_cast<T>(value));
  }
  return out;
}

const StepRows& rows_of(nb::handle self) { return nb::cast<const BoundRows&>(self).rows; }

// What lies in memory that `owner` keeps.
template <class T>
nb::object view(const T* values, size_t size, nb::handle owner) {
  static const T none{};
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<1>>(size ? values : &none, {size}, owner));
}
template <class T>
nb::object view(const std::vector<T>& values, nb::handle owner) {
  return view(values.data(), values.size(), owner);
}

// `size` values, the i-th of which is value(i).
template <class T, class Value>
nb::object column(size_t size, Value&& value) {
  std::unique_ptr<T[]> values(new T[size]);
  for (size_t i = 0; i < size; ++i) values[i] = value(i);
  return own(std::move(values), {size});
}
template <class T, class Value>
nb::object sampled_column(nb::handle self, Value&& value) {
  const StepRows& rows = rows_of(self);
  return column<T>(rows.sampled.size(), [&](size_t i) { return value(rows.sampled[i]); });
}

// One of the BlockTables of a step.
struct StepTable {
  nb::object block_ids, offsets;
};

nb::tuple tables(nb::handle self) {
  const StepRows& rows = rows_of(self);
  const nb::capsule owner = keep(rows.storage);
  nb::list found;
  for (const BlockTableView& table : rows.forward_batch().tables) {
    const std::span<const int32_t> ids = table.block_ids;
    found.append(nb::cast(StepTable{view(ids.data(), ids.size(), owner), view(rows.table_offsets, self)}));
  }
  return nb::tuple(found);
}

BoundRows gather(const RowStore& store, nb::handle slots, nb::handle starts, nb::handle num_tokens,
                 nb::handle is_sampled, nb::object layer_slice) {
  const StepColumns step{ints(slots), ints(starts), ints(num_tokens), ints<uint8_t>(is_sampled),
                         layer_slice_of(layer_slice)};
  return {store.gather(step), std::move(layer_slice)};
}

template <class T>
nb::object drawn_column(const StepDraws& drawn, T SampleDraw::* field) {
  return column<T>(drawn.draws.size(), [&](size_t i) { return drawn.draws[i].*field; });
}

// The draws of a StepDraws, or of a Samples as columns.
std::vector<SampleDraw> draws_of(nb::handle drawn) {
  if (nb::isinstance<StepDraws>(drawn)) return nb::cast<const StepDraws&>(drawn).draws;
  const auto token_ids = nb::cast<Array<int32_t>>(drawn.attr("token_ids"));
  const auto is_failed = nb::cast<Array<bool>>(drawn.attr("is_failed"));
  if (token_ids.shape(0) != is_failed.shape(0)) throw ImpossibleStep("draws of columns of two lengths");
  std::vector<SampleDraw> draws(token_ids.shape(0));
  for (size_t i = 0; i < draws.size(); ++i) draws[i] = {token_ids.data()[i], is_failed.data()[i], 0};
  return draws;
}

nb::tuple append(RowStore& store, const BoundRows& bound, nb::handle drawn) {
  const std::vector<SampleDraw> draws = draws_of(drawn);
  if (draws.size() != bound.rows.sampled.size()) throw ImpossibleStep("draws of another number of rows");
  store.append(bound.rows, draws);
  const auto num_failed = std::count_if(draws.begin(), draws.end(), [](const SampleDraw& d) { return d.is_failed; });
  const nb::object ids = nb::steal(PyTuple_New(std::ssize(draws) - num_failed));
  if (!ids.is_valid()) throw nb::python_error();
  Py_ssize_t size = 0;
  for (const SampleDraw& draw : draws)
    if (!draw.is_failed) PyTuple_SET_ITEM(ids.ptr(), size++, nb::int_(draw.token_id).release().ptr());
  return nb::cast<nb::tuple>(ids);
}

void bind_step_rows(nb::module_& m) {
  using Sampled = StepRows::Sampled;
  nb::class_<StepTable>(m, "StepTable", "One cache group's BlockTables of a step.")
      .def_ro("block_ids", &StepTable::block_ids)
      .def_ro("offsets", &StepTable::offsets);
  nb::class_<BoundRows> rows(m, "StepRows",
                             "The rows of a step, gathered from a RowStore: a ForwardBatch, and of the rows that are "
                             "sampled a SampleBatch with no biases, bans, masks and log-probabilities.");
  rows.def_prop_ro("token_ids", [](nb::handle self) { return view(rows_of(self).token_ids, self); })
      .def_prop_ro("positions", [](nb::handle self) { return view(rows_of(self).positions, self); })
      .def_prop_ro("query_indptr", [](nb::handle self) { return view(rows_of(self).query_indptr, self); })
      .def_prop_ro("kv_lens", [](nb::handle self) { return view(rows_of(self).kv_lens, self); })
      .def_prop_ro("out_rows", [](nb::handle self) { return view(rows_of(self).out_rows, self); })
      .def_prop_ro("tables", &tables)
      .def_ro("layer_slice", &BoundRows::layer_slice);
  const auto def_column = [&]<class T, class Value>(const char* name, T, Value value) {
    rows.def_prop_ro(name, [value](nb::handle self) { return sampled_column<T>(self, value); });
  };
  def_column("temperature", float{}, [](const Sampled& s) { return s.params.temperature; });
  def_column("top_k", int32_t{}, [](const Sampled& s) { return s.params.top_k; });
  def_column("top_p", float{}, [](const Sampled& s) { return s.params.top_p; });
  def_column("min_p", float{}, [](const Sampled& s) { return s.params.min_p; });
  def_column("seed", uint64_t{}, [](const Sampled& s) { return s.params.seed; });
  def_column("index", int32_t{}, [](const Sampled& s) { return s.params.index; });
  def_column("position", int32_t{}, [](const Sampled& s) { return s.num_tokens; });
  def_column("repetition_penalty", float{}, [](const Sampled& s) { return s.params.repetition_penalty; });
  def_column("presence_penalty", float{}, [](const Sampled& s) { return s.params.presence_penalty; });
  def_column("frequency_penalty", float{}, [](const Sampled& s) { return s.params.frequency_penalty; });
  def_column("num_prompt_tokens", int32_t{}, [](const Sampled& s) { return s.num_prompt_tokens; });
  def_column("num_tokens", int32_t{}, [](const Sampled& s) { return s.num_tokens; });
  rows.def_prop_ro("history",
                   [](nb::handle self) {
                     const auto& storage = rows_of(self).storage;
                     const size_t num_ids = size_t(storage->num_slots) * size_t(storage->max_tokens);
                     return view<int32_t>(storage->tokens.get(), num_ids, keep(storage));
                   })
      .def_prop_ro("history_offsets", [](nb::handle self) {
        const int64_t max_tokens = rows_of(self).storage->max_tokens;
        return sampled_column<int64_t>(self, [=](const Sampled& s) { return s.slot * max_tokens; });
      });
  for (const char* name : {"bias_indptr", "banned_indptr"})
    rows.def_prop_ro(name, [](nb::handle self) {
      return column<int32_t>(rows_of(self).sampled.size() + 1, [](size_t) { return 0; });
    });
  for (const char* name : {"bias_ids", "banned_ids"})
    rows.def_prop_ro(name, [](nb::handle) { return column<int32_t>(0, [](size_t) { return 0; }); });
  rows.def_prop_ro("bias_values", [](nb::handle) { return column<float>(0, [](size_t) { return 0.0f; }); });
  for (const char* name : {"logits_rows", "masks", "logprobs"})
    rows.def_prop_ro(name, [](nb::handle) { return nb::none(); });
}

}  // namespace

void bind_rows(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const ImpossibleStep& e) {
      PyErr_SetString(PyExc_AssertionError, e.what());
    }
  });
  bind_step_rows(m);
  nb::class_<StepDraws>(m, "StepDraws", "What the sampled rows of a StepRows drew: a Samples.")
      .def_prop_ro("token_ids", [](const StepDraws& self) { return drawn_column(self, &SampleDraw::token_id); })
      .def_prop_ro("is_failed", [](const StepDraws& self) { return drawn_column(self, &SampleDraw::is_failed); })
      .def_prop_ro("logprobs", [](nb::handle) { return nb::none(); });
  nb::class_<RowStore>(m, "RowStore",
                       "Tokens, block tables and sampling parameters of sequences, by slot. Raises AssertionError for "
                       "a step that contradicts what is stored.")
      .def(nb::init<int, int, int, int>(), nb::kw_only(), nb::arg("num_groups"), nb::arg("max_tokens"),
           nb::arg("max_blocks"), nb::arg("block_size"))
      .def_prop_ro("num_slots", &RowStore::num_slots)
      .def("grow", &RowStore::grow, nb::arg("num_slots"))
      .def(
          "begin",
          [](RowStore& store, int slot, nb::handle prompt, float temperature, int32_t top_k, float top_p, float min_p,
             float repetition_penalty, float presence_penalty, float frequency_penalty, int32_t index, uint64_t seed) {
            store.begin(slot, ints(prompt),
                        {temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, top_k,
                         index, seed});
          },
          nb::arg("slot"), nb::arg("prompt"), nb::kw_only(), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
          nb::arg("min_p"), nb::arg("repetition_penalty"), nb::arg("presence_penalty"), nb::arg("frequency_penalty"),
          nb::arg("index"), nb::arg("seed"), "A sequence takes the slot, with its prompt and no blocks.")
      .def("clear_blocks", &RowStore::clear_blocks, nb::arg("slot"))
      .def(
          "grant",
          [](RowStore& store, int group, nb::handle slots, nb::handle indptr, nb::handle block_ids) {
            store.grant(group, ints(slots), ints(indptr), ints(block_ids));
          },
          nb::arg("group"), nb::arg("slots"), nb::arg("indptr"), nb::arg("block_ids"))
      .def("gather", &gather, nb::arg("slots"), nb::arg("starts"), nb::arg("num_tokens"), nb::arg("is_sampled"),
           nb::arg("layer_slice").none())
      .def("append", &append, nb::arg("rows"), nb::arg("drawn"),
           "Appends what the sampled rows drew, but for those that failed; the same token ids.")
      .def(
          "tokens",
          [](const RowStore& store, int slot) {
            nb::list found;
            for (const int32_t token_id : store.tokens(slot)) found.append(token_id);
            return nb::tuple(found);
          },
          nb::arg("slot"))
      .def_prop_ro(
          "token_rows",
          [](const RowStore& store) {
            const auto& storage = store.storage();
            return nb::cast(nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>>(
                storage->tokens.get(), {size_t(storage->num_slots), size_t(storage->max_tokens)}, keep(storage)));
          },
          "tokens[num_slots, max_tokens]; of a slot, what its sequence has counts.");
}

}  // namespace ropeway
