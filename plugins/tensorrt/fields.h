// A plugin's fields: the ONNX attributes of its operator when an engine is built, and what the engine keeps of
// them when it is loaded.
#pragma once

#include <string>
#include <vector>

#include "nvinfer.h"

// The values of all fields there are, with their defaults. A choice is the index of its word.
struct Settings {
  int32_t gate = 0, normalization = 0, feature_map = 0, precision = 0, num_heads = 1;
  float scale = 1.0f, eps = 1e-6f;
  // Those of version 2 of the contract, whose other values the plugins do not take.
  int32_t normalizer = 0, kv_num_heads = 0, key_heads = 0;
  float denominator_eps = 0.0f;
};

struct Field {
  const char* name;
  int32_t Settings::*integer = nullptr;  // an integer or a choice
  float Settings::*number = nullptr;
  bool positive = false;
  std::vector<std::string> choices = {};
  bool zero = false;  // no other value is taken
};

// Reads what is given of `fields`. plugin_namespace and plugin_version, which every node has, are passed over.
// Throws Error for an unknown name, a wrong type or a value that is not allowed.
Settings read_settings(const std::vector<Field>& fields, const nvinfer1::PluginFieldCollection* given);

// `settings` as TensorRT takes them; they point into `fields` and `settings`.
std::vector<nvinfer1::PluginField> to_plugin_fields(const std::vector<Field>& fields, const Settings& settings);

// "gate=tanh, num_heads=2"
std::string to_string(const std::vector<Field>& fields, const Settings& settings);
