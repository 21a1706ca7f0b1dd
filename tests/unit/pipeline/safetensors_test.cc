// The header: an accept table, a reject table, and seeded mutations of valid files.
#include "store/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <random>

#include "tests/unit/pipeline/test_model.h"

namespace stockpot {
namespace {

std::vector<std::byte> File(const std::string& header, int64_t data_bytes) {
  std::vector<std::byte> file(8 + header.size() + static_cast<size_t>(data_bytes));
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  std::memcpy(file.data() + 8, header.data(), header.size());
  return file;
}

Result<SafetensorsHeader> Parse(const std::vector<std::byte>& file) {
  return ParseSafetensorsHeader(file, static_cast<int64_t>(file.size()));
}

struct Accepted {
  const char* why;
  std::string header;
  int64_t data_bytes;
  size_t tensors;
};

TEST(SafetensorsHeaderTest, Accepts) {
  const std::vector<Accepted> table = {
      {"no tensors", "{}", 0, 0},
      {"one", R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24, 1},
      {"padded with spaces", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   )", 4, 1},
      {"metadata",
       R"({"__metadata__":{"format":"pt"},"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}})", 3,
       1},
      {"fields in another order", R"({"a":{"data_offsets":[0,2],"shape":[1],"dtype":"BF16"}})", 2,
       1},
      {"a scalar", R"({"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})", 8, 1},
      {"empty tensors between others",
       R"({"b":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"F16","shape":[0,7],"data_offsets":[4,4]},"c":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})",
       5, 3},
      {"header order is not data order",
       R"({"z":{"dtype":"U8","shape":[2],"data_offsets":[3,5]},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})",
       5, 2},
      {"names in UTF-8", R"({"ä.\u00e9":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, 1},
  };
  for (const Accepted& row : table) {
    const Result<SafetensorsHeader> header = Parse(File(row.header, row.data_bytes));
    ASSERT_TRUE(header.ok()) << row.why << ": " << header.status().ToString();
    EXPECT_EQ(header->tensors.size(), row.tensors) << row.why;
    EXPECT_EQ(header->data_offset, static_cast<int64_t>(8 + row.header.size())) << row.why;
  }
  const auto metadata = Parse(File(table[3].header, 3));
  EXPECT_EQ(metadata->metadata.at("format"), "pt");
  const auto sorted = Parse(File(table[7].header, 5));
  EXPECT_EQ(sorted->tensors[0].info.name, "a");
  EXPECT_EQ(sorted->tensors[1].begin, 3);
}

struct Rejected {
  std::string header;
  int64_t data_bytes;
  std::string message;  // a part of it
};

std::string Tensor(const std::string& fields) { return "{\"layer.w\":{" + fields + "}}"; }

