#include "dtensor/comm/fingerprint.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

#include "dtensor/comm/reduce.h"
#include "dtensor/core/error.h"
#include "dtensor/core/hash.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::array<std::string_view, 9> kOperations = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "send", "receive", "barrier"};
constexpr std::uint64_t kNoOp = 0xFF;
constexpr std::uint64_t kOps = static_cast<std::uint64_t>(ReduceOp::kXor) + 1;

std::uint64_t digest(const std::vector<std::int64_t>& counts) {
  Hasher hasher;
  hasher.add_all(counts);
  return hasher.value();
}

std::uint64_t pair_digest(std::int64_t from, std::int64_t to, std::int64_t count) {
  Hasher hasher;
  hasher.add_all(std::array{from, to, count});
  return hasher.value();
}

[[noreturn]] void refuse(const Communicator& group, Operation operation, const std::string& what,
                         const std::string& got, const std::string& expected) {
  fail_invalid(to_string(operation), {.what = what + " in " + group.describe(), .got = got, .expected = expected});
}

void check_buffer(const Communicator& group, Operation operation, const at::Tensor& buffer, const char* which) {
  if (!buffer.defined()) refuse(group, operation, std::string("the ") + which + " is undefined", "", "a tensor");
  if (!buffer.is_contiguous()) {
    refuse(group, operation, std::string("the ") + which + " is not contiguous",
           "strides [" + join_numbers(buffer.strides()) + "] for shape [" + join_numbers(buffer.sizes()) + "]",
           "a contiguous tensor");
  }
}

void check_same_type(const Communicator& group, Operation operation, const at::Tensor& output,
                     const at::Tensor& input) {
  if (output.scalar_type() != input.scalar_type()) {
    refuse(group, operation, "input and output have different types",
           std::string(c10::toString(input.scalar_type())) + " and " + c10::toString(output.scalar_type()), "one type");
  }
}

// One count per rank, none negative, adding up to `numel`.
void check_counts(const Communicator& group, Operation operation, const std::vector<std::int64_t>& counts,
                  std::int64_t numel, const char* which) {
  if (static_cast<std::int64_t>(counts.size()) != group.size()) {
    refuse(group, operation, "there must be one count per rank", std::to_string(counts.size()) + " counts",
           std::to_string(group.size()));
  }
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    if (count < 0 || __builtin_add_overflow(sum, count, &sum)) {
      refuse(group, operation, "counts must be sizes", "[" + join_numbers(counts) + "]", "non-negative numbers");
    }
  }
  if (sum != numel) {
    refuse(group, operation, std::string("the counts do not add up to the ") + which,
           "[" + join_numbers(counts) + "] for " + std::to_string(numel) + " elements",
           "a sum of " + std::to_string(numel));
  }
}

// My part of the counts against my buffer.
void check_mine(const Communicator& group, Operation operation, const std::vector<std::int64_t>& counts,
                const at::Tensor& buffer, const char* which) {
  const std::int64_t mine = counts[static_cast<std::size_t>(group.rank())];
  if (buffer.numel() != mine) {
    refuse(group, operation, std::string("the ") + which + " does not have my count of elements",
           std::to_string(buffer.numel()) + " elements", std::to_string(mine));
  }
}

void check_reduction(const Communicator& group, Operation operation, const at::Tensor& buffer, ReduceOp op) {
  if (!can_reduce(buffer.scalar_type(), op)) {
    refuse(group, operation, "values of this type have no such reduction",
           std::string(to_string(op)) + " of " + c10::toString(buffer.scalar_type()), "");
  }
}

void check_member(const Communicator& group, Operation operation, std::int64_t rank, const char* which) {
  if (rank < 0 || rank >= group.size()) {
    refuse(group, operation, std::string("the ") + which + " is not a rank of the group", std::to_string(rank),
           "0 to " + std::to_string(group.size() - 1));
  }
}

// What the calling thread says the collective is for.
Fingerprint tagged(Fingerprint fingerprint) {
  const CommTag& tag = CommTagGuard::current();
  fingerprint.provenance = tag.provenance;
  fingerprint.cause = tag.cause;
  fingerprint.made = tag.made;
  fingerprint.balance += tag.balance;
  return fingerprint;
}

}  // namespace

std::string_view to_string(Operation operation) {
  const auto index = static_cast<std::size_t>(operation);
  return index < kOperations.size() ? kOperations[index] : "unknown operation";
}

