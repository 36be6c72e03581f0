#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>

#include "dtensor/checkpoint/folders.h"
#include "dtensor/checkpoint/party_impl.h"
#include "dtensor/checkpoint/reader.h"
#include "dtensor/checkpoint/save_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

at::Tensor on_cpu(const at::Tensor& local) { return local.detach().resolve_conj().resolve_neg().cpu().contiguous(); }

at::Tensor snapshot(const at::Tensor& local) {
  const at::Tensor there = on_cpu(local);
  return local.is_cpu() && there.data_ptr() == local.data_ptr() ? there.clone() : there;
}

// One rank's share of a save, once all ranks have agreed on it.
struct Job {
  std::string root;
  std::string folder;
  std::string id;
  std::string target;
  std::unique_ptr<Commit> commit;  // rank 0's
  std::int64_t rank = 0;
  std::vector<SaveItem> items;
  std::vector<NamedPart> parts;
  SavePlan plan;
  CheckpointInfo info;
  SaveOptions options;

  SaveReport report() const {
    return {target, plan.bytes[static_cast<std::size_t>(rank)],
            std::accumulate(plan.bytes.begin(), plan.bytes.end(), std::int64_t{0})};
  }
};

// The bytes of a piece, out of this rank's part, which is brought into row-major order on the CPU when it is asked for.
EntryData data_of(const Job& job, std::size_t i, const Dims& at) {
  const NamedPart& part = job.parts[i];
  const Spec& stored = job.plan.tensors[i].spec;
  const std::int64_t element = element_size(stored.meta().dtype());
  Dims order(stored.dims().size());
  std::iota(order.begin(), order.end(), 0);
  const Box box = box_of(stored, at);
  const std::int64_t bytes = box.numel() * element;
  Copies copies;
  if (bytes > 0) add_copies(box, packed(box_of(part.spec, at), order), packed(box, order), copies);
  struct Held {
    at::Tensor tensor;
    const char* begin = nullptr;
  };
  auto held = std::make_shared<Held>();
  return [=, local = part.local](std::int64_t begin, std::int64_t, std::vector<char>&) -> const void* {
    if (!held->begin) {
      const at::NoGradGuard no_grad;
      held->tensor = on_cpu(local);
      const bool run =
          copies.size() == 1 && (copies[0].dims.empty() || (copies[0].dims.size() == 1 && copies[0].dims[0].from == 1));
      if (!run) {  // a part of the part, not in one run
        const at::Tensor piece = at::empty({bytes}, at::kByte);
        play(copies, held->tensor.data_ptr(), piece.data_ptr(), element);
        held->tensor = piece;
      }
      held->begin = static_cast<const char*>(held->tensor.data_ptr()) + (run ? copies[0].from * element : 0);
    }
    return held->begin + begin;
  };
}

std::string print_file(const std::optional<StoredFile>& file) {
  return file ? std::to_string(file->header) + " " + std::to_string(file->bytes) + " " + file->name : "";
}

std::optional<StoredFile> parse_file(const std::string& text) {
  if (text.empty()) return std::nullopt;
  Scanner in(text, "save_checkpoint", "checksum, bytes and name");
  const auto header = static_cast<std::uint32_t>(in.size());
  const std::int64_t bytes = in.size();
  return StoredFile{text.substr(text.rfind(' ') + 1), bytes, header};
}

std::optional<StoredFile> write_share(Job& job) {
  SaveProgress progress{0, job.plan.bytes[static_cast<std::size_t>(job.rank)]};
  const auto tell = [&](std::int64_t bytes) {
    progress.written += bytes;
    if (job.options.progress) job.options.progress(progress);
  };
  return write_rank(
      job.folder, job.id, job.items, job.plan, job.rank, job.info,
      [&](std::size_t i, const Dims& at) { return data_of(job, i, at); }, tell);
}

