#include "fields.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

#include "log.h"

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using ops::Attribute;
using ops::Values;

namespace {

PluginFieldType type_of(const Attribute& field) {
  if (!field.words.empty()) return PluginFieldType::kCHAR;
  return field.integer ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
}

// Parsers give numbers of 32 bits; the interface has 64 bits as well. The value is checked before it is narrowed.
template <class Narrow, class Wide>
Narrow read(const Attribute& field, const PluginField& given, PluginFieldType wide) {
  expect(given.length == 1, std::string(field.name) + " has " + std::to_string(given.length) + " values, expected one");
  Narrow narrow;
  Wide value;
  if (given.type == wide) {
    std::memcpy(&value, given.data, sizeof value);
  } else {
    std::memcpy(&narrow, given.data, sizeof narrow);
    value = narrow;
  }
  field.check(value, ops::Device::kCuda);
  narrow = static_cast<Narrow>(value);
  if (field.number == &ops::Values::eps) {
    std::ostringstream is;
    is << "eps is " << value;
    expect(value > 0, is.str() + ", expected more than 0");
    expect(value <= std::numeric_limits<Narrow>::max(), is.str() + ", expected a finite number");
    expect(narrow > 0, is.str() + ", which is 0 in 32 bits; expected more");
  }
  return narrow;
}

// The text may or may not have its final zero counted.
std::string text_of(const PluginField& given) {
  std::string text(static_cast<const char*>(given.data), static_cast<size_t>(given.length));
  text.resize(std::strlen(text.c_str()));
  return text;
}

// The type of a number of 64 bits; text has none.
PluginFieldType wide_type_of(const Attribute& field) {
  if (!field.words.empty()) return PluginFieldType::kCHAR;
  return field.integer ? PluginFieldType::kINT64 : PluginFieldType::kFLOAT64;
}

void read_field(const Attribute& field, const PluginField& given, Values& values) {
  const PluginFieldType wide = wide_type_of(field);
  const bool fits = (given.type == type_of(field) || given.type == wide) && given.data;
  expect(fits, std::string(field.name) + " has a wrong type, expected " +
                   (!field.words.empty() ? "text" : field.integer ? "an integer" : "a float"));
  if (!field.words.empty())
    values.*field.integer = field.index_of(text_of(given), ops::Device::kCuda);
  else if (field.integer)
    values.*field.integer = read<int32_t, int64_t>(field, given, wide);
  else
    values.*field.number = read<float, double>(field, given, wide);
}

}  // namespace

Values read_values(const std::vector<Attribute>& fields, const nvinfer1::PluginFieldCollection* given) {
  Values values;
  for (int32_t i = 0; given && i < given->nbFields; ++i) {
    const std::string name = given->fields[i].name;
    if (name == "plugin_namespace" || name == "plugin_version") continue;
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const Attribute& f) { return f.name == name; });
    expect(field != fields.end(), "has no field \"" + name + "\"");
    read_field(*field, given->fields[i], values);
  }
  return values;
}

std::vector<PluginField> to_plugin_fields(const std::vector<Attribute>& fields, const Values& values) {
  std::vector<PluginField> result;
  for (const Attribute& field : fields) {
    if (!field.words.empty()) {
      const std::string& text = field.words[static_cast<size_t>(values.*field.integer)];
      result.emplace_back(field.name, text.c_str(), type_of(field), static_cast<int32_t>(text.size()));
    } else if (field.integer) {
      result.emplace_back(field.name, &(values.*field.integer), type_of(field), 1);
    } else {
      result.emplace_back(field.name, &(values.*field.number), type_of(field), 1);
    }
  }
  return result;
}

std::string to_string(const std::vector<Attribute>& fields, const Values& values) {
  std::ostringstream text;
  text.precision(9);  // as many as tell any two floats apart
  const char* separator = "";
  for (const Attribute& field : fields) {
    text << separator << field.name << '=';
    if (!field.words.empty())
      text << field.words[static_cast<size_t>(values.*field.integer)];
    else if (field.integer)
      text << values.*field.integer;
    else
      text << values.*field.number;
    separator = ", ";
  }
  return text.str();
}
