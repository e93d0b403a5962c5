// Every method of every plugin, as TensorRT calls it, in what does not need a kernel to run.

#include <cstring>
#include <limits>
#include <set>

#include "host.h"

namespace {

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

void expect_equal(const std::string& actual, const std::string& expected) {
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

PluginField text(const char* name, const char* value) {
  return {name, value, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(value))};
}
const int32_t kHeads = 3, kNoHeads = 0;
const int64_t kWideHeads = 3, kTooManyHeads = (int64_t{1} << 32) + 3;
const float kScale = 0.1f, kEps = 0.25f, kNoEps = 0.0f, kInfiniteEps = std::numeric_limits<float>::infinity();
const double kWideScale = 0.1, kWideEps = 0.25, kTinyEps = 1e-60, kHugeEps = 1e60;
const PluginField kThreeHeads{"num_heads", &kHeads, PluginFieldType::kINT32, 1};

std::vector<Expected> all_operators() {
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

std::vector<PluginTensorDesc> describe_all(const Shapes& shapes) {
  std::vector<PluginTensorDesc> descs;
  for (size_t i = 0; i < shapes.size(); ++i)
    descs.push_back(describe(shapes[i], i + 1 == shapes.size() ? DataType::kINT64 : DataType::kFLOAT));
  return descs;
}

std::vector<DynamicPluginTensorDesc> describe_profile(const Shapes& shapes) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (const PluginTensorDesc& desc : describe_all(shapes)) descs.push_back({desc, desc.dims, desc.dims, desc.dims});
  descs.push_back(descs[0]);
  return descs;
}

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

// TensorRT's expressions of extents: the sum of an extent and itself is `doubled`.
class Expressions final : public apiv::VExprBuilder {
 public:
  const IDimensionExpr* doubled() const { return reinterpret_cast<const IDimensionExpr*>(this); }
  const IDimensionExpr* constant(int64_t) override { return nullptr; }
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& first,
                                  const IDimensionExpr& second) override {
    return op == DimensionOperation::kSUM && &first == &second ? doubled() : nullptr;
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
};

class ExprBuilder final : public IExprBuilder {
 public:
  explicit ExprBuilder(Expressions& expressions) { mImpl = &expressions; }
};

template <class Interface>
void expect_interface(const Interface* interface, const char* kind) {
  const InterfaceInfo info = interface->getInterfaceInfo();
  expect_equal(std::string(info.kind) + " " + std::to_string(info.major) + "." + std::to_string(info.minor),
               std::string(kind) + " 1.0");
}

void test_identity(IPluginCreatorV3One& creator, const Expected& e) {
  expect_interface(&creator, "PLUGIN CREATOR_V3ONE");
  Instance plugin(create(creator, {}, TensorRTPhase::kBUILD));
  expect_interface(plugin.plugin.get(), "PLUGIN");
  expect_interface(plugin.core, "PLUGIN_V3ONE_CORE");
  expect_interface(plugin.build, "PLUGIN_V3ONE_BUILD");
  expect_interface(plugin.runtime, "PLUGIN_V3ONE_RUNTIME");
  for (const std::string& name : {creator.getPluginName(), plugin.core->getPluginName()}) expect_equal(name, e.op);
  for (const std::string& space : {creator.getPluginNamespace(), plugin.core->getPluginNamespace()})
    expect_equal(space, "ai.aftexport");
  for (const std::string& version : {creator.getPluginVersion(), plugin.core->getPluginVersion()})
    expect_equal(version, "1");
  expect(plugin.build->getNbTactics() == 0 && plugin.build->getNbOutputs() == 1, e.op + " tactics or outputs");
}

// A plugin is its fields: by default, as given, cloned, and saved and loaded.
void test_fields(IPluginCreatorV3One& creator, const Expected& e) {
  const PluginFieldCollection& known = *creator.getFieldNames();
  const std::vector<PluginField> defaults(known.fields, known.fields + known.nbFields);
  for (const PluginField& field : defaults) expect(field.data && field.length > 0, e.op + " has no default");
  std::vector<PluginField> with_zero_counted = e.fields;
  for (PluginField& field : with_zero_counted) field.length += field.type == PluginFieldType::kCHAR;
  std::vector<PluginField> wide = e.fields;
  for (PluginField& field : wide) {
    if (field.data == &kHeads) field = {field.name, &kWideHeads, PluginFieldType::kINT64, 1};
    if (field.data == &kScale) field = {field.name, &kWideScale, PluginFieldType::kFLOAT64, 1};
    if (field.data == &kEps) field = {field.name, &kWideEps, PluginFieldType::kFLOAT64, 1};
  }
  std::vector<PluginField> of_node = e.fields;
  of_node.push_back(text("plugin_namespace", "ai.aftexport"));
  of_node.push_back(text("plugin_version", "1"));

  const auto expect_settings = [&](const std::vector<PluginField>& fields, const std::string& settings) {
    const std::string description = e.op + "(" + settings + ")";
    Instance plugin(create(creator, fields, TensorRTPhase::kBUILD));
    Instance cloned(plugin.plugin->clone());
    const Serialized kept(*plugin.runtime);
    Instance loaded(create(creator, kept.fields(), TensorRTPhase::kRUNTIME));
    plugin = Instance(nullptr);
    Instance attached(loaded.runtime->attachToContext(nullptr));
    for (const Instance* copy : {&cloned, &loaded, &attached}) {
      expect_equal(copy->build->getMetadataString(), description);
      expect_equal(copy->build->getTimingCacheID(), description);
    }
  };
  expect_settings({}, e.defaults);
  expect_settings(defaults, e.defaults);
  expect_settings(e.fields, e.chosen);
  expect_settings(with_zero_counted, e.chosen);
  expect_settings(wide, e.chosen);
  expect_settings(of_node, e.chosen);
}

// The output has the type and the symbolic extents of the first input, or twice its channels.
void test_output(IPluginCreatorV3One& creator, const Expected& e) {
  Instance plugin(create(creator, e.fields, TensorRTPhase::kBUILD));
  const auto inputs = static_cast<int32_t>(e.shapes.size());
  char symbols[8][8];  // an extent is only passed on, so any address does for one
  std::vector<DimsExprs> extents(e.shapes.size());
  for (size_t i = 0; i < extents.size(); ++i) {
    extents[i].nbDims = static_cast<int32_t>(e.shapes[i].size());
    for (int32_t d = 0; d < extents[i].nbDims; ++d) extents[i].d[d] = reinterpret_cast<IDimensionExpr*>(&symbols[i][d]);
  }
  Expressions expressions;
  ExprBuilder builder(expressions);
  DimsExprs output{};
  const auto get_shapes = [&](int32_t count) {
    return plugin.build->getOutputShapes(extents.data(), count, nullptr, 0, &output, 1, builder);
  };
  const IDimensionExpr* const channels = e.doubles_channels ? expressions.doubled() : extents[0].d[2];
  expect(get_shapes(inputs) == 0 && output.nbDims == 3 && std::equal(output.d, output.d + 2, extents[0].d) &&
             output.d[2] == channels,
         e.op + " has a wrong output shape");
  expect(get_shapes(inputs - 1) != 0 && get_shapes(inputs + 1) != 0, e.op + " takes another number of inputs");
  extents[1].nbDims = 4;
  expect(get_shapes(inputs) != 0, e.op + " takes a key of four dimensions");

  for (DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16}) {
    std::vector<DataType> types(e.shapes.size(), type);
    types.back() = DataType::kINT64;
    DataType result = DataType::kINT64;
    expect(plugin.build->getOutputDataTypes(&result, 1, types.data(), inputs) == 0 && result == type,
           e.op + " has a wrong output type");
    DataType two[2];
    expect(plugin.build->getOutputDataTypes(two, 2, types.data(), inputs) != 0, e.op + " has two outputs");
  }
}

