// Binds the sampler: takes a SampleBatch (backends/batch.py) apart, checks every index in it, and draws.
#include "bindings_sampler.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "sampler.h"

namespace nb = nanobind;

namespace ropeway {
namespace {

template <class T>
struct Column {
  nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  const T* data() const { return array.data(); }
  int64_t size() const { return int64_t(array.shape(0)); }
  T operator[](int64_t i) const { return array.data()[i]; }
};

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("sample batch: " + what); }

template <class T>
Column<T> column(nb::handle batch, const char* name, int64_t size = -1) {
  Column<T> found;
  if (!nb::try_cast(batch.attr(name), found.array, false)) {
    refuse(std::string(name) + " has the wrong type or is not contiguous");
  }
  if (size >= 0 && found.size() != size) {
    refuse(std::string(name) + " has " + std::to_string(found.size()) + " entries, not " + std::to_string(size));
  }
  return found;
}

void check_ids(const int32_t* ids, int64_t n, int32_t vocab_size, const char* name) {
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      refuse(std::string(name) + " holds token " + std::to_string(ids[i]) + " of a vocabulary of " +
             std::to_string(vocab_size));
    }
  }
}

void check_indptr(const Column<int32_t>& indptr, int64_t num_ids, const char* name) {
  bool is_right = indptr[0] == 0 && indptr[indptr.size() - 1] == num_ids;
  for (int64_t i = 1; i < indptr.size(); ++i) is_right &= indptr[i - 1] <= indptr[i];
  if (!is_right) refuse(std::string(name) + " does not ascend from 0 to " + std::to_string(num_ids));
}

// The columns of a batch of R rows; holds on to their arrays.
struct Columns {
  Column<float> temperature, top_p, min_p, repetition, presence, frequency, bias_values;
  Column<int32_t> top_k, index, position, history, num_prompt, num_tokens, bias_indptr, bias_ids, banned_indptr,
      banned_ids;
  Column<uint64_t> seed;
  Column<int64_t> history_offsets;

  Columns(nb::handle batch, int64_t num_rows)
      : temperature(column<float>(batch, "temperature", num_rows)),
        top_p(column<float>(batch, "top_p", num_rows)),
        min_p(column<float>(batch, "min_p", num_rows)),
        repetition(column<float>(batch, "repetition_penalty", num_rows)),
        presence(column<float>(batch, "presence_penalty", num_rows)),
        frequency(column<float>(batch, "frequency_penalty", num_rows)),
        bias_values(column<float>(batch, "bias_values")),
        top_k(column<int32_t>(batch, "top_k", num_rows)),
        index(column<int32_t>(batch, "index", num_rows)),
        position(column<int32_t>(batch, "position", num_rows)),
        history(column<int32_t>(batch, "history")),
        num_prompt(column<int32_t>(batch, "num_prompt_tokens", num_rows)),
        num_tokens(column<int32_t>(batch, "num_tokens", num_rows)),
        bias_indptr(column<int32_t>(batch, "bias_indptr", num_rows + 1)),
        bias_ids(column<int32_t>(batch, "bias_ids", bias_values.size())),
        banned_indptr(column<int32_t>(batch, "banned_indptr", num_rows + 1)),
        banned_ids(column<int32_t>(batch, "banned_ids")),
        seed(column<uint64_t>(batch, "seed", num_rows)),
        history_offsets(column<int64_t>(batch, "history_offsets", num_rows)) {}

  void check(int32_t vocab_size) const {
    check_indptr(bias_indptr, bias_ids.size(), "bias_indptr");
    check_indptr(banned_indptr, banned_ids.size(), "banned_indptr");
    check_ids(bias_ids.data(), bias_ids.size(), vocab_size, "bias_ids");
    check_ids(banned_ids.data(), banned_ids.size(), vocab_size, "banned_ids");
  }

