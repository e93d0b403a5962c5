// Weighted sums over all tokens whose weights differ from exp(K) only within a window around the row.
//
// Computes: sum_u W[t,u] entry[u], with W[t,u] = exp(w[t,u]) for the keys t - left .. t + right, and 1 elsewhere;
//           causal: u <= t.
// Cost:     one multiply-add for each entry of a window, and a few for each key.
// Method:   a tile of kRows rows takes every key that is in the window of one of them into a small product of a tile of
//           weights with the keys' entries. Where such a key is outside the window of another row, its weight there is
//           that of bias 0. All other keys enter as sums: those before the window run along with the tiles, those after
//           it come from a backward scan made beforehand (segments.h). Entries of a window wait in a buffer
//           (entries.h): each is computed once per task.
// Numerics: every term is positive. (The shorter form, the sum over all keys plus exp(w) - 1 times those in the window,
//           cancels where a dominating key has a very negative bias.) m, per channel, is the largest key of the
//           document; in causal form the largest so far, updated between blocks of rows.
// See:      aft_local.cc, aft_conv.cc
//
// Op, which check_windowed_op() checks:
//
// | member                                     | meaning                                                             |
// |--------------------------------------------|---------------------------------------------------------------------|
// | int kRows                                  | rows of a tile                                                      |
// | int kVecs                                  | vectors of an entry in a panel: 1, 2 or 4                           |
// | int64_t kBufferBlocks                      | row blocks whose entries the buffer holds beside a window's; with   |
// |                                            | more blocks entries move less often                                 |
// | int64_t panels                             | panels of channels                                                  |
// | int64_t left, right                        | keys t - left .. t + right are in the window of row t               |
// | int64_t memory_floats()                    | scratch memory of compute_block()                                   |
// | update_maximum(b, first, last, maximum)    | raises maximum [panel, lane] to cover the keys [first, last)        |
// | for_entries(b, first, last, maximum, use)  | calls use(panel, key, keys, entry_of) for pieces of [first, last);  |
// |                                            | entry_of(i, entry) computes the entry of key + i, i < keys          |
// | compute_block(RowBlock<kVecs>)             | computes and writes the output of a block of rows                   |
// | clear_rows(b, begin, end)                  | writes zeros to the rows [begin, end)                               |
#pragma once

#include <type_traits>

#include "sums/entries.h"
#include "sums/segments.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

// A block of rows of a document, for compute_block().
template <int kVecs>
struct RowBlock {
  int64_t document, begin, end;  // its rows
  int64_t last_key;              // after its last window
  const EntryBuffer<kVecs>& entries;
  int64_t tiles;
  const float* outside_sums;  // [panel, tile]: the sums over all keys outside of the tile's windows
  const float* maximum;       // [panel, lane]: the keys' largest, which entries and sums are relative to
  float* memory;              // memory_floats() of the operator
};

// A callable with the signature of for_entries()'s use(), for the check of an Op.
struct AnyUse {
  template <class EntryOf>
  void operator()(int64_t panel, int64_t key, int64_t keys, const EntryOf& entry_of) const;
};

template <class Op>
constexpr void check_windowed_op() {
  static_assert(Op::kRows > 0, "kRows: a tile has rows");
  static_assert(Op::kVecs == 1 || Op::kVecs == 2 || Op::kVecs == 4, "kVecs: sums of 4 vectors are taken together");
  static_assert(Op::kBufferBlocks > 0, "kBufferBlocks: the buffer holds the entries of a block and its windows");
  static_assert(std::is_same_v<decltype(Op::panels), int64_t>, "int64_t panels");
  static_assert(std::is_same_v<decltype(Op::left), int64_t>, "int64_t left");
  static_assert(std::is_same_v<decltype(Op::right), int64_t>, "int64_t right");
  static_assert(std::is_same_v<decltype(&Op::memory_floats), int64_t (Op::*)() const>, "int64_t memory_floats() const");
  static_assert(std::is_same_v<decltype(&Op::update_maximum), void (Op::*)(int64_t, int64_t, int64_t, float*) const>,
                "void update_maximum(int64_t b, int64_t first, int64_t last, float* maximum) const");
  static_assert(std::is_same_v<decltype(&Op::template for_entries<AnyUse>),
                               void (Op::*)(int64_t, int64_t, int64_t, const float*, const AnyUse&) const>,
                "void for_entries(int64_t b, int64_t first, int64_t last, const float* maximum, const Use& use) const");
  static_assert(std::is_same_v<decltype(&Op::compute_block), void (Op::*)(const RowBlock<Op::kVecs>&) const>,
                "void compute_block(const RowBlock<kVecs>& block) const");
  static_assert(std::is_same_v<decltype(&Op::clear_rows), void (Op::*)(int64_t, int64_t, int64_t) const>,
                "void clear_rows(int64_t b, int64_t begin, int64_t end) const");
}

