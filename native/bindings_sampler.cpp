// Binds the sampler: takes a SampleBatch (backends/batch.py) apart, checks every index in it, and draws.
#include "bindings_sampler.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings_arrays.h"
#include "bindings_rows.h"
#include "isa.h"
#include "released_call.h"
#include "sampler.h"

namespace nb = nanobind;

namespace ropeway {
namespace {

template <class T>
struct Column {
  Array<T> array;
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

bool has_penalty(const SampleRow& row) {
  return row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0;
}

void check_row(const SampleRow& row, int64_t r) {
  if (!(row.temperature >= 0 && row.top_p > 0 && row.min_p >= 0 && row.min_p <= 1 && row.top_k >= 0))
    refuse("row " + std::to_string(r) + " has a parameter out of range");
  if (has_penalty(row)) check_ids(row.history, row.num_tokens, row.vocab_size, "history");
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
    if (has_penalty(row)) set_history(row, r);
    check_row(row, r);
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

// A column of a result: numpy's array of it, and where its values are.
template <class T>
struct Output {
  T* values;
  nb::object array;

  explicit Output(size_t size) {
    std::unique_ptr<T[]> owned(new T[size]);
    values = owned.get();
    array = own(std::move(owned), {size});
  }
};

using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_width(const Logits& logits, int32_t vocab_size) {
  if (int64_t(logits.shape(1)) != vocab_size) {
    refuse("logits of " + std::to_string(logits.shape(1)) + " tokens, not " + std::to_string(vocab_size));
  }
}

// The columns of Logprobs (backends/batch.py) for L rows of num_top alternatives each.
class LogprobColumns {
 public:
  LogprobColumns(int64_t num_rows, int32_t num_top)
      : num_rows_(size_t(num_rows)),
        num_top_(num_top),
        logprobs_(new float[num_rows_]),
        ranks_(new int32_t[num_rows_]),
        top_ids_(new int32_t[num_rows_ * num_top]),
        top_logprobs_(new float[num_rows_ * num_top]) {}

  LogprobRow row(int64_t i, int32_t vocab_size) {
    LogprobRow row{};
    row.vocab_size = vocab_size;
    row.num_top = num_top_;
    row.logprob = logprobs_.get() + i;
    row.rank = ranks_.get() + i;
    row.top_ids = top_ids_.get() + i * num_top_;
    row.top_logprobs = top_logprobs_.get() + i * num_top_;
    return row;
  }

  nb::tuple release() {
    const size_t num_top = size_t(num_top_);
    return nb::make_tuple(own(std::move(logprobs_), {num_rows_}), own(std::move(ranks_), {num_rows_}),
                          own(std::move(top_ids_), {num_rows_, num_top}),
                          own(std::move(top_logprobs_), {num_rows_, num_top}));
  }

 private:
  const size_t num_rows_;
  const int32_t num_top_;
  std::unique_ptr<float[]> logprobs_;
  std::unique_ptr<int32_t[]> ranks_, top_ids_;
  std::unique_ptr<float[]> top_logprobs_;
};

int32_t num_top_of(nb::handle wanted, int32_t vocab_size) {
  const int32_t num_top = nb::cast<int32_t>(wanted.attr("num_top"));
  if (num_top < 0) refuse("num_top is " + std::to_string(num_top));
  return num_top < vocab_size ? num_top : vocab_size;
}

// Which row of the logits each row of a batch reads.
struct LogitsRows {
  std::optional<Column<int32_t>> rows;
  int64_t num_rows;

  LogitsRows(nb::handle batch, int64_t num_logits) : num_rows(num_logits) {
    if (batch.attr("logits_rows").is_none()) return;
    rows = column<int32_t>(batch, "logits_rows");
    check_rows(*rows, num_rows, "logits_rows");
    num_rows = rows->size();
  }
  int64_t operator[](int64_t r) const { return rows ? (*rows)[r] : r; }

  static void check_rows(const Column<int32_t>& rows, int64_t num_rows, const char* name) {
    for (int64_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0 || rows[i] >= num_rows || (i && rows[i] <= rows[i - 1])) {
        refuse(std::string(name) + " do not ascend within " + std::to_string(num_rows) + " rows");
      }
    }
  }
};

// Masks of a batch: words[M][ceil(V / 32)] for M of its rows.
struct Masks {
  nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> words;
  Column<int32_t> rows;

  Masks(nb::handle masks, int64_t num_rows, int32_t vocab_size) : rows(column<int32_t>(masks, "rows")) {
    LogitsRows::check_rows(rows, num_rows, "masks.rows");
    if (!nb::try_cast(masks.attr("words"), words, false) || int64_t(words.shape(0)) != rows.size() ||
        int64_t(words.shape(1)) != (vocab_size + 31) / 32) {
      refuse("masks.words is not one row of " + std::to_string((vocab_size + 31) / 32) + " uint32 per row");
    }
  }
};

// What was drawn, as columns.
struct Drawn {
  std::vector<SampleDraw> draws;
  Output<int32_t> token_ids;
  Output<bool> is_failed;
  Output<uint64_t> total_weights;

  explicit Drawn(size_t num_rows)
      : draws(num_rows), token_ids(num_rows), is_failed(num_rows), total_weights(num_rows) {}

