// The parameters that only AFT-full has, and its formula with them.
#pragma once

#include "gate.h"
#include "problem.h"

// One way of multiplying of those that the case's element allows, and a bias whose rows have a range of 2, 16,
// 80 or, with keys as large, 200: from what every precision is made for to what none can hold.
struct AftFull {
  Problem& problem;
  Numbers bias;
  int64_t width;
  AftCudaAftFull call;

  explicit AftFull(Problem& problem) : problem(problem) {
    const Case& c = problem.c;
    const AftCudaExpPrecision own =
        c.element == AFT_CUDA_FLOAT16 ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
    const AftCudaExpPrecision choices[] = {own, own, AFT_CUDA_EXP_BFLOAT16, AFT_CUDA_EXP_FLOAT32};
    const float ranges[] = {1.0f, 8.0f, 40.0f, c.range()};
    width = (c.tokens + 7) / 8 * 8 + c.draw(2, 21);
    call = {problem.sequence, c.gate, problem.input((c.tokens - 1) * width + c.tokens, ranges[c.draw(4, 22)], bias),
            width, c.element == AFT_CUDA_FLOAT32 ? AFT_CUDA_EXP_FLOAT32 : choices[c.draw(4, 23)]};
  }

  oracle::Values operator()(const oracle::Document& d) const {
    return oracle::aft_full(d, gate(problem.c.gate), bias.data(), width);
  }
};
