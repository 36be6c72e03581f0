// Files that somebody, or a broken disk, has changed: an error each time, no crash, no large allocation. Runs under the
// sanitizers with the rest.
#include <gtest/gtest.h>

#include <random>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/core/text.h"
#include "tests/checkpoint/allocations.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::Folder;
using testing::largest_allocation;
using testing::reset_largest_allocation;

std::string header_of(const std::string& file) {
  return file.substr(
      0, 8 + static_cast<std::size_t>(parse_header_size(file, static_cast<std::int64_t>(file.size()), "f")));
}

// Changes bytes, cuts, repeats or inserts pieces, with an eye on digits and brackets.
std::string mutate(std::string text, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  for (unsigned k = 1 + below(3); k > 0 && !text.empty(); --k) {
    const std::size_t at = below(text.size());
    switch (below(7)) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text[at] = "0123456789[]{}:,\"-."[below(19)];
        break;
      case 2:
        text.erase(at, 1 + below(12));
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), 1 + below(40)));
        break;
      case 4:
        text.insert(at, "99999999999999999999", 1 + below(20));
        break;
      case 5: {
        const std::size_t digit = text.find_first_of("0123456789", at);
        if (digit != std::string::npos) text[digit] = static_cast<char>('0' + below(10));
        break;
      }
      default:
        text.resize(at);
    }
  }
  return text;
}