template <class Op>
class WindowedSums {
 public:
  WindowedSums(const Op& op, const Sequence& sequence)
      : op_(op), s_(sequence), segments_(op, sequence), panels_(segments_.panels()), rows_(segments_.block_rows()) {
    check_windowed_op<Op>();
  }

  void run(const Parallel& parallel) const {
    segments_.compute(parallel);
    parallel_for(parallel, s_.batch * segments_.tasks(),
                 [&](int64_t task) { compute_rows(task / segments_.tasks(), task % segments_.tasks()); });
  }

 private:
  using Entries = EntryBuffer<Op::kVecs>;
  using Record = typename Segments<Op>::Record;
  static constexpr int64_t kUnit = kEntryFloats<Op::kVecs>;

  void enter_keys(int64_t b, int64_t first, int64_t last, const float* maximum, const Entries& entries) const {
    op_.for_entries(b, first, last, maximum,
                    [&](int64_t panel, int64_t u, int64_t keys, const auto& entry_of) AFT_LAMBDA_INLINE {
                      float* to = entries.at(panel, u);
                      Vec entry[Op::kVecs];
                      for (int64_t k = 0; k < keys; ++k) {
                        entry_of(k, entry);
                        for (int v = 0; v < Op::kVecs; ++v) store(to + k * kUnit + v * kLanes, entry[v]);
                      }
                    });
  }