std::array<std::uint64_t, Fingerprint::kWords> Fingerprint::words() const {
  const std::uint64_t kind = static_cast<std::uint64_t>(operation) |
                             (static_cast<std::uint64_t>(static_cast<std::uint8_t>(dtype)) << 8) |
                             ((op ? static_cast<std::uint64_t>(*op) : kNoOp) << 16) |
                             (static_cast<std::uint64_t>(static_cast<std::uint32_t>(root)) << 32);
  return {kind, static_cast<std::uint64_t>(numel), counts, sequence, random, provenance, balance};
}

Fingerprint Fingerprint::from_words(std::span<const std::uint64_t, kWords> words) {
  Fingerprint result;
  result.operation = static_cast<Operation>(words[0] & 0xFF);
  const std::uint64_t type = (words[0] >> 8) & 0xFF;
  constexpr auto kTypes = static_cast<std::uint64_t>(c10::ScalarType::NumOptions);
  result.dtype = type < kTypes ? static_cast<c10::ScalarType>(type) : c10::ScalarType::Undefined;
  const std::uint64_t op = (words[0] >> 16) & 0xFF;
  if (op < kOps) result.op = static_cast<ReduceOp>(op);
  result.root = static_cast<std::int32_t>(words[0] >> 32);
  result.numel = static_cast<std::int64_t>(words[1]);
  result.counts = words[2];
  result.sequence = words[3];
  result.random = words[4];
  result.provenance = words[5];
  result.balance = words[6];
  return result;
}

bool Fingerprint::agrees_with(const Fingerprint& other) const {
  return operation == other.operation && dtype == other.dtype && op == other.op && root == other.root &&
         numel == other.numel && counts == other.counts && sequence == other.sequence && random == other.random &&
         provenance == other.provenance;
}

std::uint64_t Fingerprint::hash() const {
  Hasher hasher;
  auto all = words();
  all.back() = 0;
  hasher.add_all(all);
  return hasher.value();
}

std::string Fingerprint::to_string() const {
  std::vector<std::string> parts;
  if (op) parts.emplace_back(dtensor::to_string(*op));
  if (operation != Operation::kBarrier) parts.emplace_back(c10::toString(dtype));
  if (operation != Operation::kBarrier && operation != Operation::kAllToAll) {
    parts.push_back(std::to_string(numel) + (numel == 1 ? " element" : " elements"));
  }
  if (counts != 0) {
    char text[32];
    std::snprintf(text, sizeof text, "counts #%04x", static_cast<unsigned>(counts & 0xFFFF));
    parts.emplace_back(text);
  }
  if (operation == Operation::kSend || operation == Operation::kReceive) {
    parts.push_back("tag " + std::to_string(root));
  } else if (root >= 0) {
    parts.push_back("root " + std::to_string(root));
  }
  const std::string number = sequence == 0 ? "" : "#" + std::to_string(sequence) + " ";
  return number + std::string(dtensor::to_string(operation)) + "(" +
         join(parts, ", ", [](const std::string& part) { return part; }) + ")" + (cause ? " for " + *cause : "");
}

std::pair<std::string, std::string> Fingerprint::two_sides(const Fingerprint& a, const Fingerprint& b) {
  // The cause of another process is not known here: the report has it.
  Fingerprint first = a, second = b;
  first.cause = second.cause = nullptr;
  std::pair<std::string, std::string> sides(first.to_string(), second.to_string());
  if (sides.first != sides.second) return sides;
  if (a.random == b.random) {
    if (a.provenance == b.provenance) return sides;
    sides.first += " of one tensor";
    sides.second += " of another, or of one that was made differently";
    return sides;
  }
  const std::uint64_t mine = RandomSource::calls_of(a.random);
  const std::uint64_t other = RandomSource::calls_of(b.random);
  if (mine == other) {
    sides.first += " with one seed or generator";
    sides.second += " with another";
  } else {
    sides.first += " after " + std::to_string(mine) + " random calls";
    sides.second += " after " + std::to_string(other);
  }
  return sides;
}

Fingerprint check_all_reduce(const Communicator& group, const at::Tensor& buffer, ReduceOp op) {
  check_buffer(group, Operation::kAllReduce, buffer, "buffer");
  check_reduction(group, Operation::kAllReduce, buffer, op);
  return tagged({.operation = Operation::kAllReduce,
                 .dtype = buffer.scalar_type(),
                 .op = op,
                 .numel = buffer.numel(),
                 .random = group.random_progress()});
}