  void fill_columns() {
    for (size_t i = 0; i < draws.size(); ++i) {
      token_ids.values[i] = draws[i].token_id;
      is_failed.values[i] = draws[i].is_failed;
      total_weights.values[i] = draws[i].total_weight;
    }
  }
  nb::tuple columns(nb::object logprobs) {
    return nb::make_tuple(token_ids.array, is_failed.array, total_weights.array, std::move(logprobs));
  }
};

StepDraws draw_rows(Sampler& sampler, const Logits& logits, const BoundRows& bound) {
  const StepRows& batch = bound.rows;
  const int32_t vocab_size = sampler.vocab_size();
  check_width(logits, vocab_size);
  if (logits.shape(0) != batch.sampled.size())
    refuse("logits of " + std::to_string(logits.shape(0)) + " rows, not " + std::to_string(batch.sampled.size()));
  StepDraws drawn{std::vector<SampleDraw>(batch.sampled.size())};
  sampler.last_call = call_released([&] {
    std::vector<SampleRow> rows;
    rows.reserve(batch.sampled.size());
    for (int64_t r = 0; r < std::ssize(batch.sampled); ++r) {
      rows.push_back(batch.sample_row(r, logits.data() + r * vocab_size, vocab_size));
      check_row(rows.back(), r);
    }
    std::vector<LogprobRow> no_logprobs;
    sampler.sample(rows, no_logprobs, drawn.draws.data());
  });
  return drawn;
}

nb::tuple draw(Sampler& sampler, const Logits& logits, nb::handle batch) {
  const int32_t vocab_size = sampler.vocab_size();
  check_width(logits, vocab_size);
  const LogitsRows logits_rows(batch, int64_t(logits.shape(0)));
  const Columns columns(batch, logits_rows.num_rows);
  std::optional<Masks> masks;
  if (!batch.attr("masks").is_none()) masks.emplace(batch.attr("masks"), logits_rows.num_rows, vocab_size);
  std::optional<Column<int32_t>> logprob_rows;
  std::optional<LogprobColumns> found;
  if (const nb::object wanted = batch.attr("logprobs"); !wanted.is_none()) {
    logprob_rows = column<int32_t>(wanted, "rows");
    LogitsRows::check_rows(*logprob_rows, logits_rows.num_rows, "logprobs.rows");
    found.emplace(logprob_rows->size(), num_top_of(wanted, vocab_size));
  }
  Drawn drawn(size_t(logits_rows.num_rows));
  sampler.last_call = call_released([&] {
    columns.check(vocab_size);
    std::vector<SampleRow> rows;
    rows.reserve(drawn.draws.size());
    for (int64_t r = 0; r < logits_rows.num_rows; ++r)
      rows.push_back(columns.row(r, logits.data() + logits_rows[r] * vocab_size, vocab_size));
    if (masks)
      for (int64_t i = 0; i < masks->rows.size(); ++i)
        rows[masks->rows[i]].mask = masks->words.data() + i * int64_t(masks->words.shape(1));
    std::vector<LogprobRow> logprobs(found ? drawn.draws.size() : 0);
    for (int64_t i = 0; found && i < logprob_rows->size(); ++i)
      logprobs[(*logprob_rows)[i]] = found->row(i, vocab_size);
    sampler.sample(rows, logprobs, drawn.draws.data());
    drawn.fill_columns();
  });
  return drawn.columns(found ? nb::object(found->release()) : nb::none());
}

nb::tuple score(Sampler& sampler, const Logits& logits, nb::handle batch) {
  const int32_t vocab_size = sampler.vocab_size();
  check_width(logits, vocab_size);
  const Column<int32_t> rows = column<int32_t>(batch, "rows");
  const Column<int32_t> token_ids = column<int32_t>(batch, "token_ids", rows.size());
  LogitsRows::check_rows(rows, int64_t(logits.shape(0)), "rows");
  check_ids(token_ids.data(), token_ids.size(), vocab_size, "token_ids");
  LogprobColumns found(rows.size(), num_top_of(batch, vocab_size));
  {
    nb::gil_scoped_release released;
    std::vector<LogprobRow> wanted;
    for (int64_t i = 0; i < rows.size(); ++i) {
      wanted.push_back(found.row(i, vocab_size));
      wanted.back().logits = logits.data() + int64_t{rows[i]} * vocab_size;
      wanted.back().token_id = token_ids[i];
    }
    sampler.score(wanted);
  }
  return found.release();
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
      .def("draw_rows", &draw_rows, nb::arg("logits").noconvert(), nb::arg("rows"),
           "Draws one token of each row of logits[R, V], which it changes, as a StepRows says.")
      .def("draw", &draw, nb::arg("logits").noconvert(), nb::arg("batch"),
           "Draws one token of each row of logits[R, V], which it changes, as a SampleBatch says: "
           "token_ids[R] int32, is_failed[R] bool, total_weights[R] uint64 (the survivors' weights together, 0 for a "
           "greedy or failed row), and the columns of Logprobs where the batch asks for them, else None.")
      .def("score", &score, nb::arg("logits").noconvert(), nb::arg("batch"),
           "The columns of Logprobs for a ScoreBatch over rows of raw logits[R, V].");
}

}  // namespace ropeway
