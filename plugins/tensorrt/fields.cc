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

template <class T>
T read(const Field& field, const PluginField& given) {
  T value;
  expect(given.length == 1, std::string(field.name) + " has " + std::to_string(given.length) + " values, expected one");
  std::memcpy(&value, given.data, sizeof value);
  std::ostringstream text;
  text << field.name << " is " << value << ", expected more than 0";
  expect(!field.positive || value > 0, text.str());
  text.str("");
  text << field.name << " is " << value << ", expected a finite number";
  expect(!field.positive || value <= std::numeric_limits<T>::max(), text.str());
  text.str("");
  text << field.name << " is " << value << ", which the plugin does not take; expected 0";
  expect(!field.zero || value == 0, text.str());
  return value;
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

void read_field(const Field& field, const PluginField& given, Settings& settings) {
  const bool fits = given.type == type_of(field) && given.data;
  expect(fits, std::string(field.name) + " has a wrong type, expected " +
                   (!field.choices.empty() ? "text" : field.integer ? "a 32-bit integer" : "a 32-bit float"));
  if (!field.choices.empty())
    settings.*field.integer = read_choice(field, given);
  else if (field.integer)
    settings.*field.integer = read<int32_t>(field, given);
  else
    settings.*field.number = read<float>(field, given);
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
