// Weighted sums over all tokens whose weights differ from exp(K) only within a window around the row: the
// common course of AFT-local and AFT-conv.
//
// A tile of kRows rows takes every key that is in the window of one of them into a small product of a weight
// tile with the keys' entries (exp(K - m) V and exp(K - m)); where such a key is outside the window of another
// row its weight there is that of bias 0. All other keys enter as sums: those before the window run along
// with the tiles, those after it come from a backward scan made beforehand. Every term is positive. (The
// shorter form, the sum over all keys plus exp(w) - 1 times those in the window, cancels where a dominating
// key has a very negative bias.)
//
// m, per channel, is the largest key of the document; in causal form the largest so far, raised between
// granules of rows. A granule finds the entries of its windows in memory: each is computed once per task.
//
// Op supplies: kRows, kVecs (vectors per entry and panel), kGranules (whose entries there is room for beside a
// window's: the more, the more seldom are they moved), panels, left and right (keys t - left .. t + right
// are in the window), raise(b, first, last, reference), for_entries(b, first, last, reference, use(panel, key, keys,
// entry_of(i, entry))),
// memory_floats() and granule(Granule); see AFT-local.
#pragma once

#include "mechanisms/shared/running_softmax.h"
#include "simd/compensated_sum.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

// Keys whose entries are made panel by panel: few, so that memory is read in its order.
constexpr int64_t kKeyBlock = 8;

// The entries of the keys from `first` on, panel by panel.
template <int kVecs>
struct Entries {
  static constexpr int64_t kUnit = kVecs * kLanes;
  float* data;
  int64_t capacity, origin, first;  // origin: the key at `data`

  AFT_INLINE float* at(int64_t panel, int64_t key) const { return data + (panel * capacity + key - origin) * kUnit; }

  // Forgets the keys before `to` of those before `end`, and has room for so many more.
  void advance(int64_t to, int64_t end, int64_t room, int64_t panels) {
    first = to;
    if (end + room <= origin + capacity) return;
    for (int64_t panel = 0; panel < panels; ++panel)
      __builtin_memmove(at(panel, origin), at(panel, to), (end - to) * kUnit * sizeof(float));
    origin = to;
  }
};

// What an operator needs for the rows of one granule of a document.
template <int kVecs>
struct Granule {
  int64_t document, begin, end;  // its rows
  int64_t last_key;              // after its last window
  const Entries<kVecs>& entries;
  int64_t tiles;
  const float* outside;  // [panel, tile]: the sums over all keys outside of the tile's windows
  float* memory;         // memory_floats() of the operator
};

template <class Op>
class Windowed {
 public:
  Windowed(const Op& op, const Sequence& sequence, const Parallel& parallel)
      : op_(op), s_(sequence), parallel_(parallel), panels_(op.panels), width_(op.panels * kUnit) {
    const int64_t record = width_ + panels_ * kLanes;  // sums and reference
    granule_ = round_up(max(kGranule, ceil_div(s_.tokens * record, kRecordFloats)), Op::kRows);
    granules_ = ceil_div(s_.tokens, granule_);
    granules_per_task_ = ceil_div(granules_, 32);
    tasks_ = ceil_div(granules_, granules_per_task_);
  }

  void run() {
    const int64_t record = width_ + panels_ * kLanes;
    Scratch scratch(s_.batch * (granules_ + 1 + tasks_) * record);
    segments_ = scratch.data();
    starts_ = segments_ + s_.batch * (granules_ + 1) * record;
    parallel_for(parallel_, s_.batch * (granules_ + 1), 2 * s_.batch * s_.tokens * s_.channels,
                 [&](int64_t task) { sum_segment(task); });
    parallel_for(parallel_, s_.batch * panels_, s_.batch * granules_ * record,
                 [&](int64_t task) { scan(task / panels_, task % panels_); });
    parallel_for(parallel_, s_.batch * tasks_, [&](int64_t task) { rows(task / tasks_, task % tasks_); });
  }

 private:
  using EntriesOfOp = Entries<Op::kVecs>;
  static constexpr int64_t kUnit = EntriesOfOp::kUnit;
  static constexpr int64_t kGranule = 96;
  static constexpr int64_t kRecordFloats = 3 << 18;  // 3 MiB for the segments

  struct Record {
    float *sums, *reference;
  };
  Record segment(int64_t b, int64_t i) const { return record(segments_, b * (granules_ + 1) + i); }
  Record start(int64_t b, int64_t i) const { return record(starts_, b * tasks_ + i); }
  Record record(float* base, int64_t i) const {
    float* sums = base + i * (width_ + panels_ * kLanes);
    return {sums, sums + width_};
  }

  // Segment i ends where the windows of granule i's last row end: at key boundary(i + 1).
  int64_t boundary(int64_t i) const { return i == 0 ? 0 : i * granule_ - granule_ + op_.right; }

