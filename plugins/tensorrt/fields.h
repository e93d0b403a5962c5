// A plugin's fields: the ONNX attributes of its operator when an engine is built, and what the engine keeps of
// them when it is loaded.
#pragma once

#include <string>
#include <vector>

#include "nvinfer.h"
#include "operators/operators.h"

// Reads what is given of the attributes. plugin_namespace and plugin_version, which every node has, are passed over.
// Throws Error for an unknown name, a wrong type or a value that is not allowed.
ops::Values read_values(const std::vector<ops::Attribute>&, const nvinfer1::PluginFieldCollection* given);

// The values as TensorRT takes them, which point into both arguments.
std::vector<nvinfer1::PluginField> to_plugin_fields(const std::vector<ops::Attribute>&, const ops::Values&);

// "gate=tanh, num_heads=2"
std::string to_string(const std::vector<ops::Attribute>&, const ops::Values&);
