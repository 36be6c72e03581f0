// Checksums of blocks: every damaged byte that a load reads is an error, on any layout.
#include "dtensor/checkpoint/blocks.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <set>

#include "dtensor/checkpoint/checksum.h"
#include "dtensor/checkpoint/convert.h"
#include "dtensor/core/text.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::bytes_of;
using testing::error_of;
using testing::Folder;
using testing::write_bytes;

// The elements of a copy as (source, target), in any order.
std::vector<std::pair<std::int64_t, std::int64_t>> elements_of(const Copies& copies) {
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  for (const Copy& copy : copies) {
    for_each_run(copy, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) all.emplace_back(from + i, to + i);
    });
  }
  std::sort(all.begin(), all.end());
  return all;
}

TEST(Blocks, ClipsCopiesToARange) {
  std::mt19937 random(4);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 3000; ++round) {
    Copy copy{below(20), below(20), {}};
    std::int64_t from = 1;
    std::int64_t to = 1;
    InlineVec<Copy::Dim, 4> dims;
    for (std::int64_t d = below(4); d > 0; --d) {
      const std::int64_t size = 2 + below(4);
      dims.push_back({size, from * (1 + below(3)), to * (1 + below(2))});
      from = dims.back().from * (size + below(2));
      to = dims.back().to * size;
    }
    for (std::size_t d = dims.size(); d-- > 0;) copy.dims.push_back(dims[d]);
    if (round % 2 == 1) std::reverse(copy.dims.begin(), copy.dims.end());  // targets are the other way round
    const Interval span = source_span(copy);
    const auto all = elements_of({copy});
    EXPECT_EQ(span.begin, all.front().first);
    EXPECT_EQ(span.end, all.back().first + 1);
    for (int k = 0; k < 8; ++k) {
      const std::int64_t begin = below(span.end + 8);
      const Interval range{begin, begin + below(40)};
      auto expected = all;
      std::erase_if(expected, [&](const auto& e) { return e.first < range.begin || e.first >= range.end; });
      Copies parts;
      clip_copy(copy, range, parts);
      EXPECT_EQ(elements_of(parts), expected);
      EXPECT_LE(parts.size(), 2 * copy.dims.size() + 1);
    }
    // Ranges side by side have each element once.
    Copies parts;
    for (std::int64_t begin = 0; begin < span.end; begin += 16) clip_copy(copy, {begin, begin + 16}, parts);
    EXPECT_EQ(elements_of(parts), all);
  }
}

TEST(Checksum, JoinsThoseOfBlocks) {
  std::string data(5000, '\0');
  std::mt19937 random(5);
  for (char& c : data) c = static_cast<char>(random());
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{16}, std::size_t{4096}, data.size()}) {
    for (const std::size_t block : {std::size_t{16}, std::size_t{1024}, std::size_t{5008}}) {
      std::vector<std::uint32_t> blocks;
      for (std::size_t at = 0; at < bytes; at += block) {
        blocks.push_back(checksum(data.data() + at, std::min(block, bytes - at)));
      }
      EXPECT_EQ(join_checksums(blocks, static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(block)),
                checksum(data.data(), bytes));
    }
  }
}

// Layouts in which a tensor of two dims or more is read, the one it was saved in among them.
const std::vector<std::string>& layouts() {
  static const std::vector<std::string> all = {"2(x) : S(0)", "2(x) : S(1)",          "1(x) : R",      "3(x) : S(0)",
                                               "3(x) : S(1)", "2x2(x,y) : S(1),S(0)", "2(x) : S(0,2)", "3(x) : S(1,2)"};
  return all;
}