TEST(SafetensorsHeaderTest, Rejects) {
  std::string deep(100'000, '[');
  std::string deep_objects;
  for (int i = 0; i < 50'000; ++i) deep_objects += "{\"a\":";
  const std::vector<Rejected> table = {
      {"", 0, "no JSON object"},
      {"[]", 0, "no JSON object"},
      {" {}", 0, "no JSON object"},
      {"{", 0, "not valid JSON"},
      {"{}x", 0, "not valid JSON"},
      {"{}", 4, "end at byte 0 of 4"},
      {deep, 0, "no JSON object"},
      {"{\"layer.w\":" + deep, 0, "layer.w"},
      {deep_objects, 0, "unknown field"},
      {Tensor(R"("dtype":"F32","shape":)" + deep), 0, "layer.w"},
      {"{\"\xff\":{}}", 0, "not valid JSON"},
      {"{\"\":{}}", 0, "a name of 0 bytes"},
      {"{\"" + std::string(600, 'n') + "\":{}}", 0, "a name of 600 bytes"},
      {R"({"layer.w":null})", 0, "unexpected null"},
      {R"({"layer.w":3})", 0, "unexpected a number"},
      {R"({"__metadata__":{"a":1}})", 0, "unexpected a number"},
      {R"({"__metadata__":{"a":{}}})", 0, "unexpected an object"},
      {Tensor(""), 0, "needs dtype, shape and data_offsets"},
      {Tensor(R"("dtype":"F32","shape":[1])"), 4, "needs dtype, shape and data_offsets"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"dtype":"F32")"), 4, "twice"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":1)"), 4, "unknown field"},
      {Tensor(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"), 4, "unknown dtype 'F31'"},
      {Tensor(R"("dtype":7,"shape":[1],"data_offsets":[0,4])"), 4, "unexpected a number"},
      {Tensor(R"("dtype":"F32","shape":"1","data_offsets":[0,4])"), 4, "unexpected a string"},
      {Tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4, "negative"},
      {Tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), 4, "fraction"},
      {Tensor(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"), 4, "too many"},
      {Tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), 4, "2^63"},
      {Tensor(R"("dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4])"), 4,
       "fraction"},
      {Tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"), 4, "over"},
      {Tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4, "needs 8 bytes"},
      {Tensor(R"("dtype":"F16","shape":[2],"data_offsets":[0,8])"), 8, "needs 4 bytes"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), 4, "two numbers"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), 4, "too many"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4, "do not fit"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 3, "do not fit"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[1,5])"), 5, "leave a gap"},
      {Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 5, "end at byte 4 of 5"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"layer.w":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "tensor 'layer.w': offsets [2, 6) overlap"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"layer.w":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
       5, "tensor 'layer.w': offsets [3, 5) leave a gap"},
      {R"({"layer.w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"layer.w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "'layer.w' appears twice"},
  };
  for (const Rejected& row : table) {
    const Result<SafetensorsHeader> header = Parse(File(row.header, row.data_bytes));
    ASSERT_FALSE(header.ok()) << row.header.substr(0, 200);
    EXPECT_NE(header.status().message().find(row.message), std::string::npos)
        << row.header.substr(0, 200) << "\n-> " << header.status().ToString();
    EXPECT_LT(header.status().message().size(), 1000u);
  }
}

TEST(SafetensorsHeaderTest, RejectsLyingLengths) {
  const std::vector<std::byte> valid =
      File(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 2);
  ASSERT_OK(Parse(valid));
  for (const uint64_t length : {uint64_t{kMaxSafetensorsHeaderBytes} + 1, ~uint64_t{0},
                                uint64_t{1} << 63, uint64_t{valid.size()}, uint64_t{0}}) {
    std::vector<std::byte> file = valid;
    std::memcpy(file.data(), &length, 8);
    EXPECT_EQ(Parse(file).status().code(), StatusCode::kCorruption) << length;
  }
  for (size_t n = 0; n < valid.size(); ++n) {  // a file that was cut off anywhere
    EXPECT_FALSE(Parse({valid.begin(), valid.begin() + static_cast<int64_t>(n)}).ok()) << n;
  }
}

TEST(SafetensorsHeaderTest, MutationsNeverCrashAndNeverAcceptWhatDoesNotTile) {
  std::mt19937_64 random(TestSeed());
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"model.layers.0.w":{"dtype":"BF16","shape":[3,5],"data_offsets":[0,30]},"n":{"dtype":"F32","shape":[],"data_offsets":[30,34]},"z":{"dtype":"I64","shape":[0],"data_offsets":[34,34]}})";
  const std::vector<std::byte> valid = File(header, 34);
  const std::string alphabet = "{}[]\":,0123456789-.eEtrufalsn \\F32BU8\xff";
  int accepted = 0;
  for (int round = 0; round < 50'000; ++round) {
    std::vector<std::byte> file = valid;
    const int edits = 1 + static_cast<int>(random() % 4);
    for (int e = 0; e < edits && !file.empty(); ++e) {
      const size_t at = random() % file.size();
      const auto value = static_cast<std::byte>(
          random() % 3 == 0 ? random() & 0xff
                            : static_cast<unsigned char>(alphabet[random() % alphabet.size()]));
      switch (random() % 4) {
        case 0:
          file[at] = value;
          break;
        case 1:
          file.insert(file.begin() + static_cast<int64_t>(at), value);
          break;
        case 2:
          file.erase(file.begin() + static_cast<int64_t>(at));
          break;
        case 3:
          file.resize(at + 1);
          break;
      }
    }
    const Result<SafetensorsHeader> parsed = Parse(file);
    if (!parsed.ok()) continue;
    ++accepted;
    int64_t end = 0;
    for (const SafetensorsEntry& entry : parsed->tensors) {
      ASSERT_EQ(entry.begin, end);
      end += entry.info.bytes();
    }
    ASSERT_EQ(parsed->data_offset + end, static_cast<int64_t>(file.size()));
  }
  EXPECT_GT(accepted, 100);  // edits of names and data keep a file valid: both sides were met
}

}  // namespace
}  // namespace stockpot
