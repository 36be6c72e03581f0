// The other side of interop.py: `write FOLDER` saves a checkpoint of tensors whose elements are 0, 1, 2, …, `read PATH`
// reads a file or folder of the same tensors, written by others, in a cut layout, and compares.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>

#include "dtensor/checkpoint/convert.h"
#include "dtensor/core/error.h"

namespace {

using namespace dtensor;

template <class Element>
std::vector<char> counted(std::int64_t n) {
  std::vector<char> bytes(static_cast<std::size_t>(n) * sizeof(Element));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<Element>(i);
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(Element), &value, sizeof(Element));
  }
  return bytes;
}

std::vector<char> whole(const TensorMeta& meta) {
  switch (meta.dtype()) {
    case DType::kF32:
      return counted<float>(meta.numel());
    case DType::kF64:
      return counted<double>(meta.numel());
    case DType::kI64:
      return counted<std::int64_t>(meta.numel());
    default:
      return counted<std::uint8_t>(meta.numel());
  }
}

const std::vector<SaveItem>& items() {
  static const std::vector<SaveItem> all = {
      {"whole", Spec::parse("f32[5,3] @ 2(x) : R")}, {"name with \"quotes\" and ü", Spec::parse("f64[7] @ 2(x) : R")},
      {"scalar", Spec::parse("i64[] @ 2(x) : R")},   {"empty", Spec::parse("f32[0,4] @ 2(x) : R")},
      {"bytes", Spec::parse("u8[3,1] @ 2(x) : R")},  {"cut", Spec::parse("f32[6,4] @ 2(x) : S(1)")}};
  return all;
}

std::vector<char> part(const Spec& spec, const Dims& at) {
  const std::int64_t size = element_size(spec.meta().dtype());
  const std::vector<char> all = whole(spec.meta());
  const Box box = box_of(spec, at);
  std::vector<char> result(static_cast<std::size_t>(box.numel() * size));
  for_each_run(box, spec.meta().shape(), [&](std::int64_t global, std::int64_t local, std::int64_t n) {
    std::memcpy(result.data() + local * size, all.data() + global * size, static_cast<std::size_t>(n * size));
  });
  return result;
}

int write(const std::string& root) {
  const SavePlan plan = plan_save(items(), 2);
  const CheckpointInfo info{.step = 7, .metadata = {{"word", "ü"}}};
  Commit commit(root, 7, 0);
  std::vector<std::optional<StoredFile>> files;
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    std::vector<std::vector<char>> parts;
    parts.reserve(items().size());
    files.push_back(
        write_rank(commit.folder(), commit.id(), items(), plan, rank, info, [&](std::size_t i, const Dims& at) {
          parts.push_back(part(plan.tensors[i].spec, at));
          return data_at(parts.back().data());
        }));
  }
  commit.finish(index_of(commit.id(), items(), plan, std::move(files), info), 0);
  Checkpoint checkpoint = Checkpoint::open(root);
  merge_checkpoint(checkpoint, root + "/merged.safetensors");
  return 0;
}

int read(const std::string& path) {
  Checkpoint checkpoint = Checkpoint::open(path);
  const Mesh mesh = Mesh::make({3});
  for (const SaveItem& item : items()) {
    const TensorMeta& meta = item.spec.meta();
    const Spec wants = Spec::make(meta, mesh, {meta.ndim() > 0 ? Placement(Shard(meta.ndim() - 1)) : Replicate()});
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      const std::vector<char> expected = part(wants, {rank});
      std::vector<char> got(expected.size());
      checkpoint.read(item.name, wants, {rank}, row_major_stride(wants.local_shape({rank})), got.data());
      if (got != expected) {
        std::cerr << item.name << " differs on rank " << rank << "\n";
        return 1;
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    return std::string(argv[1]) == "write" ? write(argv[2]) : read(argv[2]);
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