  // Causal: rescales the entries of keys before `first`, and the sums, to the largest key before `last`.
  void update_maximum(int64_t b, const Entries& entries, int64_t first, int64_t last, const Record& before,
                      float* raised) const {
    __builtin_memcpy(raised, before.maximum, panels_ * kLanes * sizeof(float));
    op_.update_maximum(b, first, last, raised);
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const Vec from = load(before.maximum + panel * kLanes), to = load(raised + panel * kLanes);
      if (!any((IntVec)(from != to))) continue;
      const Vec factor = exp(from - to);
      multiply_entry<Op::kVecs>(before.sums + panel * kUnit, factor);
      for (int64_t u = entries.first; u < first; ++u) multiply_entry<Op::kVecs>(entries.at(panel, u), factor);
      store(before.maximum + panel * kLanes, to);
    }
  }

  // The rows of one task, block by block.
  void compute_rows(int64_t b, int64_t task) const {
    const int64_t length = length_of(s_, b), capacity = (Op::kBufferBlocks * rows_ + op_.left + op_.right) | 1;
    const int64_t tiles = rows_ / Op::kRows, begin = task * segments_.task_rows(), end = begin + segments_.task_rows();
    float* memory =
        task_memory(panels_ * capacity * kUnit + tiles * segments_.width() + panels_ * kLanes + op_.memory_floats());
    float* outside_sums = memory + panels_ * capacity * kUnit;
    float* raised = outside_sums + tiles * segments_.width();

    const Record before = segments_.start(b, task);
    const int64_t first_row = min(begin, length), last_row = min(end, length);
    int64_t filled = max(0, first_row - op_.left);  // keys before the entries are in the sums
    Entries entries{memory, capacity, filled, filled};
    const int64_t first_unsummed = min(filled, segments_.first_unsummed(task));
    if (s_.causal) update_maximum(b, entries, first_unsummed, filled, before, raised);
    segments_.add_keys(b, first_unsummed, filled, before);

    for (int64_t t = first_row; t < last_row; t += rows_) {
      const int64_t last_key = min(length, t + rows_ + op_.right);
      if (s_.causal) update_maximum(b, entries, filled, last_key, before, raised);
      enter_keys(b, filled, last_key, before.maximum, entries);
      filled = last_key;
      const int64_t next = max(0, min(last_key, t + rows_ - op_.left));
      sum_outside(entries, t, next, last_key, before.sums, segments_.sums_after(b, t / rows_), outside_sums);
      op_.compute_block({b, t, min(t + rows_, last_row), last_key, entries, tiles, outside_sums, before.maximum,
                         raised + panels_ * kLanes});
      entries.advance(next, last_key, rows_, panels_);
    }
    op_.clear_rows(b, max(length, begin), min(s_.tokens, end));
  }

  // outside_sums[panel, tile] = the sums of all keys before and, unless causal, after the windows of a tile of the
  // block at row t; `before` takes up the entries of keys before `next`. The block's own keys are summed apart, so that
  // the rounding error grows with the number of blocks. Some panels together: in one alone, each addition would wait
  // for the one before.
  void sum_outside(const Entries& entries, int64_t t, int64_t next, int64_t last_key, float* before, const float* after,
                   float* outside_sums) const {
    constexpr int kPanels = 4 / Op::kVecs;
    int64_t panel = 0;
    for (; panel + kPanels <= panels_; panel += kPanels)
      sum_outside<kPanels>(entries, panel, t, next, last_key, before, after, outside_sums);
    for (; panel < panels_; ++panel) sum_outside<1>(entries, panel, t, next, last_key, before, after, outside_sums);
  }

  template <int kPanels>
  void sum_outside(const Entries& entries, int64_t first_panel, int64_t t, int64_t next, int64_t last_key,
                   float* before, const float* after, float* outside_sums) const {
    constexpr int kSums = kPanels * Op::kVecs;
    const int64_t tiles = rows_ / Op::kRows, at = first_panel * kUnit;
    Vec sum[kSums] = {}, rest[kSums];  // of the block's own keys, and of all others
    const auto add = [&](int64_t begin, int64_t end) AFT_LAMBDA_INLINE {
      Vec piece[kSums] = {};
      for (int64_t key = begin; key < end; ++key)
        for (int i = 0; i < kSums; ++i)
          piece[i] += load(entries.at(first_panel + i / Op::kVecs, key) + i % Op::kVecs * kLanes);
      for (int i = 0; i < kSums; ++i) sum[i] += piece[i];
    };
    const auto of_tile = [&](int i, int64_t tile) AFT_LAMBDA_INLINE {
      return outside_sums + ((first_panel + i / Op::kVecs) * tiles + tile) * kUnit + i % Op::kVecs * kLanes;
    };
    for (int i = 0; i < kSums; ++i) rest[i] = load(before + at + i * kLanes);
    int64_t key = entries.first;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t end = max(key, min(last_key, t + tile * Op::kRows - op_.left));
      add(key, end);
      for (int i = 0; i < kSums; ++i) store(of_tile(i, tile), rest[i] + sum[i]);
      key = end;
    }
    add(key, next);
    for (int i = 0; i < kSums; ++i) store(before + at + i * kLanes, rest[i] + sum[i]);
    if (s_.causal) return;
    for (int i = 0; i < kSums; ++i) {
      sum[i] = Vec{};
      rest[i] = load(after + at + i * kLanes);
    }
    key = last_key;
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      const int64_t begin = min(key, t + (tile + 1) * Op::kRows + op_.right);
      add(begin, key);
      for (int i = 0; i < kSums; ++i) store(of_tile(i, tile), load(of_tile(i, tile)) + (rest[i] + sum[i]));
      key = begin;
    }
  }

  const Op& op_;
  const Sequence& s_;
  const Segments<Op> segments_;
  const int64_t panels_, rows_;  // rows of a block
};

}  // namespace aft::AFT_ISA