  SampleRow row(int64_t r, float* logits, int32_t vocab_size) const {
    SampleRow row{};
    row.logits = logits;
    row.vocab_size = vocab_size;
    row.temperature = temperature[r];
    row.top_k = top_k[r];
    row.top_p = top_p[r];
    row.min_p = min_p[r];
    row.seed = seed[r];
    row.index = index[r];
    row.position = position[r];
    row.repetition_penalty = repetition[r];
    row.presence_penalty = presence[r];
    row.frequency_penalty = frequency[r];
    row.bias_ids = bias_ids.data() + bias_indptr[r];
    row.bias_values = bias_values.data() + bias_indptr[r];
    row.num_biases = bias_indptr[r + 1] - bias_indptr[r];
    row.banned_ids = banned_ids.data() + banned_indptr[r];
    row.num_banned = banned_indptr[r + 1] - banned_indptr[r];
    if (!(row.temperature >= 0 && row.top_p > 0 && row.min_p >= 0 && row.min_p <= 1 && row.top_k >= 0)) {
      refuse("row " + std::to_string(r) + " has a parameter out of range");
    }
    if (row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0) {
      set_history(row, r);
      check_ids(row.history, row.num_tokens, vocab_size, "history");
    }
    return row;
  }

 private:
  void set_history(SampleRow& row, int64_t r) const {
    const int64_t offset = history_offsets[r], total = num_tokens[r], prompt = num_prompt[r];
    if (offset < 0 || prompt < 0 || prompt > total || offset + total > history.size()) {
      refuse("row " + std::to_string(r) + " has a history outside the storage");
    }
    row.history = history.data() + offset;
    row.num_prompt_tokens = int32_t(prompt);
    row.num_tokens = int32_t(total);
  }
};

// A numpy array of what `field` gives of each draw.
template <class T, class Field>
auto as_array(const std::vector<SampleDraw>& draws, Field&& field) {
  T* values = new T[draws.size()];
  nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  for (size_t i = 0; i < draws.size(); ++i) values[i] = field(draws[i]);
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(values, {draws.size()}, owner);
}

using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::tuple sample(Sampler& sampler, const Logits& logits, nb::handle batch) {
  const int64_t num_rows = int64_t(logits.shape(0));
  const int32_t vocab_size = sampler.vocab_size();
  if (int64_t(logits.shape(1)) != vocab_size) {
    refuse("logits of " + std::to_string(logits.shape(1)) + " tokens, not " + std::to_string(vocab_size));
  }
  const Columns columns(batch, num_rows);
  std::vector<SampleDraw> draws(static_cast<size_t>(num_rows));
  const int64_t start_ns = steady_ns();
  int64_t end_ns;
  {
    nb::gil_scoped_release released;
    columns.check(vocab_size);
    std::vector<SampleRow> rows;
    rows.reserve(draws.size());
    for (int64_t r = 0; r < num_rows; ++r) rows.push_back(columns.row(r, logits.data() + r * vocab_size, vocab_size));
    sampler.sample(rows, draws.data());
    end_ns = steady_ns();
  }
  sampler.last_call = {end_ns - start_ns, steady_ns() - end_ns};
  return nb::make_tuple(as_array<int32_t>(draws, [](const SampleDraw& draw) { return draw.token_id; }),
                        as_array<bool>(draws, [](const SampleDraw& draw) { return draw.is_failed; }),
                        as_array<uint64_t>(draws, [](const SampleDraw& draw) { return draw.total_weight; }));
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler",
                      "Draws tokens from rows of logits. The definition is backends/reference_sampler.py.")
      .def(
          "__init__",
          [](Sampler* self, ThreadPool& pool, int32_t vocab_size, std::optional<std::string> isa) {
            std::optional<std::string_view> name;
            if (isa) name = *isa;
            new (self) Sampler(select_kernels(name), pool, vocab_size);
          },
          nb::arg("pool"), nb::arg("vocab_size"), nb::arg("isa") = nb::none(), nb::keep_alive<1, 2>())
      .def_prop_ro(
          "last_call",
          [](const Sampler& sampler) {
            return nb::make_tuple(static_cast<double>(sampler.last_call.native_ns) * 1e-9,
                                  static_cast<double>(sampler.last_call.lock_wait_ns) * 1e-9);
          },
          "Of the last sample: seconds without the interpreter lock, then seconds until it was had again.")
      .def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("batch"),
           "Draws one token of each row of logits[R, V], which it changes, as a SampleBatch says. Returns token_ids[R] "
           "int32, is_failed[R] bool and total_weights[R] uint64: the survivors' weights together, 0 for a greedy or "
           "failed row.");
}

}  // namespace ropeway
