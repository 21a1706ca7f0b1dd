// Filters over lists and mappings. See chat_filter_list.h.
#include <algorithm>
#include <charconv>

#include "serve/text/chat_filter_list.h"
#include "serve/text/chat_functions.h"

namespace stockpot::chat {
namespace {

using Kind = Value::Kind;

bool IsTrue(const Value* value) { return value != nullptr && value->Truthy(); }

// value.a.b for the `attribute` arguments; dots go deeper, digits are indexes.
Result<Value> Path(Value value, std::string_view path, Budget* budget) {
  while (true) {
    const size_t dot = path.find('.');
    const std::string_view part = path.substr(0, dot);
    int64_t index = 0;
    const auto parsed = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool digits = !part.empty() && parsed.ec == std::errc() &&
                        parsed.ptr == part.data() + part.size() && part[0] != '-';
    STOCKPOT_ASSIGN_OR_RETURN(
        value,
        GetItem(value, digits ? Value::Int(index) : Value::String(std::string(part)), budget));
    if (dot == path.npos) return value;
    path.remove_prefix(dot + 1);
  }
}

Result<Value> PathOf(const Value& value, const Value* attribute, Budget* budget) {
  if (attribute == nullptr || attribute->is(Kind::kNone)) return value;
  if (attribute->is(Kind::kInt)) return GetItem(value, *attribute, budget);
  if (!attribute->is(Kind::kString)) return InvalidArgument("attribute must be a name");
  return Path(value, attribute->string(), budget);
}

// Sorts by a key; comparing can fail, so this is a merge sort that can stop.
class Sorter {
 public:
  Sorter(bool case_sensitive, Budget* budget) : case_sensitive_(case_sensitive), budget_(budget) {}

  Status Add(Value key, Value item) {
    if (!case_sensitive_ && key.is(Kind::kString)) {
      STOCKPOT_RETURN_IF_ERROR(budget_->Bytes(key.string().size()));
      key = Value::String(LowerCase(key.string()));
    }
    entries_.emplace_back(std::move(key), std::move(item));
    return OkStatus();
  }

  Result<std::vector<Value>> Run(bool reverse) {
    Status status;
    // A failed comparison makes all later ones equal: still an order, then thrown away.
    std::stable_sort(entries_.begin(), entries_.end(), [&](const auto& a, const auto& b) {
      if (!status.ok()) return false;
      Result<int> order = Compare(a.first, b.first, budget_);
      if (!order.ok()) status = order.status();
      return order.ok() && (reverse ? *order > 0 : *order < 0);
    });
    STOCKPOT_RETURN_IF_ERROR(status);
    std::vector<Value> out;
    for (auto& entry : entries_) out.push_back(std::move(entry.second));
    return out;
  }

 private:
  const bool case_sensitive_;
  Budget* budget_;
  std::vector<std::pair<Value, Value>> entries_;
};

// select, reject, selectattr, rejectattr
Result<Value> Choose(const Value& value, const Arguments& arguments, bool keep, bool by_attribute,
                     Budget* budget) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  const size_t test_index = by_attribute ? 1 : 0;
  if (by_attribute && arguments.positional.empty()) {
    return InvalidArgument("selectattr and rejectattr need an attribute");
  }
  std::string test;
  Arguments rest;
  if (arguments.positional.size() > test_index) {
    const Value& name = arguments.positional[test_index];
    if (!name.is(Kind::kString) || !IsTest(name.string())) return InvalidArgument("no such test");
    test = name.string();
    rest.positional.assign(
        arguments.positional.begin() + static_cast<std::ptrdiff_t>(test_index) + 1,
        arguments.positional.end());
  }
  std::vector<Value> out;
  for (const Value& item : items) {
    STOCKPOT_RETURN_IF_ERROR(budget->Step());
    Value tested = item;
    if (by_attribute) {
      STOCKPOT_ASSIGN_OR_RETURN(tested, PathOf(item, &arguments.positional[0], budget));
    }
    bool chosen = tested.Truthy();
    if (!test.empty()) {
      STOCKPOT_ASSIGN_OR_RETURN(chosen, ApplyTest(test, tested, rest, budget));
    }
    if (chosen == keep) out.push_back(item);
  }
  return Value::MakeList(std::move(out), budget);
}

Result<Value> Extreme(const Value& value, const Arguments& arguments, int sign, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(2, {"case_sensitive", "attribute"}));
  Sorter sorter(IsTrue(arguments.Find(0, "case_sensitive")), budget);
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  for (const Value& item : items) {
    STOCKPOT_ASSIGN_OR_RETURN(Value key, PathOf(item, arguments.Find(1, "attribute"), budget));
    STOCKPOT_RETURN_IF_ERROR(sorter.Add(std::move(key), item));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto sorted, sorter.Run(/*reverse=*/sign > 0));
  return sorted.empty() ? Value::Undefined("the extreme of nothing") : sorted.front();
}
}  // namespace

Result<Value> Join(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(2, {"d", "attribute"}));
  std::string separator, out;
  if (const Value* given = arguments.Find(0, "d")) {
    STOCKPOT_ASSIGN_OR_RETURN(separator, ToText(*given, budget));
  }
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  for (size_t i = 0; i < items.size(); ++i) {
    STOCKPOT_ASSIGN_OR_RETURN(const Value item,
                              PathOf(items[i], arguments.Find(1, "attribute"), budget));
    STOCKPOT_ASSIGN_OR_RETURN(const std::string text, ToText(item, budget));
    STOCKPOT_RETURN_IF_ERROR(budget->Bytes(separator.size() + text.size()));
    if (i > 0) out += separator;
    out += text;
  }
  return Value::String(std::move(out));
}