Fingerprint check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& counts) {
  constexpr Operation kOperation = Operation::kAllGather;
  check_buffer(group, kOperation, output, "output");
  check_buffer(group, kOperation, input, "input");
  check_same_type(group, kOperation, output, input);
  check_counts(group, kOperation, counts, output.numel(), "output");
  check_mine(group, kOperation, counts, input, "input");
  return tagged({.operation = kOperation,
                 .dtype = output.scalar_type(),
                 .op = {},
                 .numel = output.numel(),
                 .counts = digest(counts),
                 .random = group.random_progress()});
}

Fingerprint check_reduce_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                                 const std::vector<std::int64_t>& counts, ReduceOp op) {
  constexpr Operation kOperation = Operation::kReduceScatter;
  check_buffer(group, kOperation, output, "output");
  check_buffer(group, kOperation, input, "input");
  check_same_type(group, kOperation, output, input);
  check_reduction(group, kOperation, input, op);
  check_counts(group, kOperation, counts, input.numel(), "input");
  check_mine(group, kOperation, counts, output, "output");
  return tagged({.operation = kOperation,
                 .dtype = input.scalar_type(),
                 .op = op,
                 .numel = input.numel(),
                 .counts = digest(counts),
                 .random = group.random_progress()});
}

Fingerprint check_all_to_all(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& recv_counts,
                             const std::vector<std::int64_t>& send_counts) {
  constexpr Operation kOperation = Operation::kAllToAll;
  check_buffer(group, kOperation, output, "output");
  check_buffer(group, kOperation, input, "input");
  check_same_type(group, kOperation, output, input);
  check_counts(group, kOperation, recv_counts, output.numel(), "output");
  check_counts(group, kOperation, send_counts, input.numel(), "input");
  Fingerprint result{
      .operation = kOperation, .dtype = input.scalar_type(), .op = {}, .random = group.random_progress()};
  for (std::int64_t peer = 0; peer < group.size(); ++peer) {
    result.balance += pair_digest(group.rank(), peer, send_counts[static_cast<std::size_t>(peer)]);
    result.balance -= pair_digest(peer, group.rank(), recv_counts[static_cast<std::size_t>(peer)]);
  }
  return tagged(result);
}

Fingerprint check_broadcast(const Communicator& group, const at::Tensor& buffer, std::int64_t root) {
  check_member(group, Operation::kBroadcast, root, "root");
  check_buffer(group, Operation::kBroadcast, buffer, "buffer");
  return tagged({.operation = Operation::kBroadcast,
                 .dtype = buffer.scalar_type(),
                 .op = {},
                 .root = root,
                 .numel = buffer.numel(),
                 .random = group.random_progress()});
}

Fingerprint check_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& counts, std::int64_t root) {
  constexpr Operation kOperation = Operation::kScatter;
  check_member(group, kOperation, root, "root");
  check_buffer(group, kOperation, output, "output");
  std::int64_t numel = 0;
  if (group.rank() == root) {
    check_buffer(group, kOperation, input, "input");
    check_same_type(group, kOperation, output, input);
    numel = input.numel();
  } else {
    for (const std::int64_t count : counts) numel += std::max<std::int64_t>(count, 0);
  }
  check_counts(group, kOperation, counts, numel, "input");
  check_mine(group, kOperation, counts, output, "output");
  return tagged({.operation = kOperation,
                 .dtype = output.scalar_type(),
                 .op = {},
                 .root = root,
                 .numel = numel,
                 .counts = digest(counts),
                 .random = group.random_progress()});
}

Fingerprint check_point_to_point(const Communicator& group, Operation operation, const at::Tensor& buffer,
                                 std::int64_t peer, std::int64_t tag) {
  check_member(group, operation, peer, "peer");
  if (peer == group.rank()) {
    refuse(group, operation, "a rank cannot send to itself", "rank " + std::to_string(peer), "another rank");
  }
  check_buffer(group, operation, buffer, "buffer");
  return {.operation = operation, .dtype = buffer.scalar_type(), .op = {}, .root = tag, .numel = buffer.numel()};
}

