// Filters, tests, methods and global functions of chat templates. Arguments come evaluated.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/chat_value.h"

namespace stockpot::chat {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  // The argument at `index`, or called `name`, or nothing.
  const Value* Find(size_t index, std::string_view name) const;
  // InvalidArgument when there are more than `most` positional ones or names outside `names`.
  Status Check(size_t most, const std::vector<std::string_view>& names = {}) const;
};

bool IsFilter(std::string_view name);
bool IsTest(std::string_view name);

// REQUIRES: IsFilter(name), IsTest(name).
Result<Value> ApplyFilter(std::string_view name, const Value& value, const Arguments& arguments,
                          Budget* budget);
Result<bool> ApplyTest(std::string_view name, const Value& value, const Arguments& arguments,
                       Budget* budget);

// True when Python values of this kind have the method: `value.name` is defined.
bool HasMethod(const Value& value, std::string_view name);
// REQUIRES: HasMethod(value, name).
Result<Value> CallMethod(const Value& value, std::string_view name, const Arguments& arguments,
                         Budget* budget);

// value.name and value[name] where it is no method; undefined when there is none.
Result<Value> GetItem(const Value& value, const Value& key, Budget* budget);
// Python's `in`.
Result<bool> Contains(const Value& container, const Value& item, Budget* budget);

// Python's str.strip(): white space, or any of `characters`.
std::string StripText(std::string_view text, const Value* characters, bool left, bool right);
// Python's str.isspace() of one character.
bool IsPythonSpace(char32_t c);
std::string UpperCase(std::string_view text);
std::string LowerCase(std::string_view text);

}  // namespace stockpot::chat
