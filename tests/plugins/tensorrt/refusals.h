// The fields, types and shapes that plugins refuse, and the errors that they log.
#pragma once

#include "operators.h"

// `log` is null where a runtime takes no logger.
template <class Log>
void test_refused_fields(const Plugins& plugins, Log* log) {
  const std::string kNoOther =
      ", as the CUDA kernels take no other; AFTEXPORT_PORTABLE=1 runs the operator by its body";
  const auto expect_refused = [&](const char* op, const PluginField& field, const std::string& message) {
    for (TensorRTPhase phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME}) {
      expect(!create(plugins.creator(op), {field}, phase), std::string(op) + " takes what it must not");
      if (log) expect_equal(log->take(), std::string(op) + ": " + message);
    }
  };
  const int32_t two[] = {1, 2};
  expect_refused("CausalAftFull", text("gate", "relu"), "gate is \"relu\", expected sigmoid, tanh or none" + kNoOther);
  expect_refused("AftFull", text("gate", ""), "gate is \"\", expected sigmoid, tanh or none" + kNoOther);
  expect_refused("AftFull", kThreeHeads, "has no field \"num_heads\"");
  expect_refused("AftSimple", kThreeHeads, "num_heads is 3, expected 0" + kNoOther);
  expect_refused("NormalizedLinearAttention", text("normalizer", "clamp"),
                 "normalizer is \"clamp\", expected add" + kNoOther);
  expect_refused("AftConv", text("num_heads", "3"), "num_heads has a wrong type, expected an integer");
  expect_refused("AftConv", {"gate", &kHeads, PluginFieldType::kINT32, 1}, "gate has a wrong type, expected text");
  expect_refused("AftConv", {"num_heads", &kNoHeads, PluginFieldType::kINT32, 1},
                 "num_heads is 0, expected at least 1");
  expect_refused("Fastformer", {"num_heads", two, PluginFieldType::kINT32, 2}, "num_heads has 2 values, expected one");
  expect_refused("EfficientAttention", {"scale", &kHeads, PluginFieldType::kINT32, 1},
                 "scale has a wrong type, expected a float");
  expect_refused("NormalizedLinearAttention", {"eps", &kNoEps, PluginFieldType::kFLOAT32, 1},
                 "eps is 0, expected more than 0");
  expect_refused("NormalizedLinearAttention", {"eps", &kInfiniteEps, PluginFieldType::kFLOAT32, 1},
                 "eps is inf, expected a finite number of at least 0");
  expect_refused("AftConv", {"num_heads", &kTooManyHeads, PluginFieldType::kINT64, 1},
                 "num_heads is 4294967299, expected a 32-bit integer");
  expect_refused("AftConv", {"num_heads", &kWideEps, PluginFieldType::kFLOAT64, 1},
                 "num_heads has a wrong type, expected an integer");
  expect_refused("NormalizedLinearAttention", {"eps", &kTinyEps, PluginFieldType::kFLOAT64, 1},
                 "eps is 1e-60, which is 0 in 32 bits; expected more");
  expect_refused("NormalizedLinearAttention", {"eps", &kHugeEps, PluginFieldType::kFLOAT64, 1},
                 "eps is 1e+60, expected a finite number");
  expect_refused("AftFull", {"eps", &kTinyEps, PluginFieldType::kFLOAT64, 1},
                 "eps is 1e-60, expected 0" + kNoOther);
}

template <class Log>
void test_refused_types(const Plugins& plugins, Log* log) {
  const auto int8 = static_cast<DataType>(2), int32 = static_cast<DataType>(3), fp4 = static_cast<DataType>(10);
  const auto expect_refused = [&](std::vector<DataType> types, const char* message) {
    Instance plugin(create(plugins.creator("AftSimple"), {}, TensorRTPhase::kBUILD));
    DataType result;
    expect(plugin.build->getOutputDataTypes(&result, 1, types.data(), static_cast<int32_t>(types.size())) != 0,
           "AftSimple takes wrong types");
    if (log) expect_equal(log->take(), std::string("AftSimple: ") + message);
  };
  const DataType fp32 = DataType::kFLOAT, fp16 = DataType::kHALF, bf16 = DataType::kBF16, int64 = DataType::kINT64;
  expect_refused({int8, int8, int8, int64}, "query is int8, expected float32, float16 or bfloat16");
  expect_refused({fp4, fp4, fp4, int64}, "query is type 10, expected float32, float16 or bfloat16");
  expect_refused({fp32, fp16, fp32, int64}, "key is float16, expected float32");
  expect_refused({bf16, bf16, fp32, int64}, "value is float32, expected bfloat16");
  expect_refused({fp16, fp16, fp16, int32}, "lengths is int32, expected int64");
  expect_refused({fp32, fp32, int64}, "has 3 inputs, expected 4");
  expect_refused({fp32, fp32, fp32, int64, int64}, "has 5 inputs, expected 4");
}

