// The filters that chat_sequence_filters.cc gives to the table in chat_filters.cc.
#pragma once

#include "kernels/base/status.h"
#include "serve/text/chat_functions.h"

namespace stockpot::chat {

Result<Value> Join(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> First(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Last(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> ToList(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Reverse(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Sort(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> DictSort(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Unique(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Map(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Select(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Reject(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> SelectAttribute(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> RejectAttribute(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Minimum(const Value& value, const Arguments& arguments, Budget* budget);
Result<Value> Maximum(const Value& value, const Arguments& arguments, Budget* budget);

}  // namespace stockpot::chat
