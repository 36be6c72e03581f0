#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dtensor/comm/communicator.h"

namespace dtensor {

enum class Operation : std::uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kScatter,
  kSend,
  kReceive,
  kBarrier,
};
// "all_reduce", …
std::string_view to_string(Operation operation);

// What a rank is about to do, in a few words that can be sent: equal on all ranks of a group unless they diverged.
struct Fingerprint {
  static constexpr std::size_t kWords = 7;

  Operation operation = Operation::kBarrier;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::optional<ReduceOp> op;
  std::int64_t root = -1;      // of broadcast and scatter; the tag of send and receive
  std::int64_t numel = 0;      // of the whole: all ranks' elements in all_gather; 0 for all_to_all, where ranks differ
  std::uint64_t counts = 0;    // digest of the counts that every rank must give alike
  std::uint64_t sequence = 0;  // which collective of this group, from 1; 0 is not printed
  // all_to_all: what I send, less what I receive, each hashed with who sends to whom. Over all ranks these add up to 0
  // exactly when every pair agrees on its count. CommTag::balance is added to it.
  std::uint64_t balance = 0;

  std::uint64_t random = 0;  // Communicator::random_progress, of collectives that move data
  // How the tensor was made that the collective serves, and what is done with it (CommTag); 0: nobody said.
  std::uint64_t provenance = 0;
  // Not sent: the program's call that needs it, and the tensor's hash alone.
  const std::string* cause = nullptr;
  std::uint64_t made = 0;

  std::uint64_t hash() const;
  std::array<std::uint64_t, kWords> words() const;
  // Any words: what they cannot mean is printed as unknown.
  static Fingerprint from_words(std::span<const std::uint64_t, kWords> words);
  // `#5 all_reduce(sum, Float, 100 elements)`, `#5 broadcast(Long, 3 elements, root 1)`.
  std::string to_string() const;

  // Equal but for the balance, which differs between ranks by nature.
  bool agrees_with(const Fingerprint& other) const;
  // Both in text; where they differ in their random numbers or their tensors alone, with that.
  static std::pair<std::string, std::string> two_sides(const Fingerprint& a, const Fingerprint& b);
};

// What the collectives that this thread issues are for, as long as the guard lives.
struct CommTag {
  std::uint64_t provenance = 0;
  const std::string* cause = nullptr;
  std::uint64_t made = 0;  // the tensor's hash, to find it in the history
  // Adds up to 0 over the group when the values of replicas agree along each mesh dim of it.
  std::uint64_t balance = 0;
};
class CommTagGuard {
 public:
  explicit CommTagGuard(const CommTag& tag) noexcept : before_(current()) { current() = tag; }
  ~CommTagGuard() { current() = before_; }
  CommTagGuard(const CommTagGuard&) = delete;
  CommTagGuard& operator=(const CommTagGuard&) = delete;
  static CommTag& current() noexcept {
    static thread_local CommTag tag;
    return tag;
  }

 private:
  const CommTag before_;
};

// The checks that every backend makes of a call before it does anything, and the call's fingerprint (sequence 0).
// A wrong argument is an error that names the group.
Fingerprint check_all_reduce(const Communicator& group, const at::Tensor& buffer, ReduceOp op);
Fingerprint check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& counts);
Fingerprint check_reduce_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                                 const std::vector<std::int64_t>& counts, ReduceOp op);
Fingerprint check_all_to_all(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& recv_counts,
                             const std::vector<std::int64_t>& send_counts);
Fingerprint check_broadcast(const Communicator& group, const at::Tensor& buffer, std::int64_t root);
Fingerprint check_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& counts, std::int64_t root);
// `operation` is kSend or kReceive; `peer` may not be this rank.
Fingerprint check_point_to_point(const Communicator& group, Operation operation, const at::Tensor& buffer,
                                 std::int64_t peer, std::int64_t tag);
// Distinct world ranks of a world of `size`, this one among them.
void check_group_ranks(const std::vector<std::int64_t>& ranks, std::int64_t rank, std::int64_t size);

// Both sides of a disagreement, `rank 0: #5 all_reduce(…), rank 2: #5 barrier()`, or nothing when all agree.
// `fingerprints` are in group order, `ranks` are the group's world ranks.
std::optional<std::string> find_divergence(std::span<const Fingerprint> fingerprints,
                                           const std::vector<std::int64_t>& ranks);
// The member (its index) that differs from the first one; pre: find_divergence found one.
std::size_t diverging_member(std::span<const Fingerprint> fingerprints);

// What a rank tells the others once they have diverged: the call that it is at, and its history. Always this many
// bytes.
inline constexpr std::size_t kReportBytes = 48 * 1024;
std::string divergence_report(const Communicator& group, const Fingerprint& mine);
// What two ranks are at, and where their histories part, `; for item; first difference: aten::mul on rank 0, …`.
struct ReportOf {
  std::int64_t rank = 0;
  std::string cause = {};
  std::uint64_t made = 0;
  std::vector<History::Step> steps = {};

  static ReportOf read(std::int64_t rank, std::string_view bytes);
};
std::string explain_divergence(const ReportOf& first, const ReportOf& other);
// The error of a rank that finds the others doing something else.
[[noreturn]] void fail_diverged(const Communicator& group, const Fingerprint& mine, const std::string& both_sides);

}  // namespace dtensor