// Reads all tensors in a layout, on all its ranks. Counts errors; every read without one must have the right values.
int errors_of_reads(const std::string& path, const std::vector<SaveItem>& items, const std::string& layout,
                    std::set<std::string>* texts = nullptr) {
  int errors = 0;
  const auto attempt = [&](const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      ++errors;
      if (texts) texts->insert(error.what());
    }
  };
  attempt([&] {
    Checkpoint checkpoint = Checkpoint::open(path);
    for (const SaveItem& item : items) {
      const TensorMeta meta(item.spec.meta().shape(), item.spec.meta().dtype());
      const Spec wants = Spec::parse(meta.to_string() + " @ " + layout);
      for (const std::int64_t rank : wants.mesh().ranks()) {
        const Dims at = *wants.mesh().coordinate(rank);
        const std::vector<char> expected = testing::part_of(wants, at, testing::salt_of(item.name));
        std::vector<char> got(expected.size(), 'x');
        attempt([&] {
          checkpoint.read(item.name, wants, at, row_major_stride(wants.local_shape(at)), got.data());
          EXPECT_TRUE(got == expected) << item.name << " as " << layout << " on rank " << rank << ": a wrong value";
        });
      }
    }
  });
  return errors;
}

std::vector<SaveItem> small_items() {
  return {{"rows", Spec::parse("f32[5,4] @ 2(x) : S(0)")},
          {"columns", Spec::parse("i16[3,6] @ 2(x) : S(1)")},
          {"whole", Spec::parse("f64[2,3] @ 2(x) : R")},
          {"strided", Spec::parse("u8[9,2] @ 2(x) : S(0,2)")}};
}

// Every byte of every file, headers, data and the index.
TEST(Blocks, AnyChangedByteIsAnError) {
  const Folder folder;
  const std::string where =
      testing::save_all(folder.path(), small_items(), 2, {.step = 5, .metadata = {{"k", "v"}}, .state = {{"a", "1"}}});
  for (const std::string& layout : layouts()) EXPECT_EQ(errors_of_reads(where, small_items(), layout), 0) << layout;
  for (const std::string& name : names_in(where)) {
    const std::string path = where + "/" + name;
    const std::string bytes = bytes_of(path);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
      write_bytes(path, changed);
      // All layouts for some bytes, two of them for each.
      for (std::size_t k = 0; k < layouts().size(); ++k) {
        if (i % 16 != 0 && k != i % 8 && k != (i + 3) % 8) continue;
        EXPECT_GT(errors_of_reads(where, small_items(), layouts()[k]), 0) << name << " byte " << i << layouts()[k];
      }
    }
    write_bytes(path, bytes);
  }
}

// The same of one file that stands alone, whose header no index knows.
TEST(Blocks, AnyChangedByteOfAMergedFileIsAnError) {
  const Folder folder;
  testing::save_all(folder / "a", small_items(), 2, {.step = 5});
  Checkpoint checkpoint = Checkpoint::open(folder / "a");
  const std::string path = folder / "merged.safetensors";
  merge_checkpoint(checkpoint, path);
  const std::string bytes = bytes_of(path);
  EXPECT_EQ(errors_of_reads(path, small_items(), "3(x) : S(1)"), 0);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; bit += 3) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ (1 << ((bit + static_cast<int>(i)) % 8)));
      write_bytes(path, changed);
      EXPECT_GT(errors_of_reads(path, small_items(), layouts()[i % 8]), 0) << "byte " << i << " bit " << bit;
    }
  }
}