void check_group_ranks(const std::vector<std::int64_t>& ranks, std::int64_t rank, std::int64_t size) {
  const std::string got = "{" + join_numbers(ranks) + "}";
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    fail_invalid("make_group", {.what = "a group has each rank once", .got = got});
  }
  if (sorted.empty() || sorted.front() < 0 || sorted.back() >= size) {
    fail_invalid("make_group", {.what = "a group is made of ranks of the world",
                                .got = got,
                                .expected = "ranks 0 to " + std::to_string(size - 1)});
  }
  if (!std::binary_search(sorted.begin(), sorted.end(), rank)) {
    fail_invalid("make_group", {.what = "a group is made by its members alone",
                                .got = "rank " + std::to_string(rank) + " for " + got});
  }
}

std::size_t diverging_member(std::span<const Fingerprint> fingerprints) {
  for (std::size_t i = 1; i < fingerprints.size(); ++i) {
    if (!fingerprints[i].agrees_with(fingerprints[0])) return i;
  }
  return fingerprints.size() > 1 ? 1 : 0;
}

std::string divergence_report(const Communicator& group, const Fingerprint& mine) {
  std::string report(reinterpret_cast<const char*>(&mine.made), sizeof mine.made);
  report += (mine.cause ? *mine.cause : std::string()).substr(0, 256) + '\0';
  if (group.history()) report += group.history()->to_bytes(kReportBytes - report.size());
  report.resize(kReportBytes);
  return report;
}

ReportOf ReportOf::read(std::int64_t rank, std::string_view bytes) {
  ReportOf report{.rank = rank};
  if (bytes.size() < sizeof report.made) return report;
  std::memcpy(&report.made, bytes.data(), sizeof report.made);
  bytes.remove_prefix(sizeof report.made);
  const std::size_t end = bytes.find('\0');
  report.cause = bytes.substr(0, end);
  if (end != std::string_view::npos) report.steps = History::from_bytes(bytes.substr(end + 1));
  return report;
}

std::string explain_divergence(const ReportOf& first, const ReportOf& other) {
  const auto rank = [](const ReportOf& report) { return "rank " + std::to_string(report.rank); };
  const auto call = [](const ReportOf& report) { return report.cause.empty() ? "no operator" : report.cause; };
  std::string text;
  if (!first.cause.empty() || !other.cause.empty()) {
    text = first.cause == other.cause
               ? "; for " + first.cause
               : "; " + rank(first) + " for " + call(first) + ", " + rank(other) + " for " + call(other);
  }
  const FirstDifference parted = first_difference(first.steps, first.made, other.steps, other.made);
  if (parted.mine.empty() && parted.theirs.empty()) return text;
  if (parted.mine == parted.theirs)
    return text + "; first difference: " + parted.mine + ", with other values or arguments";
  const auto side = [](const std::string& name) { return name.empty() ? std::string("nothing of the kind") : name; };
  return text + "; first difference: " + side(parted.mine) + " on " + rank(first) + ", " + side(parted.theirs) +
         " on " + rank(other);
}

std::optional<std::string> find_divergence(std::span<const Fingerprint> fingerprints,
                                           const std::vector<std::int64_t>& ranks) {
  const auto side = [&](std::size_t i, const std::string& text) {
    return "rank " + std::to_string(ranks[i]) + ": " + text;
  };
  for (std::size_t i = 1; i < fingerprints.size(); ++i) {
    if (fingerprints[i].agrees_with(fingerprints[0])) continue;
    const auto [first, other] = Fingerprint::two_sides(fingerprints[0], fingerprints[i]);
    return side(0, first) + ", " + side(i, other);
  }
  std::uint64_t balance = 0;
  for (const Fingerprint& fingerprint : fingerprints) balance += fingerprint.balance;
  if (balance == 0) return std::nullopt;
  return side(0, fingerprints[0].to_string()) +
         (fingerprints[0].operation == Operation::kAllToAll && fingerprints[0].provenance == 0
              ? ", and some rank expects another count than its peer sends"
              : ", and some rank has other values where the tensor is replicated");
}

void fail_diverged(const Communicator& group, const Fingerprint& mine, const std::string& both_sides) {
  fail(ErrorKind::kCommunication, to_string(mine.operation),
       {.what = "the ranks of " + group.describe() + " diverged",
        .got = both_sides,
        .expected = "the same call on every rank"});
}

}  // namespace dtensor
