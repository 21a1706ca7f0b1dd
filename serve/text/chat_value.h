// The values of a chat template: Python's, as far as templates use them.
//
// Values are immutable and shared, but for namespaces, which the renderer owns (a namespace may
// hold itself; owned by values it would leak). Nesting of lists and dicts is bounded when they are
// made, so recursion over a value is bounded too; because one list may stand many times in another,
// every walk over a value also pays from a Budget.
//
// Thread promise: one thread (one Render) owns its values.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/status.h"
#include "serve/text/chat_template.h"

namespace stockpot::chat {

struct Stmt;
class Value;

// What one Render may still spend.
class Budget {
 public:
  Status Step(int64_t count = 1);
  // Bytes of strings, or of anything that takes memory.
  Status Bytes(size_t count);

 private:
  int64_t steps_ = ChatTemplateLimits::kMaxSteps;
  size_t bytes_ = ChatTemplateLimits::kMaxWorkBytes;
};

// Keys in the order they came; keys are strings.
struct Dict {
  std::vector<std::pair<std::string, Value>> entries;
  const Value* Find(std::string_view key) const;
  void Set(std::string key, Value value);
};

struct List;
struct Loop;

class Value {
 public:
  enum class Kind {
    kUndefined,
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kList,  // and tuple
    kDict,
    kNamespace,
    kLoop,      // the variable `loop`
    kFunction,  // a global function, by name
    kMethod,    // a method without its call; can only be tested
    kMacro,
  };

  Value() = default;  // undefined
  static Value Undefined(std::string what);
  static Value None();
  static Value Bool(bool value);
  static Value Int(int64_t value);
  static Value Float(double value);
  static Value String(std::string text);
  // InvalidArgument when nested too deeply; pays for the elements.
  static Result<Value> MakeList(std::vector<Value> items, Budget* budget, bool tuple = false);
  static Result<Value> MakeDict(Dict dict, Budget* budget);
  static Value Namespace(Dict* owned_by_renderer);
  static Value OfLoop(std::shared_ptr<Loop> loop);
  static Value Function(std::string name);
  static Value Method(std::string name);
  static Value Macro(const Stmt* macro);
  static Result<Value> FromJson(const nlohmann::ordered_json& json, Budget* budget, int depth = 0);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_number() const { return is(Kind::kInt) || is(Kind::kFloat) || is(Kind::kBool); }
  bool is_integer() const { return is(Kind::kInt) || is(Kind::kBool); }
  int depth() const { return depth_; }

  // REQUIRES the kind that the name says.
  int64_t integer() const { return integer_; }  // also of a bool
  double number() const { return is(Kind::kFloat) ? float_ : static_cast<double>(integer_); }
  const std::string& string() const;  // also: what is undefined, the name of a function or method
  const std::vector<Value>& items() const;
  bool is_tuple() const;
  const Dict& dict() const { return is(Kind::kNamespace) ? *namespace_ : *dict_; }
  Dict* mutable_namespace() const { return namespace_; }
  const std::shared_ptr<Loop>& loop() const { return loop_; }
  const Stmt* macro() const { return macro_; }

  bool Truthy() const;
  // "a string", "a list", ... for messages.
  std::string_view TypeName() const;

 private:
  Kind kind_ = Kind::kUndefined;
  int depth_ = 0;  // of nested lists and dicts
  int64_t integer_ = 0;
  double float_ = 0;
  std::shared_ptr<const std::string> string_;
  std::shared_ptr<const List> list_;
  std::shared_ptr<const Dict> dict_;
  std::shared_ptr<Loop> loop_;
  Dict* namespace_ = nullptr;
  const Stmt* macro_ = nullptr;
};

struct List {
  std::vector<Value> items;
  bool tuple = false;
};

// The state behind the variable `loop`.
struct Loop {
  std::vector<Value> items;
  int64_t index0 = 0;
};

// Python's str(): what {{ }} writes. Undefined is "".
Result<std::string> ToText(const Value& value, Budget* budget);
// Python's ==.
Result<bool> Equal(const Value& a, const Value& b, Budget* budget);
// Python's <, as -1, 0, 1. InvalidArgument for kinds without an order between them.
Result<int> Compare(const Value& a, const Value& b, Budget* budget);
// The elements of a list, the keys of a dict, the characters of a string; nothing for undefined.
Result<std::vector<Value>> Iterate(const Value& value, Budget* budget);
// Python's len(). InvalidArgument for values without one.
Result<int64_t> Length(const Value& value);

// Python's json.dumps(ensure_ascii=False) unless told otherwise.
struct JsonStyle {
  int indent = -1;  // -1: one line
  bool sort_keys = false;
  bool ensure_ascii = false;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
Result<std::string> ToJson(const Value& value, const JsonStyle& style, Budget* budget);

// Python's repr() of a float.
std::string FloatText(double value);

}  // namespace stockpot::chat