// Tensors of many blocks: the block that is damaged is named, and is the only one that cannot be read.
TEST(Blocks, NamesTheDamagedBlock) {
  const Folder folder;
  const std::vector<SaveItem> items = {{"t", Spec::parse("f32[600,1001] @ 2(x) : S(0)")}};
  const std::string where = testing::save_all(folder.path(), items, 2);
  const std::string path = where + "/model-00002-of-00002.safetensors";
  const std::string bytes = bytes_of(path);
  const std::int64_t data = StoredData(path).header().data_begin;
  const std::int64_t entry = 300 * 1001 * 4;
  ASSERT_EQ(static_cast<std::int64_t>(bytes.size()), data + entry);
  for (const std::int64_t at : {std::int64_t{0}, kBlockBytes - 1, kBlockBytes, 3 * kBlockBytes + 17, entry - 1}) {
    std::string changed = bytes;
    changed[static_cast<std::size_t>(data + at)] ^= 4;
    write_bytes(path, changed);
    const std::int64_t begin = at / kBlockBytes * kBlockBytes;
    const std::int64_t end = std::min(begin + kBlockBytes, entry);
    const std::string text =
        "[checkpoint] the data is not what was saved: its checksum is another; got bytes " +
        std::to_string(data + begin) + " to " + std::to_string(data + end) + " of " + in_quotes(path) +
        ", which hold 't' (as 't@1'); try an earlier checkpoint, or an undamaged copy of this file; dtensor checkpoint "
        "verify lists all damage";
    for (const std::string& layout : layouts()) {
      std::set<std::string> texts;
      EXPECT_GT(errors_of_reads(where, items, layout, &texts), 0) << layout;
      EXPECT_EQ(texts, std::set<std::string>{text}) << layout;
    }
    EXPECT_EQ(Checkpoint::open(where).verify(), std::vector<std::string>{text});
    // Rows whose blocks are sound can be read.
    Checkpoint checkpoint = Checkpoint::open(where);
    std::vector<char> rows(10 * 1001 * 4);
    const Spec wants = Spec::parse("f32[600,1001] @ 60(x) : S(0)");
    for (std::int64_t rank = 0; rank < 60; ++rank) {
      const std::int64_t first = rank * 10 * 1001 * 4 - entry;
      const bool touches = first < end && first + 10 * 1001 * 4 > begin && rank >= 30;
      EXPECT_EQ(error_of([&] {
                  checkpoint.read("t", wants, {rank}, {1001, 1}, rows.data());
                }) != "no error",
                touches)
          << rank;
    }
  }
  // Neighbours are told as one.
  std::string changed = bytes;
  changed[static_cast<std::size_t>(data + kBlockBytes - 1)] ^= 4;
  changed[static_cast<std::size_t>(data + kBlockBytes)] ^= 4;
  changed[static_cast<std::size_t>(data + entry - 1)] ^= 4;
  write_bytes(path, changed);
  const std::vector<std::string> wrong = Checkpoint::open(where).verify();
  ASSERT_EQ(wrong.size(), 2u);
  EXPECT_NE(wrong[0].find("bytes " + std::to_string(data) + " to " + std::to_string(data + 2 * kBlockBytes)),
            std::string::npos)
      << wrong[0];
}

// A file with blocks of another size than ours, and data that is not aligned.
std::string write_with_blocks(const std::string& path, std::int64_t block) {
  const Spec spec = Spec::parse("f32[9,31] @ 1(x) : R");
  const std::vector<char> whole = testing::part_of(spec, {0}, testing::salt_of("t"));
  FileWords words;
  words.block = block;
  WriteEntry entry{.name = "t", .dtype = DType::kF32, .shape = {9, 31}};
  entry.data = data_at(whole.data());
  std::vector<WriteEntry> entries;
  entries.push_back(std::move(entry));
  write_file(path, std::move(entries), words, nullptr);
  return bytes_of(path);
}

TEST(Blocks, AnySizeUpTo1MiBIsRead) {
  const Folder folder;
  const std::vector<SaveItem> items = {{"t", Spec::parse("f32[9,31] @ 1(x) : R")}};
  for (const std::int64_t block : {std::int64_t{16}, std::int64_t{48}, std::int64_t{1024}, kMaxBlockBytes}) {
    const std::string path = folder / (std::to_string(block) + ".safetensors");
    const std::string bytes = write_with_blocks(path, block);
    for (const std::string& layout : layouts()) {
      Checkpoint checkpoint = Checkpoint::open(path);
      testing::expect_reads(checkpoint, "t", Spec::parse("f32[9,31] @ " + layout));
    }
    const auto data = static_cast<std::size_t>(StoredData(path).header().data_begin);
    for (std::size_t i = data; i < bytes.size(); i += 7) {
      std::string changed = bytes;
      changed[i] ^= 1;
      write_bytes(path, changed);
      EXPECT_GT(errors_of_reads(path, items, layouts()[i % layouts().size()]), 0) << block << " " << i;
    }
  }
}