// Every combination of types and formats: one floating-point type, int64 lengths, linear.
void test_formats(IPluginCreatorV3One& creator, const Expected& e) {
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT64,
                            static_cast<DataType>(3) /* kINT32 */};
  Instance plugin(create(creator, e.fields, TensorRTPhase::kBUILD));
  auto descs = describe_profile(e.shapes);
  const size_t count = descs.size(), lengths = count - 2;
  size_t combinations = 1;
  for (size_t i = 0; i < count; ++i) combinations *= 5;
  std::set<DataType> accepted;
  for (size_t combination = 0; combination < combinations; ++combination) {
    bool allowed = combination % 5 < 3, taken = true;
    for (size_t i = 0, rest = combination; i < count; ++i, rest /= 5) {
      descs[i].desc.type = types[rest % 5];
      allowed = allowed && descs[i].desc.type == (i == lengths ? DataType::kINT64 : descs[0].desc.type);
    }
    for (size_t i = 0; i < count; ++i)
      taken = taken && plugin.build->supportsFormatCombination(static_cast<int32_t>(i), descs.data(),
                                                               static_cast<int32_t>(count) - 1, 1);
    if (taken != allowed) return expect(false, e.op + " takes or refuses types wrongly");
    if (taken) accepted.insert(descs[0].desc.type);
  }
  expect(accepted.size() == 3, e.op + " does not take all three types");

  descs = describe_profile(e.shapes);
  for (size_t i = 0; i < count; ++i) {
    descs[i].desc.format = static_cast<TensorFormat>(1);  // kCHW2
    expect(!plugin.build->supportsFormatCombination(static_cast<int32_t>(i), descs.data(),
                                                    static_cast<int32_t>(count) - 1, 1),
           e.op + " takes a format that is not linear");
    descs[i].desc.format = TensorFormat::kLINEAR;
  }
}