Result<Value> First(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  return items.empty() ? Value::Undefined("the first of nothing") : items.front();
}

Result<Value> Last(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  return items.empty() ? Value::Undefined("the last of nothing") : items.back();
}

Result<Value> ToList(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(auto items, Iterate(value, budget));
  return Value::MakeList(std::move(items), budget);
}

Result<Value> Reverse(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(0));
  STOCKPOT_ASSIGN_OR_RETURN(auto items, Iterate(value, budget));
  std::reverse(items.begin(), items.end());
  if (!value.is(Kind::kString)) return Value::MakeList(std::move(items), budget);
  std::string out;
  for (const Value& item : items) out += item.string();
  return Value::String(std::move(out));
}

Result<Value> Sort(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(3, {"reverse", "case_sensitive", "attribute"}));
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  Sorter sorter(IsTrue(arguments.Find(1, "case_sensitive")), budget);
  for (const Value& item : items) {
    STOCKPOT_ASSIGN_OR_RETURN(Value key, PathOf(item, arguments.Find(2, "attribute"), budget));
    STOCKPOT_RETURN_IF_ERROR(sorter.Add(std::move(key), item));
  }
  STOCKPOT_ASSIGN_OR_RETURN(auto sorted, sorter.Run(IsTrue(arguments.Find(0, "reverse"))));
  return Value::MakeList(std::move(sorted), budget);
}

Result<Value> DictSort(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(3, {"case_sensitive", "by", "reverse"}));
  if (!value.is(Kind::kDict))
    return InvalidArgument("dictsort of " + std::string(value.TypeName()));
  const Value* by = arguments.Find(1, "by");
  const bool by_value = by != nullptr && by->is(Kind::kString) && by->string() == "value";
  Sorter sorter(IsTrue(arguments.Find(0, "case_sensitive")), budget);
  for (const auto& [key, item] : value.dict().entries) {
    STOCKPOT_ASSIGN_OR_RETURN(Value pair,
                              Value::MakeList({Value::String(key), item}, budget, /*tuple=*/true));
    STOCKPOT_RETURN_IF_ERROR(sorter.Add(by_value ? item : Value::String(key), std::move(pair)));
  }
  STOCKPOT_ASSIGN_OR_RETURN(auto sorted, sorter.Run(IsTrue(arguments.Find(2, "reverse"))));
  return Value::MakeList(std::move(sorted), budget);
}

Result<Value> Unique(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_RETURN_IF_ERROR(arguments.Check(2, {"case_sensitive", "attribute"}));
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  std::vector<Value> keys, out;
  for (const Value& item : items) {
    STOCKPOT_ASSIGN_OR_RETURN(Value key, PathOf(item, arguments.Find(1, "attribute"), budget));
    if (!IsTrue(arguments.Find(0, "case_sensitive")) && key.is(Kind::kString)) {
      key = Value::String(LowerCase(key.string()));
    }
    bool seen = false;
    for (size_t i = 0; i < keys.size() && !seen; ++i) {
      STOCKPOT_ASSIGN_OR_RETURN(seen, Equal(keys[i], key, budget));
    }
    if (seen) continue;
    keys.push_back(std::move(key));
    out.push_back(item);
  }
  return Value::MakeList(std::move(out), budget);
}

Result<Value> Map(const Value& value, const Arguments& arguments, Budget* budget) {
  STOCKPOT_ASSIGN_OR_RETURN(const auto items, Iterate(value, budget));
  std::vector<Value> out;
  const Value* attribute = nullptr;
  const Value* otherwise = nullptr;
  if (arguments.positional.empty()) {
    STOCKPOT_RETURN_IF_ERROR(arguments.Check(0, {"attribute", "default"}));
    attribute = arguments.Find(0, "attribute");
    otherwise = arguments.Find(1, "default");
    if (attribute == nullptr) return InvalidArgument("map needs a filter or an attribute");
  } else if (!arguments.positional[0].is(Kind::kString) ||
             !IsFilter(arguments.positional[0].string())) {
    return InvalidArgument("map: no such filter");
  }
  for (const Value& item : items) {
    STOCKPOT_RETURN_IF_ERROR(budget->Step());
    if (attribute != nullptr) {
      STOCKPOT_ASSIGN_OR_RETURN(Value mapped, PathOf(item, attribute, budget));
      if (mapped.is(Kind::kUndefined) && otherwise != nullptr) mapped = *otherwise;
      out.push_back(std::move(mapped));
    } else {
      Arguments rest = arguments;
      rest.positional.erase(rest.positional.begin());
      STOCKPOT_ASSIGN_OR_RETURN(Value mapped,
                                ApplyFilter(arguments.positional[0].string(), item, rest, budget));
      out.push_back(std::move(mapped));
    }
  }
  return Value::MakeList(std::move(out), budget);
}

Result<Value> Select(const Value& value, const Arguments& arguments, Budget* budget) {
  return Choose(value, arguments, true, false, budget);
}
Result<Value> Reject(const Value& value, const Arguments& arguments, Budget* budget) {
  return Choose(value, arguments, false, false, budget);
}
Result<Value> SelectAttribute(const Value& value, const Arguments& arguments, Budget* budget) {
  return Choose(value, arguments, true, true, budget);
}
Result<Value> RejectAttribute(const Value& value, const Arguments& arguments, Budget* budget) {
  return Choose(value, arguments, false, true, budget);
}

Result<Value> Minimum(const Value& value, const Arguments& arguments, Budget* budget) {
  return Extreme(value, arguments, -1, budget);
}
Result<Value> Maximum(const Value& value, const Arguments& arguments, Budget* budget) {
  return Extreme(value, arguments, 1, budget);
}

}  // namespace stockpot::chat