template <class Log>
void test_refused_shapes(const Plugins& plugins, Log* log) {
  const auto expect_refused = [&](const char* op, std::vector<PluginField> fields, const Shapes& shapes,
                                  const char* message) {
    Instance plugin(create(plugins.creator(op), fields, TensorRTPhase::kRUNTIME));
    const auto descs = describe_all(shapes);
    expect(plugin.runtime->onShapeChange(descs.data(), static_cast<int32_t>(descs.size()), descs.data(), 1) != 0,
           std::string(op) + " takes wrong shapes");
    if (log) expect_equal(log->take(), std::string(op) + ": " + message);
  };
  const std::vector<int64_t> s{2, 5, 6}, lengths{2};
  expect_refused("AftSimple", {}, {s, s, lengths}, "has 3 inputs, expected 4");
  expect_refused("AftSimple", {}, {s, s, {2, 5}, lengths}, "value has shape [2, 5], expected 3 dimensions");
  expect_refused("CausalAftSimple", {}, {s, {2, 5, 7}, s, lengths}, "key has shape [2, 5, 7], expected [2, 5, 6]");
  expect_refused("AftSimple", {}, {s, s, s, {3}}, "lengths has shape [3], expected [2]");
  expect_refused("AftFull", {}, {s, s, s, {4, 4}, lengths},
                 "query has shape [2, 5, 6], longer than position_bias [4, 4] allows");
  expect_refused("AftFull", {}, {s, s, s, {8, 9}, lengths}, "position_bias has shape [8, 9], expected [8, 8]");
  expect_refused("AftFullPrepare", {}, {s, {2, 5, 7}, lengths}, "value has shape [2, 5, 7], expected [2, 5, 6]");
  expect_refused("AftFullFinish", {}, {s, s, s, {8, 8}, {2, 5, 11}, lengths},
                 "products has shape [2, 5, 11], expected [2, 5, 12]");
  expect_refused("AftFullFinish", {}, {s, s, s, {4, 4}, {2, 5, 12}, lengths},
                 "query has shape [2, 5, 6], longer than position_bias [4, 4] allows");
  expect_refused("AftLocal", {}, {s, s, s, {4, 3}, lengths},
                 "query has shape [2, 5, 6], longer than band [4, 3] allows");
  expect_refused("AftLocal", {}, {s, s, s, {1, 4}, lengths},
                 "band has shape [1, 4], expected an odd number of columns, 2s-1");
  expect_refused("CausalAftLocal", {}, {s, s, s, {1, 0}, lengths},
                 "band has shape [1, 0], expected at least one column");
  expect_refused("AftConv", {kThreeHeads}, {s, s, s, {3, 4}, lengths}, "key has shape [2, 5, 6], expected [2, 5, 3]");
  expect_refused("AftConv", {kThreeHeads}, {s, {2, 5, 3}, s, {3, 0}, lengths},
                 "filter has shape [3, 0], expected at least one tap");
  expect_refused("Fastformer", {kThreeHeads}, {s, s, s, {6, 2}, {6, 3}, lengths},
                 "alpha_weight has shape [6, 2], expected [6, 3]");
  const std::vector<int64_t> seven{2, 5, 7};
  for (const char* op : {"EfficientAttention", "NormalizedLinearAttention"})
    expect_refused(op, {kThreeHeads}, {seven, seven, seven, lengths},
                   "query has shape [2, 5, 7], whose width is not divisible by num_heads 3");
  const std::vector<int64_t> wide{2, 5, 257};
  for (const char* op : {"EfficientAttention", "CausalNormalizedLinearAttention"})
    expect_refused(op, {}, {wide, wide, wide, lengths},
                   "query has heads of 257 channels, more than the 256 of the CUDA kernels; AFTEXPORT_PORTABLE=1 runs "
                   "the operator by its body");
}

template <class Log>
void test_refusals(const Plugins& plugins, Log* log) {
  test_refused_fields(plugins, log);
  test_refused_types(plugins, log);
  test_refused_shapes(plugins, log);
}

// Errors reach the logger that a finder finds, whichever TensorRT made the two.
template <class Finder, class Logger>
void test_logged_refusals(Plugins& plugins) {
  static ErrorLog<Logger> log;  // the library keeps the finder
  static Finds<Finder, Logger> finder(log);
  plugins.set_logger_finder(static_cast<Finder*>(&finder));
  test_refusals(plugins, &log);
}

// Without a GPU TensorRT makes no runtime and then has no logger; TensorRT-RTX makes one.
template <class Logger>
void test_refusals_in_runtime(const Plugins& plugins, const SharedLibrary& runtime) {
  static ErrorLog<Logger> log;
  const int32_t version = runtime.function<int32_t()>("getInferLibVersion")();
  runtime.function<void*(void*, int32_t)>("createInferRuntime_INTERNAL")(static_cast<Logger*>(&log), version);
  const bool taken = runtime.function<Logger*()>("getLogger")() == &log;
  log.take();
  std::printf("registry of %d, %s\n", version, taken ? "with its logger" : "which takes no logger here");
  test_refusals(plugins, taken ? &log : nullptr);
}
