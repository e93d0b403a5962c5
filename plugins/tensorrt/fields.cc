#include "fields.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

#include "log.h"

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

namespace {

PluginFieldType type_of(const Field& field) {
  if (!field.choices.empty()) return PluginFieldType::kCHAR;
  return field.integer ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
}

template <class Value>
std::string is(const Field& field, Value value) {
  std::ostringstream text;
  text << field.name << " is " << value;
  return text.str();
}

// Parsers give numbers of 32 bits; the interface has 64 bits as well. The value is checked before it is narrowed.
template <class Narrow, class Wide>
Narrow read(const Field& field, const PluginField& given, PluginFieldType wide) {
  expect(given.length == 1, std::string(field.name) + " has " + std::to_string(given.length) + " values, expected one");
  Narrow narrow;
  Wide value;
  if (given.type == wide) {
    std::memcpy(&value, given.data, sizeof value);
  } else {
    std::memcpy(&narrow, given.data, sizeof narrow);
    value = narrow;
  }
  using Limits = std::numeric_limits<Narrow>;
  if constexpr (Limits::is_integer)
    expect(value >= Limits::lowest() && value <= Limits::max(), is(field, value) + ", expected a 32-bit integer");
  expect(!field.zero || value == 0, is(field, value) + ", which the plugin does not take; expected 0");
  expect(!field.positive || value > 0, is(field, value) + ", expected more than 0");
  expect(!field.positive || value <= Limits::max(), is(field, value) + ", expected a finite number");
  narrow = static_cast<Narrow>(value);
  expect(!field.positive || narrow > 0, is(field, value) + ", which is 0 in 32 bits; expected more");
  return narrow;
}

// The text may or may not have its final zero counted.
int32_t read_choice(const Field& field, const PluginField& given) {
  std::string text(static_cast<const char*>(given.data), static_cast<size_t>(given.length));
  text.resize(std::strlen(text.c_str()));
  const auto found = std::find(field.choices.begin(), field.choices.end(), text);
  if (found == field.choices.end()) {
    std::string message = std::string(field.name) + " is \"" + text + "\", expected one of";
    for (const std::string& choice : field.choices) message += " " + choice;
    throw Error(message);
  }
  return static_cast<int32_t>(found - field.choices.begin());
}

// The type of a number of 64 bits; text has none.
PluginFieldType wide_type_of(const Field& field) {
  if (!field.choices.empty()) return PluginFieldType::kCHAR;
  return field.integer ? PluginFieldType::kINT64 : PluginFieldType::kFLOAT64;
}

void read_field(const Field& field, const PluginField& given, Settings& settings) {
  const PluginFieldType wide = wide_type_of(field);
  const bool fits = (given.type == type_of(field) || given.type == wide) && given.data;
  expect(fits, std::string(field.name) + " has a wrong type, expected " +
                   (!field.choices.empty() ? "text" : field.integer ? "an integer" : "a float"));
  if (!field.choices.empty())
    settings.*field.integer = read_choice(field, given);
  else if (field.integer)
    settings.*field.integer = read<int32_t, int64_t>(field, given, wide);
  else
    settings.*field.number = read<float, double>(field, given, wide);
}

}  // namespace

Settings read_settings(const std::vector<Field>& fields, const nvinfer1::PluginFieldCollection* given) {
  Settings settings;
  for (int32_t i = 0; given && i < given->nbFields; ++i) {
    const std::string name = given->fields[i].name;
    if (name == "plugin_namespace" || name == "plugin_version") continue;
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.name == name; });
    expect(field != fields.end(), "has no field \"" + name + "\"");
    read_field(*field, given->fields[i], settings);
  }
  return settings;
}

std::vector<PluginField> to_plugin_fields(const std::vector<Field>& fields, const Settings& settings) {
  std::vector<PluginField> result;
  for (const Field& field : fields) {
    if (!field.choices.empty()) {
      const std::string& text = field.choices[static_cast<size_t>(settings.*field.integer)];
      result.emplace_back(field.name, text.c_str(), type_of(field), static_cast<int32_t>(text.size()));
    } else if (field.integer) {
      result.emplace_back(field.name, &(settings.*field.integer), type_of(field), 1);
    } else {
      result.emplace_back(field.name, &(settings.*field.number), type_of(field), 1);
    }
  }
  return result;
}

std::string to_string(const std::vector<Field>& fields, const Settings& settings) {
  std::ostringstream text;
  text.precision(9);  // as many as tell any two floats apart
  const char* separator = "";
  for (const Field& field : fields) {
    text << separator << field.name << '=';
    if (!field.choices.empty())
      text << field.choices[static_cast<size_t>(settings.*field.integer)];
    else if (field.integer)
      text << settings.*field.integer;
    else
      text << settings.*field.number;
    separator = ", ";
  }
  return text.str();
}