  void add_keys(int64_t b, int64_t first, int64_t last, const Record& to) const {
    op_.for_entries(b, first, last, to.reference,
                    [&](int64_t panel, int64_t, int64_t keys, const auto& entry_of) AFT_LAMBDA_INLINE {
                      Vec sums[Op::kVecs] = {}, entry[Op::kVecs];
                      for (int64_t k = 0; k < keys; ++k) {
                        entry_of(k, entry);
                        for (int v = 0; v < Op::kVecs; ++v) sums[v] += entry[v];
                      }
                      for (int v = 0; v < Op::kVecs; ++v) {
                        float* sum = to.sums + panel * kUnit + v * kLanes;
                        store(sum, load(sum) + sums[v]);
                      }
                    });
  }

  void enter_keys(int64_t b, int64_t first, int64_t last, const float* reference, const EntriesOfOp& entries) const {
    op_.for_entries(b, first, last, reference,
                    [&](int64_t panel, int64_t u, int64_t keys, const auto& entry_of) AFT_LAMBDA_INLINE {
                      float* to = entries.at(panel, u);
                      Vec entry[Op::kVecs];
                      for (int64_t k = 0; k < keys; ++k) {
                        entry_of(k, entry);
                        for (int v = 0; v < Op::kVecs; ++v) store(to + k * kUnit + v * kLanes, entry[v]);
                      }
                    });
  }

  void clear(const Record& record) const {
    __builtin_memset(record.sums, 0, width_ * sizeof(float));
    for (int64_t i = 0; i < panels_ * kLanes; ++i) record.reference[i] = kNoKey;
  }

  void sum_segment(int64_t task) const {
    const int64_t b = task / (granules_ + 1), i = task % (granules_ + 1), length = length_of(s_, b);
    const Record to = segment(b, i);
    clear(to);
    const int64_t first = min(length, boundary(i)), last = min(length, boundary(i + 1));
    op_.raise(b, first, last, to.reference);
    add_keys(b, first, last, to);
  }

  AFT_INLINE static void multiply(float* sums, Vec factor) {
    for (int v = 0; v < Op::kVecs; ++v) store(sums + v * kLanes, load(sums + v * kLanes) * factor);
  }

  // Of the segments a task's rows have behind all their windows; the next keys are less than a segment.
  int64_t segments_before(int64_t task) const {
    const int64_t first_key = task * granules_per_task_ * granule_ - op_.left;
    if (first_key < boundary(1)) return 0;
    return min(granules_ + 1, (first_key - op_.right) / granule_ + 1);
  }

  // One panel of one document: the sums before each task, and segment i becomes the sum of the segments after
  // i, relative to the largest key of all.
  void scan(int64_t b, int64_t panel) const {
    Vec m = splat(kNoKey), sum[Op::kVecs] = {}, lost[Op::kVecs] = {};
    int64_t task = 0;
    for (int64_t i = 0; i <= granules_ + 1; ++i) {
      for (; task < tasks_ && segments_before(task) == i; ++task) {
        for (int v = 0; v < Op::kVecs; ++v) store(start(b, task).sums + panel * kUnit + v * kLanes, sum[v]);
        store(start(b, task).reference + panel * kLanes, m);
      }
      if (i > granules_) break;
      const Record from = segment(b, i);
      const Vec own = load(from.reference + panel * kLanes), raised = maximum_of(m, own);
      const Vec scale = exp(m - raised), own_scale = exp(own - raised);
      for (int v = 0; v < Op::kVecs; ++v) {
        sum[v] *= scale;
        lost[v] *= scale;
        add_compensated(sum[v], lost[v], load(from.sums + panel * kUnit + v * kLanes) * own_scale);
      }
      m = raised;
    }
    if (s_.causal) return;

    for (int64_t i = 0; i < tasks_; ++i) {
      const Record to = start(b, i);
      multiply(to.sums + panel * kUnit, exp(load(to.reference + panel * kLanes) - m));
      store(to.reference + panel * kLanes, m);
    }
    Vec after[Op::kVecs] = {}, after_lost[Op::kVecs] = {};
    for (int64_t i = granules_; i >= 0; --i) {
      const Record own = segment(b, i);
      multiply(own.sums + panel * kUnit, exp(load(own.reference + panel * kLanes) - m));
      for (int v = 0; v < Op::kVecs; ++v) {
        float* sums = own.sums + panel * kUnit + v * kLanes;
        const Vec without = after[v];
        add_compensated(after[v], after_lost[v], load(sums));
        store(sums, without);
      }
    }
  }