void test_shapes(IPluginCreatorV3One& creator, const Expected& e) {
  Instance plugin(create(creator, e.fields, TensorRTPhase::kRUNTIME));
  const auto inputs = static_cast<int32_t>(e.shapes.size());
  const auto change = [&](const Shapes& shapes) {
    const auto descs = describe_all(shapes);
    return plugin.runtime->onShapeChange(descs.data(), static_cast<int32_t>(descs.size()), descs.data(), 1);
  };
  const auto configure = [&](const Shapes& shapes) {
    const auto descs = describe_profile(shapes);
    return plugin.build->configurePlugin(descs.data(), static_cast<int32_t>(shapes.size()), &descs.back(), 1);
  };
  Shapes unknown = e.shapes;
  for (auto& shape : unknown)
    for (int64_t& extent : shape) extent = -1;
  expect(change(e.shapes) == 0 && configure(e.shapes) == 0 && configure(unknown) == 0, e.op + " refuses its shapes");
  // No shape may change in one extent alone but those of the parameters' own axes.
  for (int32_t i = 0; i < inputs; ++i)
    for (size_t d = 0; d < e.shapes[static_cast<size_t>(i)].size(); ++d) {
      Shapes other = e.shapes;
      other[static_cast<size_t>(i)][d] += 100;
      const bool band = e.op.find("AftLocal") != std::string::npos && i == 3;
      const bool taps = e.op.find("AftConv") != std::string::npos && i == 3 && d == 1;
      expect((change(other) == 0) == (band || taps) && (configure(other) == 0) == (band || taps),
             e.op + " takes or refuses a change of input " + std::to_string(i) + " wrongly");
    }

  size_t least = 0;  // the workspace for the largest shapes serves all
  for (int64_t tokens : {1, 4, 5}) {
    Shapes shapes = e.shapes;
    for (auto& shape : shapes)
      if (shape.size() == 3) shape[1] = tokens;
    auto descs = describe_profile(shapes);
    const size_t size = plugin.build->getWorkspaceSize(descs.data(), inputs, &descs.back(), 1);
    expect(size >= least, e.op + " needs less workspace for more tokens");
    least = size;
  }
}

}  // namespace

int main() {
  Plugins plugins;
  const std::vector<Expected> operators = all_operators();
  expect(plugins.creators().size() == operators.size(), "the number of creators");
#ifdef AFT_NVINFER_HEADERS
  test_logged_refusals<ILoggerFinder, ILogger>(plugins);
#else
  if (plugins.runtime()) {
    test_refusals_in_runtime<v_1_0::ILogger>(plugins, *plugins.runtime());
  } else {
    test_logged_refusals<nvinfer1::ILoggerFinder, nvinfer1::ILogger>(plugins);
    test_logged_refusals<v_1_0::ILoggerFinder, v_1_0::ILogger>(plugins);
  }
#endif
  for (const Expected& e : operators) {
    IPluginCreatorV3One& creator = plugins.creator(e.op);
    test_identity(creator, e);
    test_fields(creator, e);
    test_output(creator, e);
    test_formats(creator, e);
    test_shapes(creator, e);
  }
  expect(plugins.unload(), "the registry keeps plugins of a library it has unloaded");
  std::printf("%zu operators, %d failures\n", operators.size(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