// All ranks agree on what is saved and where; nothing is written yet.
Job agree(const std::string& dir, const Party& party, const NamedTensors& tensors, const SaveOptions& options,
          const std::map<std::string, std::string>& state) {
  Job job;
  job.root = dir;
  job.rank = party.rank;
  job.options = options;
  const std::vector<std::string> said = together(party, [&] {
    job.parts = parts_of(tensors, party, "save_checkpoint");
    for (const NamedPart& part : job.parts) job.items.push_back({part.name, part.spec});
    job.plan = plan_save(job.items, party.size);
    job.info.step = options.step;
    job.info.metadata = options.metadata;
    job.info.state = state;
    if (options.random && party.context) job.info.random = party.context->part<RandomSource>().state().to_string();
    std::string more = dir + (options.step ? " " + std::to_string(*options.step) : "");
    for (const auto& [key, value] : options.metadata) more += "\n" + key + "=" + value;
    for (const auto& [key, value] : state) more += "\n" + key + "=" + value;
    check_info(job.info);
    return digest_of(job.parts, more);
  });
  for (std::size_t rank = 1; rank < said.size(); ++rank) {
    if (said[rank] == said[0]) continue;
    fail_invalid("save_checkpoint", {.what = "the ranks disagree about what is saved",
                                     .got = said[rank] + " on rank " + std::to_string(rank),
                                     .expected = said[0] + ", as on rank 0",
                                     .advice = "the same folder, names, layouts and options on every rank"});
  }
  const std::vector<std::string> place = together(party, [&]() -> std::string {
    if (party.rank != 0) return {};
    job.commit = std::make_unique<Commit>(dir, options.step, options.timeout.count());
    return job.commit->id() + "\n" + job.commit->folder() + "\n" + job.commit->target();
  });
  const std::size_t first = place[0].find('\n');
  const std::size_t second = place[0].find('\n', first + 1);
  job.id = place[0].substr(0, first);
  job.folder = place[0].substr(first + 1, second - first - 1);
  job.target = place[0].substr(second + 1);
  if (!job.info.step) job.info.step = step_of(name_of_path(job.target));
  return job;
}

// Waits, looking at the disk, until `ready`; false when the time is over.
bool wait_until(std::chrono::milliseconds timeout, const std::function<bool()>& ready) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (auto pause = std::chrono::milliseconds(1); !ready();
       pause = std::min(pause * 2, std::chrono::milliseconds(50))) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

std::string word_at(const std::string& path) {
  try {
    return read_text(path, 1 << 16);
  } catch (const Error&) {
    return {};
  }
}

// What a rank does behind the program, without talking to the others but by files: rank 0 waits for theirs and
// completes the checkpoint, the others wait for that.
class Behind {
 public:
  Behind(Job& job, std::int64_t ranks) : job_(job), ranks_(ranks) {}

  void run() {
    std::string error;
    std::optional<StoredFile> mine;
    try {
      mine = write_share(job_);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    job_.parts.clear();
    if (job_.rank == 0) return complete(std::move(mine), error);
    if (!error.empty()) leave_word(error);
    const bool gone = wait_until(job_.options.timeout, [&] { return !path_exists(job_.folder); });
    if (!gone) refuse("rank 0 has not completed it in time");
    const std::string word = word_at(failure_path(job_.root, job_.id));
    if (!word.empty()) throw Error(ErrorKind::kInvalidArgument, word);
    if (!error.empty()) throw Error(ErrorKind::kInvalidArgument, error);
    const std::string path = job_.target + "/" + kIndexName;
    if (!path_exists(path)) refuse("rank 0 has not completed it");
    const ParsedIndex index = parse_index(read_text(path, kMaxIndexBytes), path);
    if (!index.ours || index.ours->id != job_.id) refuse("another save has taken its place");
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail_invalid("save_checkpoint_async", {.what = what, .got = in_quotes(job_.target)});
  }
  std::string word_of(std::int64_t rank) const { return job_.folder + "/.failed-" + std::to_string(rank); }
  void leave_word(const std::string& error) const {
    try {
      const File file = File::create(word_of(job_.rank));
      file.write_at(error.data(), static_cast<std::int64_t>(error.size()), 0);
    } catch (const Error&) {  // then rank 0 misses the file
    }
  }

  std::optional<StoredFile> wait_for(std::int64_t rank) {
    if (job_.plan.bytes[static_cast<std::size_t>(rank)] == 0 && !writes(rank)) return std::nullopt;
    const std::string name = file_name_of(rank, ranks_);
    std::string word;
    const bool there = wait_until(job_.options.timeout, [&] {
      return path_exists(job_.folder + "/" + name) || !(word = word_at(word_of(rank))).empty();
    });
    if (!word.empty()) throw Error(ErrorKind::kInvalidArgument, word + "; it happened on rank " + std::to_string(rank));
    if (!there) refuse("rank " + std::to_string(rank) + " has not written its file in time");
    const StoredData data(job_.folder + "/" + name);
    return StoredFile{name, data.bytes(), data.header_checksum()};
  }
  bool writes(std::int64_t rank) const {
    return std::any_of(job_.plan.tensors.begin(), job_.plan.tensors.end(),
                       [&](const StoredTensor& tensor) { return written_by(tensor, rank).has_value(); });
  }

  void complete(std::optional<StoredFile> mine, std::string error) {
    if (!error.empty() && ranks_ > 1) error += "; it happened on rank 0";
    std::vector<std::optional<StoredFile>> files{std::move(mine)};
    // All of them have ended before anything is removed.
    for (std::int64_t rank = 1; rank < ranks_; ++rank) {
      try {
        files.push_back(wait_for(rank));
      } catch (const std::exception& caught) {
        if (error.empty()) error = caught.what();
      }
    }
    try {
      if (!error.empty()) throw Error(ErrorKind::kInvalidArgument, error);
      job_.commit->finish(index_of(job_.id, job_.items, job_.plan, std::move(files), job_.info), job_.options.keep);
    } catch (const std::exception& caught) {
      job_.commit->fail(caught.what());
      job_.commit.reset();
      throw;
    }
    job_.commit.reset();
  }

  Job& job_;
  const std::int64_t ranks_;
};

// The save of this rank that is still under way.
struct LastSave {
  std::mutex mutex;
  std::shared_ptr<PendingSave::State> state;
};

}  // namespace

