#include "dtensor/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "dtensor/checkpoint/checksum.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::error_of;

TEST(Checksum, IsCrc32cOnEveryPath) {
  EXPECT_EQ(checksum("123456789", 9), 0xe3069283u);
  EXPECT_EQ(checksum_by_tables("123456789", 9), 0xe3069283u);
  EXPECT_EQ(checksum("", 0), 0u);
  std::string bytes;
  for (int i = 0; i < 20'000; ++i) bytes.push_back(static_cast<char>(i * i >> 3));
  for (const std::size_t n : {1u, 7u, 8u, 255u, 256u, 257u, 511u, 512u, 1023u, 3071u, 3072u, 3073u, 9999u, 20'000u}) {
    const std::uint32_t all = checksum_by_tables(bytes.data(), n);
    EXPECT_EQ(checksum(bytes.data(), n), all) << n;
    alignas(64) static char copy[20'100];
    for (const std::size_t shift : {0, 3}) {  // 3: not aligned
      std::memset(copy, 'x', sizeof copy);
      EXPECT_EQ(copy_with_checksum(copy + shift, bytes.data(), n), all) << n;
      EXPECT_EQ(std::string(copy + shift, n), bytes.substr(0, n)) << n;
      EXPECT_EQ(copy[n + shift], 'x') << n;
    }
    EXPECT_EQ(checksum(bytes.data() + n / 3, n - n / 3, checksum(bytes.data(), n / 3)), all) << n;
  }
  EXPECT_EQ(checksum_text(0x0012ab34), "0012ab34");
  EXPECT_EQ(parse_checksum("0012ab34"), 0x0012ab34u);
  EXPECT_EQ(parse_checksum("0012ab3"), std::nullopt);
  EXPECT_EQ(parse_checksum("0012ab3G"), std::nullopt);
}

TEST(Safetensors, PrintsWhatItReads) {
  std::vector<StoredEntry> entries = {
      {"b", DType::kBool, {3}}, {"w \"x\"", DType::kF32, {2, 3}}, {"e", DType::kI64, {0, 4}}};
  const std::string header = print_header(entries, {{"format", "pt"}});
  const std::string json = header.substr(8);
  EXPECT_EQ(json.substr(0, json.find_last_not_of(' ') + 1),
            R"({"__metadata__":{"format":"pt"},"e":{"dtype":"I64","shape":[0,4],"data_offsets":[0,0]},)"
            R"("w \"x\"":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
            R"("b":{"dtype":"BOOL","shape":[3],"data_offsets":[24,27]}})");
  EXPECT_EQ(header.size() % 8, 0u);
  const auto file = static_cast<std::int64_t>(header.size()) + 27;
  EXPECT_EQ(parse_header_size(header, file, "f"), static_cast<std::int64_t>(json.size()));
  const StoredHeader read = parse_header(json, file, "f");
  EXPECT_EQ(read.entries, entries);
  EXPECT_EQ(read.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(read.data_begin, static_cast<std::int64_t>(header.size()));
  std::vector<StoredEntry> complex = {{"c", DType::kC128, {1}}};
  EXPECT_EQ(error_of([&] { print_header(complex, {}); }),
            "[safetensors] the format has no such type; got c128 for 'c'; try view_as_real");
}

struct Bad {
  const char* json;
  std::int64_t data;  // bytes after the header
  const char* error;
};

TEST(Safetensors, RefusesWhatDoesNotFit) {
  const Bad table[] = {
      {"", 0, "'f': not a safetensors file: its header is not an object"},
      {"[]", 0, "'f': not a safetensors file: its header is not an object"},
      {"{", 0, "'f': not JSON at byte 2; got '{'; expected JSON"},
      {"{} x", 0, "'f': not JSON at byte 4; got '{} x'; expected JSON"},
      {R"({"a":1,"a":2})", 0, R"('f': the name 'a' stands twice; got '{"a":1,"a":2}'; expected JSON)"},
      {R"({"a":1})", 0, "'f': the entry 'a' is not an object"},
      {R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4, "'f': the entry 'a' has no dtype"},
      {R"({"a":{"dtype":"F99","shape":[],"data_offsets":[0,4]}})", 4,
       "'f': the entry 'a' is of a type that is not known here; got '\"F99\"'"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4,
       "'f': the entry 'a''s shape is not a size; got '-1'"},
      {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4,
       "'f': the entry 'a''s shape is not a size; got '1.5'"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})", 4,
       "'f': the entry 'a''s shape is not a size; got '18446744073709551615'"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
       "'f': the entry 'a' does not have the bytes of its type and shape; got f32[4611686018427387904,4] at 0 to 0"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
       "'f': the entry 'a' does not have the bytes of its type and shape; got f32[2] at 0 to 4"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4,
       "'f': the entry 'a' does not have the bytes of its type and shape; got f32[1] at 4 to 0"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}})", 4,
       "'f': the entry 'a' has more than dtype, shape and data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8,
       "'f': the entry 'a' leaves a gap; got it begins at 4; expected 0"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       8, "'f': the entry 'b' overlaps another; got it begins at 4; expected 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7,
       "'f': the file ends before its entries do; got 7 bytes of data; expected 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 9,
       "'f': the file goes on after its entries; got 9 bytes of data; expected 8"},
      {R"({"__metadata__":{"a":1}})", 0, "'f': __metadata__ has something else than text under 'a'"},
      {R"({"__metadata__":[]})", 0, "'f': __metadata__ is not an object"},
      {"{\"a\":[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}", 0, "'f': more than 16 levels"},
  };
  for (const Bad& bad : table) {
    const std::string json = bad.json;
    const std::string got =
        error_of([&] { parse_header(json, 8 + static_cast<std::int64_t>(json.size()) + bad.data, "f"); });
    EXPECT_EQ(got.substr(0, std::strlen("[safetensors] ") + std::strlen(bad.error)),
              "[safetensors] " + std::string(bad.error))
        << json;
  }
  EXPECT_EQ(error_of([] { parse_header_size("1234567", 7, "f"); }),
            "[safetensors] 'f': too short for a safetensors file; got 7 bytes");
  EXPECT_EQ(error_of([] { parse_header_size(std::string(8, '\xff'), 100, "f"); }),
            "[safetensors] 'f': not a safetensors file: its header does not fit; got 18446744073709551615 bytes of "
            "header; expected at most 92");
  EXPECT_EQ(error_of([] { parse_header_size(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8), kInt64Max, "f"); }),
            "[safetensors] 'f': not a safetensors file: its header does not fit; got 100000001 bytes of header; "
            "expected at most 100000000");
}

}  // namespace
}  // namespace dtensor