// Replaces text in a header, whose length may change, and puts the right checksum in.
std::string with_header(const std::string& file, const std::string& from, const std::string& to) {
  const auto size = static_cast<std::size_t>(8 + parse_header_size(file, static_cast<std::int64_t>(file.size()), "f"));
  std::string json = file.substr(8, size - 8);
  const std::size_t at = json.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  json.replace(at, from.size(), to);
  const std::string seal = "\"dtensor.header\":\"";
  if (json.find(seal) != std::string::npos) json.replace(json.find(seal) + seal.size(), 8, "00000000");
  std::string header(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(json.size() >> (8 * i));
  header += json;
  if (json.find(seal) != std::string::npos) header = seal_header(header);
  return header + file.substr(size);
}

// Block tables that somebody wrote on purpose, with checksums that are right.
TEST(Blocks, RefusesTablesThatCannotBe) {
  const Folder folder;
  const std::string path = folder / "f.safetensors";
  const std::string file = write_with_blocks(path, 1024);
  const auto error_with = [&](const std::string& from, const std::string& to) {
    write_bytes(path, with_header(file, from, to));
    return error_of([&] { StoredData data(path); });
  };
  const std::string start = "[checkpoint] " + in_quotes(path) + ": ";
  EXPECT_EQ(error_with("\"1024\"", "\"1024\""), "no error");
  for (const char* size : {"0", "1", "8", "1000", "1048592", "2097152", "4294967296", "9223372036854775792"}) {
    EXPECT_EQ(
        error_with("\"1024\"", "\"" + std::string(size) + "\""),
        start + "blocks cannot be of this size; got " + size + " bytes; expected a multiple of 16, at most 1048576");
  }
  for (const char* size : {"-1", "", "x", "99999999999999999999", "1024 1"}) {
    EXPECT_NE(error_with("\"1024\"", "\"" + std::string(size) + "\""), "no error") << size;
  }
  for (const char* size : {"16", "512", "2048", "1048576"}) {
    EXPECT_EQ(
        error_with("\"1024\"", "\"" + std::string(size) + "\"").substr(0, (start + "the entry 't' has an").size()),
        start + "the entry 't' has an");
  }
  const std::string sums = "{\\\"t\\\":\\\"";
  EXPECT_EQ(error_with(sums, sums + "00000000"),
            start +
                "the entry 't' has another number of checksums than of blocks; got "
                "24 digits; expected 8 for each of 2 blocks of 1024 bytes");
  EXPECT_EQ(error_with(sums, sums + "0").substr(0, start.size() + 13), start + "the entry 't'");
  EXPECT_EQ(error_with(sums, "{\\\"u\\\":\\\"").substr(0, start.size() + 4), start + "no t");
  EXPECT_EQ(error_with(sums, "{\\\"u\\\":\\\"\\\",\\\"t\\\":\\\""), start + "checksums of an entry that is not there");
  EXPECT_NE(error_with(sums, "{\\\"t\\\":{\\\"a\\\":\\\""), "no error");
  const std::string digits =
      checksum_text(StoredData((write_bytes(path, file), path)).words()->entries.at("t").blocks[1]);
  EXPECT_EQ(error_with(digits, "0000000g"), start + "a block of 't' has no checksum; got '0000000g'");
  EXPECT_NE(error_with(digits, "ABCDEF01"), "no error");
  // A checksum of another block: of a right form, but the data is not that.
  write_bytes(path, with_header(file, digits, "01234567"));
  EXPECT_GT(errors_of_reads(path, {{"t", Spec::parse("f32[9,31] @ 1(x) : R")}}, "3(x) : S(1)"), 0);
}

TEST(Blocks, SaysThatANewerVersionIsNeeded) {
  const Folder folder;
  const std::string where = testing::save_all(folder.path(), small_items(), 2);
  const std::string index = bytes_of(where + "/" + kIndexName);
  const std::string newer = "\"version\": 3";
  std::string text = index;
  text.replace(text.find("\"version\": 2"), newer.size(), newer);
  EXPECT_EQ(error_of([&] { parse_index(text, "i"); }),
            "[checkpoint] 'i': written by a newer version of dtensor; got version 3; expected at most 2; try a newer "
            "dtensor to read it");
  const std::string path = where + "/model-00001-of-00002.safetensors";
  const std::string file = bytes_of(path);
  write_bytes(path, with_header(file, "\"dtensor.version\":\"2\"", "\"dtensor.version\":\"17\""));
  EXPECT_EQ(error_of([&] { StoredData data(path); }),
            "[checkpoint] " + in_quotes(path) +
                ": written by a newer version of dtensor; got version 17; expected at most 2; try a newer dtensor to "
                "read it");
  // One that says that it is older than it is.
  write_bytes(path, with_header(file, "\"dtensor.version\":\"2\"", "\"dtensor.version\":\"1\""));
  EXPECT_NE(error_of([&] { StoredData data(path); }).find("of version 1 and has words of a later one"),
            std::string::npos);
}

// An index without our part, before files that were saved with it, is damaged; it is not another program's.
TEST(Blocks, RefusesAnIndexThatLostItsPart) {
  const Folder folder;
  const std::string where = testing::save_all(folder.path(), {{"w", Spec::parse("f32[4,3] @ 1(x) : R")}}, 1);
  std::string index = bytes_of(where + "/" + kIndexName);
  index.replace(index.find("\"dtensor\""), 9, "\"dtensos\"");
  write_bytes(where + "/" + kIndexName, index);
  EXPECT_NE(error_of([&] { Checkpoint::open(where); }).find("the part that save_checkpoint writes is missing"),
            std::string::npos);
}

// Written before there were blocks: tests/checkpoint/version1, the tensors of interop.cpp, saved by version 1.
TEST(Version1, IsReadAsBefore) {
  Checkpoint checkpoint = Checkpoint::open(VERSION1_FOLDER);
  EXPECT_EQ(checkpoint.index().version, 1);
  EXPECT_EQ(checkpoint.info().step, 7);
  EXPECT_TRUE(checkpoint.has_checksums());
  EXPECT_FALSE(checkpoint.has_blocks());
  EXPECT_TRUE(checkpoint.verify().empty());
  EXPECT_NE(checkpoint.unverified_text().find("was written by an older version of dtensor"), std::string::npos);
  for (const char* layout : {"2(x) : S(1)", "1(x) : R", "2(x) : S(0)", "3(x) : S(1)"}) {
    const Spec wants = Spec::parse("f32[6,4] @ " + std::string(layout));
    for (const std::int64_t rank : wants.mesh().ranks()) {
      const Box box = box_of(wants, {rank});
      std::vector<float> got(static_cast<std::size_t>(box.numel()));
      EXPECT_EQ(checkpoint.read("cut", wants, {rank}, row_major_stride(wants.local_shape({rank})), got.data()),
                box.numel() * 4);
      for_each_run(box, wants.meta().shape(), [&](std::int64_t global, std::int64_t local, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) {
          EXPECT_EQ(got[static_cast<std::size_t>(local + i)], static_cast<float>(global + i));
        }
      });
    }
  }
  // Saved again, every block of it is verified.
  const Folder folder;
  merge_checkpoint(checkpoint, folder / "merged.safetensors");
  Checkpoint merged = Checkpoint::open(folder / "merged.safetensors");
  EXPECT_TRUE(merged.has_blocks());
  EXPECT_EQ(merged.unverified_text(), "");
  EXPECT_TRUE(merged.verify().empty());
}

TEST(Version1, FindsDamageWhereAPieceIsReadAsItWasSaved) {
  const Folder folder;
  for (const std::string& name : names_in(VERSION1_FOLDER)) {
    write_bytes(folder / name, bytes_of(std::string(VERSION1_FOLDER) + "/" + name));
  }
  const std::string path = folder / "model-00001-of-00002.safetensors";
  std::string bytes = bytes_of(path);
  bytes[static_cast<std::size_t>(StoredData(path).header().data_begin)] ^= 1;  // of cut@0
  write_bytes(path, bytes);
  Checkpoint checkpoint = Checkpoint::open(folder.path());
  std::vector<float> got(12);
  EXPECT_NE(error_of([&] {
              checkpoint.read("cut", Spec::parse("f32[6,4] @ 2(x) : S(1)"), {0}, {2, 1}, got.data());
            }).find("its checksum is another"),
            std::string::npos);
  EXPECT_EQ(checkpoint.verify().size(), 1u);
}

}  // namespace
}  // namespace dtensor
