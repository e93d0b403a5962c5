// Sums of entries over segments of a document's keys, and their scans: the sums before and after the windows.
//
// Rows go in blocks of block_rows(), blocks in tasks. Segment i ends where the windows of block i end, so that the
// sums after a block are those of whole segments, and the sums before a task nearly so.
//
// Numerics: every sum is relative to a maximum per channel of the keys it holds. The scans are compensated
// (compensated_sum.h), since a document may have as many segments as it has blocks.
#pragma once

#include "sums/entries.h"
#include "sums/running_softmax.h"
#include "simd/compensated_sum.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

// Op: see windowed_sums.h.
template <class Op>
class Segments {
 public:
  // Sums of entries, and per panel the maximum they are relative to.
  struct Record {
    float *sums, *maximum;
  };

  Segments(const Op& op, const Sequence& sequence)
      : op_(op),
        s_(sequence),
        panels_(op.panels),
        width_(panels_ * kUnit),
        record_floats_(width_ + panels_ * kLanes),
        block_rows_(round_up(max(kMinBlockRows, ceil_div(s_.tokens * record_floats_, kMaxFloats)), Op::kRows)),
        blocks_(ceil_div(s_.tokens, block_rows_)),
        blocks_per_task_(ceil_div(blocks_, kMaxTasks)),
        tasks_(ceil_div(blocks_, blocks_per_task_)),
        memory_(s_.batch * (blocks_ + 1 + tasks_) * record_floats_),
        starts_(memory_.data() + s_.batch * (blocks_ + 1) * record_floats_) {}

  int64_t panels() const { return panels_; }
  int64_t width() const { return width_; }  // floats of an entry of all panels
  int64_t block_rows() const { return block_rows_; }
  int64_t task_rows() const { return blocks_per_task_ * block_rows_; }
  int64_t tasks() const { return tasks_; }  // of a document

  // Computes start() for every task and sums_after() for every block.
  void compute(const Parallel& parallel) const {
    parallel_for(parallel, s_.batch * (blocks_ + 1), 2 * s_.batch * s_.tokens * s_.channels,
                 [&](int64_t task) { sum_segment(task / (blocks_ + 1), task % (blocks_ + 1)); });
    parallel_for(parallel, s_.batch * panels_, s_.batch * blocks_ * record_floats_,
                 [&](int64_t task) { scan(task / panels_, task % panels_); });
  }

  // The sums of the keys before key first_unsummed(task) of document b.
  Record start(int64_t b, int64_t task) const { return record(starts_, b * tasks_ + task); }
  int64_t first_unsummed(int64_t task) const { return boundary(segments_before(task)); }

  // Unless causal: the sums of the keys after the windows of a block, relative to the largest key of the document.
  const float* sums_after(int64_t b, int64_t block) const { return segment(b, block + 1).sums; }

  // Adds the entries of keys [first, last), relative to the record's maximum.
  void add_keys(int64_t b, int64_t first, int64_t last, const Record& to) const {
    op_.for_entries(b, first, last, to.maximum,
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

 private:
  static constexpr int64_t kUnit = kEntryFloats<Op::kVecs>;
  static constexpr int64_t kMinBlockRows = 96;
  static constexpr int64_t kMaxFloats = 3 << 18;  // 3 MiB for the segments
  static constexpr int64_t kMaxTasks = 32;

  Record segment(int64_t b, int64_t i) const { return record(memory_.data(), b * (blocks_ + 1) + i); }
  Record record(float* base, int64_t i) const {
    float* sums = base + i * record_floats_;
    return {sums, sums + width_};
  }

  // Segment i is the keys from boundary(i) to boundary(i + 1).
  int64_t boundary(int64_t i) const { return i == 0 ? 0 : i * block_rows_ - block_rows_ + op_.right; }

  // How many segments lie before all windows of a task's rows; the keys between them and the windows are less than a
  // segment.
  int64_t segments_before(int64_t task) const {
    const int64_t first_key = task * task_rows() - op_.left;
    if (first_key < boundary(1)) return 0;
    return min(blocks_ + 1, (first_key - op_.right) / block_rows_ + 1);
  }

  void clear(const Record& record) const {
    zero(record.sums, width_);
    for (int64_t i = 0; i < panels_ * kLanes; ++i) record.maximum[i] = kNoKey;
  }

  void sum_segment(int64_t b, int64_t i) const {
    const int64_t length = length_of(s_, b), first = min(length, boundary(i)), last = min(length, boundary(i + 1));
    const Record to = segment(b, i);
    clear(to);
    op_.update_maximum(b, first, last, to.maximum);
    add_keys(b, first, last, to);
  }

  // One panel of one document.
  void scan(int64_t b, int64_t panel) const {
    const Vec maximum = scan_before(b, panel);
    if (s_.causal) return;
    rescale_starts(b, panel, maximum);
    scan_after(b, panel, maximum);
  }

  // Computes the sums before each task, and returns the largest key.
  AFT_INLINE Vec scan_before(int64_t b, int64_t panel) const {
    Vec m = splat(kNoKey), sum[Op::kVecs] = {}, compensation[Op::kVecs] = {};
    int64_t task = 0;
    for (int64_t i = 0; i <= blocks_ + 1; ++i) {
      for (; task < tasks_ && segments_before(task) == i; ++task) {
        for (int v = 0; v < Op::kVecs; ++v) store(start(b, task).sums + panel * kUnit + v * kLanes, sum[v]);
        store(start(b, task).maximum + panel * kLanes, m);
      }
      if (i > blocks_) break;
      const Record from = segment(b, i);
      const Vec own = load(from.maximum + panel * kLanes), raised = raised_by(m, own);
      const Vec scale = exp(m - raised), own_scale = exp(own - raised);
      for (int v = 0; v < Op::kVecs; ++v) {
        sum[v] *= scale;
        compensation[v] *= scale;
        add_compensated(sum[v], compensation[v], load(from.sums + panel * kUnit + v * kLanes) * own_scale);
      }
      m = raised;
    }
    return m;
  }

  AFT_INLINE void rescale_starts(int64_t b, int64_t panel, Vec maximum) const {
    for (int64_t i = 0; i < tasks_; ++i) {
      const Record to = start(b, i);
      multiply_entry<Op::kVecs>(to.sums + panel * kUnit, exp(load(to.maximum + panel * kLanes) - maximum));
      store(to.maximum + panel * kLanes, maximum);
    }
  }

  // Replaces each segment by the sum of the segments after it.
  AFT_INLINE void scan_after(int64_t b, int64_t panel, Vec maximum) const {
    Vec sum[Op::kVecs] = {}, compensation[Op::kVecs] = {};
    for (int64_t i = blocks_; i >= 0; --i) {
      const Record own = segment(b, i);
      multiply_entry<Op::kVecs>(own.sums + panel * kUnit, exp(load(own.maximum + panel * kLanes) - maximum));
      for (int v = 0; v < Op::kVecs; ++v) {
        float* sums = own.sums + panel * kUnit + v * kLanes;
        const Vec after = sum[v];
        add_compensated(sum[v], compensation[v], load(sums));
        store(sums, after);
      }
    }
  }

  const Op& op_;
  const Sequence& s_;
  const int64_t panels_, width_, record_floats_, block_rows_, blocks_, blocks_per_task_, tasks_;
  const Scratch memory_;  // [batch, blocks + 1] segments, then [batch, tasks] starts
  float* const starts_;
};

}  // namespace aft::AFT_ISA