class PendingSave::State {
 public:
  State(Job job, std::int64_t ranks) : job_(std::move(job)) {
    thread_ = std::thread([this, ranks] {
      std::string error;
      try {
        Behind(job_, ranks).run();
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      done_ = true;
      ended_.notify_all();
    });
  }
  ~State() { thread_.join(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  SaveReport wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return done_; });
    if (!error_.empty()) throw Error(ErrorKind::kInvalidArgument, error_);
    return job_.report();
  }
  void settle() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return done_; });
  }

 private:
  Job job_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::string error_;
  std::thread thread_;
};

bool PendingSave::done() const { return state_->done(); }
SaveReport PendingSave::wait() { return state_->wait(); }

namespace {

// One save after the other on every rank; what became of the one before is told by its own wait().
void settle_last(const Party& party) {
  if (!party.context) return;
  LastSave& last = party.context->part<LastSave>();
  const std::lock_guard lock(last.mutex);
  if (last.state) last.state->settle();
  last.state.reset();
}

}  // namespace

SaveReport save_tensors(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options,
                        const std::map<std::string, std::string>& state) {
  const Party party = party_of(tensors, options.mesh, "save_checkpoint");
  settle_last(party);
  Job job = agree(dir, party, tensors, options, state);
  const std::vector<std::string> written = together(party, [&] { return print_file(write_share(job)); });
  together(party, [&]() -> std::string {
    if (party.rank != 0) return {};
    std::vector<std::optional<StoredFile>> files;
    for (const std::string& text : written) files.push_back(parse_file(text));
    job.commit->finish(index_of(job.id, job.items, job.plan, std::move(files), job.info), options.keep);
    return {};
  });
  return job.report();
}

PendingSave save_tensors_async(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options,
                               const std::map<std::string, std::string>& state) {
  const Party party = party_of(tensors, options.mesh, "save_checkpoint");
  settle_last(party);
  Job job = agree(dir, party, tensors, options, state);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < job.parts.size(); ++i) {
    at::Tensor& local = job.parts[i].local;
    if (!local.defined()) continue;
    // What others write is not needed any more.
    const bool mine = written_by(job.plan.tensors[i], party.rank).has_value();
    local = mine ? snapshot(local) : at::Tensor();
  }
  auto pending = std::make_shared<PendingSave::State>(std::move(job), party.size);
  if (party.context) {
    LastSave& last = party.context->part<LastSave>();
    const std::lock_guard lock(last.mutex);
    last.state = pending;
  }
  return PendingSave(std::move(pending));
}

SaveReport save_checkpoint(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options) {
  return save_tensors(dir, tensors, options, {});
}
PendingSave save_checkpoint_async(const std::string& dir, const NamedTensors& tensors, const SaveOptions& options) {
  return save_tensors_async(dir, tensors, options, {});
}

}  // namespace dtensor
