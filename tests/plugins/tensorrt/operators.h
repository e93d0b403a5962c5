// The inputs, outputs and fields of each operator, described as TensorRT does, and a count of failures.
#pragma once

#include <cstring>
#include <limits>

#include "host.h"

inline int failures = 0;

inline void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

inline void expect_equal(const std::string& actual, const std::string& expected) {
  expect(actual == expected, "\"" + actual + "\" is not \"" + expected + "\"");
}

using Shapes = std::vector<std::vector<int64_t>>;

// What each operator takes, restated: 2 documents of 5 tokens, 6 channels, 3 heads, parameters for 8 tokens.
struct Expected {
  std::string op, defaults, chosen;
  std::vector<PluginField> fields;  // those of `chosen`
  Shapes shapes;
  bool doubles_channels = false;
};

inline PluginField text(const char* name, const char* value) {
  return {name, value, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(value))};
}
const int32_t kHeads = 3, kNoHeads = 0;
const int64_t kWideHeads = 3, kTooManyHeads = (int64_t{1} << 32) + 3;
const float kScale = 0.1f, kEps = 0.25f, kNoEps = 0.0f, kInfiniteEps = std::numeric_limits<float>::infinity();
const double kWideScale = 0.1, kWideEps = 0.25, kTinyEps = 1e-60, kHugeEps = 1e60;
const PluginField kThreeHeads{"num_heads", &kHeads, PluginFieldType::kINT32, 1};

inline std::vector<Expected> all_operators() {
  const std::vector<int64_t> sequence{2, 5, 6}, lengths{2};
  std::vector<Expected> all{
      {"AftFull", "gate=sigmoid, precision=fp32, eps=0", "gate=tanh, precision=bf16, eps=0",
       {text("gate", "tanh"), text("precision", "bf16")}, {sequence, sequence, sequence, {8, 8}, lengths}},
      {"AftLocal", "gate=sigmoid, eps=0", "gate=none, eps=0", {text("gate", "none")},
       {sequence, sequence, sequence, {8, 7}, lengths}},
      {"AftSimple", "gate=sigmoid, num_heads=0, eps=0", "gate=tanh, num_heads=0, eps=0", {text("gate", "tanh")},
       {sequence, sequence, sequence, lengths}},
      {"AftConv", "num_heads=1, gate=sigmoid, eps=0", "num_heads=3, gate=none, eps=0",
       {kThreeHeads, text("gate", "none")},
       {sequence, {2, 5, 3}, sequence, {3, 4}, lengths}},
      {"EfficientAttention", "num_heads=1, normalization=softmax, scale=1, kv_num_heads=0",
       "num_heads=3, normalization=scaling, scale=0.100000001, kv_num_heads=0",
       {kThreeHeads, text("normalization", "scaling"), {"scale", &kScale, PluginFieldType::kFLOAT32, 1}},
       {sequence, sequence, sequence, lengths}},
      {"Fastformer", "num_heads=1", "num_heads=3", {kThreeHeads},
       {sequence, sequence, sequence, {6, 3}, {6, 3}, lengths}},
      {"NormalizedLinearAttention", "num_heads=1, feature_map=elu, eps=9.99999997e-07, normalizer=add, kv_num_heads=0",
       "num_heads=3, feature_map=relu, eps=0.25, normalizer=add, kv_num_heads=0",
       {kThreeHeads, text("feature_map", "relu"), {"eps", &kEps, PluginFieldType::kFLOAT32, 1}},
       {sequence, sequence, sequence, lengths}},
  };
  const size_t count = all.size();
  for (size_t i = 0; i < count; ++i) {
    all.push_back(all[i]);
    all.back().op = "Causal" + all[i].op;
  }
  // Around the matrix product of AFT-full, which has no causal form.
  all.push_back({"AftFullPrepare", "", "", {}, {sequence, sequence, lengths}, true});
  all.push_back({"AftFullFinish", "gate=sigmoid", "gate=none", {text("gate", "none")},
                 {sequence, sequence, sequence, {8, 8}, {2, 5, 12}, lengths}});
  return all;
}

inline std::vector<PluginTensorDesc> describe_all(const Shapes& shapes) {
  std::vector<PluginTensorDesc> descs;
  for (size_t i = 0; i < shapes.size(); ++i)
    descs.push_back(describe(shapes[i], i + 1 == shapes.size() ? DataType::kINT64 : DataType::kFLOAT));
  return descs;
}

inline std::vector<DynamicPluginTensorDesc> describe_profile(const Shapes& shapes) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (const PluginTensorDesc& desc : describe_all(shapes)) descs.push_back({desc, desc.dims, desc.dims, desc.dims});
  descs.push_back(descs[0]);
  return descs;
}