  // Causal: makes the entries of keys before `first` and the sums relative to the largest key below `last`.
  void raise_reference(int64_t b, const EntriesOfOp& entries, int64_t first, int64_t last, const Record& before,
                       float* raised) const {
    __builtin_memcpy(raised, before.reference, panels_ * kLanes * sizeof(float));
    op_.raise(b, first, last, raised);
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const Vec from = load(before.reference + panel * kLanes), to = load(raised + panel * kLanes);
      if (!any((IntVec)(from != to))) continue;
      const Vec factor = exp(from - to);
      multiply(before.sums + panel * kUnit, factor);
      for (int64_t u = entries.first; u < first; ++u) multiply(entries.at(panel, u), factor);
      store(before.reference + panel * kLanes, to);
    }
  }

  // The rows of one task, granule by granule.
  void rows(int64_t b, int64_t task) const {
    const int64_t length = length_of(s_, b), capacity = (Op::kGranules * granule_ + op_.left + op_.right) | 1;
    const int64_t tiles = granule_ / Op::kRows;
    float* memory = task_memory(panels_ * capacity * kUnit + tiles * width_ + panels_ * kLanes +
                                op_.memory_floats());
    float* outside = memory + panels_ * capacity * kUnit;
    float* raised = outside + tiles * width_;

    const Record before = start(b, task);
    const int64_t first_row = min(task * granules_per_task_ * granule_, length);
    const int64_t last_row = min(first_row + granules_per_task_ * granule_, length);
    int64_t filled = max(0, first_row - op_.left);  // keys before the entries are in the sums
    EntriesOfOp entries{memory, capacity, filled, filled};
    const int64_t first_unsummed = min(filled, boundary(segments_before(task)));
    if (s_.causal) raise_reference(b, entries, first_unsummed, filled, before, raised);
    add_keys(b, first_unsummed, filled, before);

    for (int64_t g = first_row; g < last_row; g += granule_) {
      const int64_t last_key = min(length, g + granule_ + op_.right);
      if (s_.causal) raise_reference(b, entries, filled, last_key, before, raised);
      enter_keys(b, filled, last_key, before.reference, entries);
      filled = last_key;
      const int64_t next = max(0, min(last_key, g + granule_ - op_.left));
      sum_outside(entries, g, next, last_key, before.sums, segment(b, g / granule_ + 1).sums, outside);
      op_.granule({b, g, min(g + granule_, last_row), last_key, entries, tiles, outside, raised + panels_ * kLanes});
      entries.advance(next, last_key, granule_, panels_);
    }
    op_.clear_rows(b, max(length, task * granules_per_task_ * granule_),
                   min(s_.tokens, (task + 1) * granules_per_task_ * granule_));
  }

  // outside[panel, tile] = the sums of all keys before and, unless causal, after the windows of the granule's
  // tile; `before` takes up the entries of keys before `next`. The granule's own keys are summed apart, so that the
  // rounding error grows with the number of granules. Some panels together: of one alone, each addition would wait for
  // the one before.
  void sum_outside(const EntriesOfOp& entries, int64_t g, int64_t next, int64_t last_key, float* before,
                   const float* after, float* outside) const {
    constexpr int kTogether = 4 / Op::kVecs;
    int64_t panel = 0;
    for (; panel + kTogether <= panels_; panel += kTogether)
      sum_outside<kTogether>(entries, panel, g, next, last_key, before, after, outside);
    for (; panel < panels_; ++panel) sum_outside<1>(entries, panel, g, next, last_key, before, after, outside);
  }

  template <int kPanels>
  void sum_outside(const EntriesOfOp& entries, int64_t first_panel, int64_t g, int64_t next, int64_t last_key,
                   float* before, const float* after, float* outside) const {
    constexpr int kSums = kPanels * Op::kVecs;
    const int64_t tiles = granule_ / Op::kRows, at = first_panel * kUnit;
    Vec sum[kSums] = {}, rest[kSums];  // of the granule's own keys, and of all others
    const auto add = [&](int64_t begin, int64_t end) AFT_LAMBDA_INLINE {
      Vec block[kSums] = {};
      for (int64_t key = begin; key < end; ++key)
        for (int i = 0; i < kSums; ++i)
          block[i] += load(entries.at(first_panel + i / Op::kVecs, key) + i % Op::kVecs * kLanes);
      for (int i = 0; i < kSums; ++i) sum[i] += block[i];
    };
    const auto of_tile = [&](int i, int64_t tile) AFT_LAMBDA_INLINE {
      return outside + ((first_panel + i / Op::kVecs) * tiles + tile) * kUnit + i % Op::kVecs * kLanes;
    };
    for (int i = 0; i < kSums; ++i) rest[i] = load(before + at + i * kLanes);
    int64_t key = entries.first;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t end = max(key, min(last_key, g + tile * Op::kRows - op_.left));
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
      const int64_t begin = min(key, g + (tile + 1) * Op::kRows + op_.right);
      add(begin, key);
      for (int i = 0; i < kSums; ++i) store(of_tile(i, tile), load(of_tile(i, tile)) + (rest[i] + sum[i]));
      key = begin;
    }
  }

  const Op& op_;
  const Sequence& s_;
  const Parallel& parallel_;
  int64_t panels_, width_, granule_, granules_, granules_per_task_, tasks_;
  float *segments_ = nullptr, *starts_ = nullptr;
};

}  // namespace aft::AFT_ISA
