// Every method of every plugin, as TensorRT calls it, in what does not need a kernel to run.

#include <set>

#include "operators.h"
#include "refusals.h"

namespace {

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