TEST(Hostile, MutatedHeaders) {
  const Folder folder;
  const std::vector<SaveItem> items = {{"a", Spec::parse("f32[6,4] @ 2(x) : S(0)")},
                                       {"b", Spec::parse("i64[9] @ 2(x) : S(0,2)")},
                                       {"c", Spec::parse("bf16[3,3] @ 2(x) : R")}};
  const std::string where = testing::save_all(folder.path(), items, 2, {.step = 5, .metadata = {{"k", "v"}}});
  const std::string file = testing::bytes_of(where + "/model-00001-of-00002.safetensors");
  const std::string header = header_of(file);
  const std::string json = header.substr(8);
  std::mt19937 random(9);
  int refused = 0;
  int same = 0;
  reset_largest_allocation();
  for (int i = 0; i < 100'000; ++i) {
    const std::string bad = mutate(json, random);
    try {
      const auto bytes = static_cast<std::int64_t>(8 + bad.size() + file.size() - header.size());
      const StoredHeader read = parse_header(bad, bytes, "f");
      (void)parse_words(read, "f");
      ++same;  // the words are others, but mean a header
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_EQ(refused + same, 100'000);
  EXPECT_GT(refused, 80'000);
  EXPECT_LT(largest_allocation(), std::size_t{1} << 20);
}

// Of the index, with a checksum that is right again: what is in it must be checked too.
TEST(Hostile, MutatedIndexes) {
  const Folder folder;
  const std::vector<SaveItem> items = {{"a", Spec::parse("f32[6,4] @ 2x2(x,y) : S(0),R")},
                                       {"b", Spec::parse("i64[9] @ 4(x) : S(0,2)")}};
  const std::string where = testing::save_all(folder.path(), items, 4, {.step = 5});
  const std::string path = where + "/" + kIndexName;
  const std::string index = testing::bytes_of(path);
  std::mt19937 random(10);
  int refused = 0;
  reset_largest_allocation();
  const Spec wants = Spec::parse("f32[6,4] @ 1(x) : R");
  for (int i = 0; i < 20'000; ++i) {
    const std::string bad = mutate(index, random);
    try {
      (void)parse_index(bad, "i");
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 15'000);
  EXPECT_LT(largest_allocation(), std::size_t{8} << 20);
  // Specs alone, in an index that is right otherwise.
  const std::string spec = items[0].spec.to_string();
  for (int i = 0; i < 3'000; ++i) {
    CheckpointIndex changed = *parse_index(index, "i").ours;
    try {
      changed.tensors.at("a").spec = Spec::parse(mutate(spec, random));
      changed.tensors.at("a").writer = static_cast<std::int64_t>(random() % 3);
      if (changed.tensors.at("a").spec.mesh().max_rank() > 3) continue;
      testing::write_bytes(path, print_index(changed));
      Checkpoint checkpoint = Checkpoint::open(where);
      (void)checkpoint.verify();
      std::vector<float> values(24);
      checkpoint.read("a", wants, {0}, {4, 1}, values.data());
    } catch (const Error&) {
    }
  }
  EXPECT_LT(largest_allocation(), std::size_t{16} << 20);
}

TEST(Hostile, TruncatedFiles) {
  const Folder folder;
  const std::string where = testing::save_all(folder.path(), {{"a", Spec::parse("f32[6,4] @ 2(x) : S(0)")}}, 2);
  const std::string path = where + "/model-00001-of-00002.safetensors";
  const std::string file = testing::bytes_of(path);
  for (std::size_t n = 0; n < file.size(); ++n) {
    testing::write_bytes(path, file.substr(0, n));
    EXPECT_NE(error_of([&] { StoredData data(path); }), "no error") << n;
  }
  const std::string index = testing::bytes_of(where + "/" + kIndexName);
  for (std::size_t n = 0; n + 2 < index.size(); n += 3) {
    EXPECT_NE(error_of([&] { parse_index(index.substr(0, n), "i"); }), "no error") << n;
  }
}

TEST(Hostile, NamesThatArePaths) {
  for (const char* name : {"../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", ".hidden.safetensors",
                           "model.bin", "a\\b.safetensors", "a\nb.safetensors", ".safetensors"}) {
    EXPECT_EQ(error_of([&] { check_file_name(name, "i"); }),
              "[checkpoint] 'i': not the name of a file beside it; got " + in_quotes(name) +
                  "; expected a plain name that ends in .safetensors");
    const std::string index = "{\"weight_map\":{\"w\":" + std::string("\"../x.safetensors\"}}");
    EXPECT_NE(error_of([&] { parse_index(index, "i"); }), "no error");
  }
}

// An index whose words are right one by one, and which says another box than the file has.
TEST(Hostile, BoxesThatAreOthers) {
  const Folder folder;
  const std::string where = testing::save_all(folder.path(), {{"a", Spec::parse("f32[4,4] @ 2(x) : S(0)")}}, 2);
  const std::string path = where + "/" + kIndexName;
  CheckpointIndex index = *parse_index(testing::bytes_of(path), path).ours;
  const auto read_as = [&](const char* spec) {
    index.tensors.at("a").spec = Spec::parse(spec);
    testing::write_bytes(path, print_index(index));
    std::vector<float> values(1000);
    const TensorMeta& meta = index.tensors.at("a").spec.meta();
    const Spec wants = Spec::make(meta, Mesh::make({1}), {Replicate()});
    return error_of([&] { Checkpoint::open(where).read("a", wants, {0}, meta.stride(), values.data()); });
  };
  const std::string file = in_quotes(where + "/model-00001-of-00002.safetensors");
  EXPECT_EQ(read_as("f32[4,4] @ 2(x) : S(0)"), "no error");
  EXPECT_EQ(read_as("f32[4,4] @ 2(x) of [1,0] : S(0)"), "[checkpoint] a piece is not in its file; got 'a@0' in " +
                                                            in_quotes(where + "/model-00002-of-00002.safetensors"));
  EXPECT_EQ(read_as("f32[2,8] @ 2(x) : S(1)"),
            "[checkpoint] a piece is of another box than the index says; got 'a@0' in " + file +
                ": '0:2/4,0:4/4'; expected '0:2/2,0:4/8'");
  EXPECT_EQ(read_as("f16[4,4] @ 2(x) : S(0)"),
            "[checkpoint] a piece is of another type or shape than the index says; got 'a@0' in " + file +
                ": f32[2,4]; expected f16[2,4]");
  EXPECT_EQ(read_as("f32[4,2,2] @ 2(x) : S(0)").substr(0, 65),
            "[checkpoint] a piece is of another type or shape than the index s");
  EXPECT_EQ(read_as("f32[4~2@0,4] @ 2(x) : S(0)[1]"),
            "[checkpoint] a piece is of another box than the index says; got 'a@0' in " + file +
                ": '0:2/4,0:4/4'; expected '0:2/2*0:1/2,0:4/4'");
  EXPECT_EQ(read_as("f32[1000000000000,1000] @ 2(x) : S(0)").substr(0, 30), "[checkpoint] a piece is of ano");
  EXPECT_EQ(read_as("f32[4,4] @ 3(x) : S(0)").substr(0, 20), "[checkpoint] '" + where.substr(0, 6));
  EXPECT_EQ(read_as("f32[4,4] @ 2(x) : P(sum)").substr(0, 14), "[checkpoint] '");
}

}  // namespace
}  // namespace dtensor
