// The parameters that only AFT-full has, and its formula with them.
#pragma once

#include "problem.h"

// One way of multiplying of those that the case's element allows, and a bias whose rows have a range of 2, 16,
// 80 or, with keys as large, 200: from what every precision is made for to what none can hold.
struct AftFull {
  Problem& problem;
  Numbers bias;
  int64_t width;
  aft::AftFull call;

  explicit AftFull(Problem& problem) : problem(problem) {
    const Case& c = problem.c;
    const aft::Precision own =
        c.element == Element::kFloat16 ? aft::Precision::kFloat16 : aft::Precision::kBfloat16;
    const aft::Precision choices[] = {own, own, aft::Precision::kBfloat16, aft::Precision::kFloat32};
    const float ranges[] = {1.0f, 8.0f, 40.0f, c.range()};
    width = (c.tokens + 7) / 8 * 8 + c.draw(2, 21);
    const void* const data = problem.input((c.tokens - 1) * width + c.tokens, ranges[c.draw(4, 22)], bias);
    const aft::Precision precision =
        c.element == Element::kFloat32 ? aft::Precision::kFloat32 : choices[c.draw(4, 23)];
    call = {problem.sequence, c.gate, 0.0f, precision, {}, data, width, false, nullptr};
  }

  oracle::Values operator()(const oracle::Document& d) const {
    return oracle::aft_full(d, formula_gate(problem.c.gate), bias.data(), width);
  }
};
