#include <algorithm>
#include <array>
#include <cstring>

#include "dtensor/comm/c10d_impl.h"
#include "dtensor/comm/reduce.h"
#include "dtensor/core/error.h"

namespace dtensor::messages {
namespace {

// Slots are 31 bits. Ours have bit 30 set, so that a program that sends on a group of its own can keep the low ones.
constexpr int kFrameSlot = 1 << 30;
constexpr int kDataSlot = kFrameSlot + 1;
constexpr int kGatherSlot = kFrameSlot + 2;
constexpr int kReportSlot = kFrameSlot + 3;
constexpr int kTagSlots = (1 << 30) + (1 << 28);      // two a tag: what the sender says and what the receiver says
constexpr int kMessageSlots = (1 << 30) + (1 << 29);  // the data of one message each
constexpr std::uint64_t kMessageSlotCount = 1 << 28;
constexpr std::int64_t kTags = 1 << 26;

// A frame goes from everybody to everybody before data moves: always of one size, with the fingerprint and, where they
// fit, the data themselves.
constexpr std::size_t kFrameWords = 128;
constexpr std::size_t kFrameBytes = kFrameWords * sizeof(std::uint64_t);
constexpr std::size_t kEagerBytes = kFrameBytes - Fingerprint::kWords * sizeof(std::uint64_t);

// A large reduction is cut into pieces of about this size, so that one is summed while the next is under way.
constexpr std::size_t kPieceBytes = 1 << 20;
constexpr std::size_t kLargeBroadcast = 1 << 16;

struct Cut {
  std::size_t begin = 0;
  std::size_t count = 0;
};
// Part `index` of `total` elements in `parts` parts of nearly the same size.
Cut part_of(std::size_t total, std::size_t parts, std::size_t index) {
  const std::size_t begin = total / parts * index + std::min(index, total % parts);
  return {begin, total / parts + (index < total % parts ? 1 : 0)};
}

}  // namespace

// Waits for all; a failure names everybody who did not do his part.
void MessageGroup::await(Messages& messages, Clock::time_point deadline) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    try {
      messages[i].second->wait(deadline);
    } catch (const std::exception&) {
      Trouble trouble{{messages[i].first}, Clock::now() >= deadline};
      for (std::size_t later = i + 1; trouble.late && later < messages.size(); ++later) {
        try {
          messages[later].second->wait(deadline);
        } catch (const std::exception&) {
          trouble.peers.push_back(messages[later].first);
        }
      }
      std::sort(trouble.peers.begin(), trouble.peers.end());
      trouble.peers.erase(std::unique(trouble.peers.begin(), trouble.peers.end()), trouble.peers.end());
      throw trouble;
    }
  }
}

void MessageGroup::exchange_frames(const Fingerprint& fingerprint, std::span<const Slice> out,
                                   std::span<const Slice> in, Clock::time_point deadline) {
  const auto count = static_cast<std::size_t>(size());
  const auto self = static_cast<std::size_t>(rank());
  frames_.resize(2 * count * kFrameWords);
  const auto frame = [&](std::size_t index) { return frames_.data() + index * kFrameWords; };
  const auto slice = [](std::uint64_t* words) { return Slice{reinterpret_cast<std::byte*>(words), kFrameBytes}; };
  Messages messages;
  messages.reserve(2 * count);
  for (std::size_t step = 1; step < count; ++step) {
    const std::size_t peer = (self + step) % count;
    messages.emplace_back(peer,
                          messenger_->receive(static_cast<std::int64_t>(peer), kFrameSlot, slice(frame(count + peer))));
  }
  const auto words = fingerprint.words();
  for (std::size_t step = 1; step < count; ++step) {
    const std::size_t peer = (self + count - step) % count;
    std::copy(words.begin(), words.end(), frame(peer));
    if (out[peer].bytes <= kEagerBytes && out[peer].bytes > 0) {
      std::memcpy(frame(peer) + Fingerprint::kWords, out[peer].data, out[peer].bytes);
    }
    messages.emplace_back(peer, messenger_->send(static_cast<std::int64_t>(peer), kFrameSlot, slice(frame(peer))));
  }
  await(messages, deadline);
  std::vector<Fingerprint> all(count);
  for (std::size_t peer = 0; peer < count; ++peer) {
    all[peer] = peer == self ? fingerprint
                             : Fingerprint::from_words(std::span<const std::uint64_t, Fingerprint::kWords>(
                                   frame(count + peer), Fingerprint::kWords));
  }
  if (const auto sides = find_divergence(all, ranks())) {
    fail_diverged(*this, fingerprint, *sides + exchange_reports(fingerprint, diverging_member(all), deadline));
  }
  for (std::size_t peer = 0; peer < count; ++peer) {
    if (peer != self && in[peer].bytes <= kEagerBytes && in[peer].bytes > 0) {
      std::memcpy(in[peer].data, frame(count + peer) + Fingerprint::kWords, in[peer].bytes);
    }
  }
}

// Everybody has seen that the ranks diverged: they tell each other what they did last. A rank that does not answer is
// left out; the error does not depend on it.
std::string MessageGroup::exchange_reports(const Fingerprint& fingerprint, std::size_t other,
                                           Clock::time_point deadline) {
  const auto count = static_cast<std::size_t>(size());
  const auto self = static_cast<std::size_t>(rank());
  std::vector<std::string> reports(count, std::string(kReportBytes, '\0'));
  reports[self] = divergence_report(*this, fingerprint);
  const auto slice = [](std::string& bytes) { return Slice{reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}; };
  try {
    Messages messages;
    for (std::size_t step = 1; step < count; ++step) {
      const std::size_t from = (self + step) % count;
      const std::size_t to = (self + count - step) % count;
      messages.emplace_back(from,
                            messenger_->receive(static_cast<std::int64_t>(from), kReportSlot, slice(reports[from])));
      messages.emplace_back(to, messenger_->send(static_cast<std::int64_t>(to), kReportSlot, slice(reports[self])));
    }
    await(messages, std::min(deadline, Clock::now() + std::chrono::seconds(5)));
  } catch (const Trouble&) {
    return {};
  }
  return explain_divergence(ReportOf::read(ranks()[0], reports[0]), ReportOf::read(ranks()[other], reports[other]));
}

// What is larger than `above`.
void MessageGroup::move(std::span<const Slice> out, std::span<const Slice> in, std::size_t above,
                        Clock::time_point deadline) {
  const auto count = static_cast<std::size_t>(size());
  const auto self = static_cast<std::size_t>(rank());
  Messages messages;
  messages.reserve(2 * count);
  for (std::size_t step = 1; step < count; ++step) {
    const std::size_t peer = (self + step) % count;
    if (in[peer].bytes > above) {
      messages.emplace_back(peer, messenger_->receive(static_cast<std::int64_t>(peer), kDataSlot, in[peer]));
    }
  }
  for (std::size_t step = 1; step < count; ++step) {
    const std::size_t peer = (self + count - step) % count;
    if (out[peer].bytes > above) {
      messages.emplace_back(peer, messenger_->send(static_cast<std::int64_t>(peer), kDataSlot, out[peer]));
    }
  }
  await(messages, deadline);
}

void MessageGroup::exchange(const Fingerprint& fingerprint, std::span<const Slice> out, std::span<const Slice> in,
                            Clock::time_point deadline) {
  const auto self = static_cast<std::size_t>(rank());
  const std::size_t mine = std::min(out[self].bytes, in[self].bytes);
  if (mine > 0 && out[self].data != in[self].data) std::memmove(in[self].data, out[self].data, mine);
  if (size() == 1) return;
  const bool framed = config_.options.fingerprint || fingerprint.operation == Operation::kBarrier;
  if (framed) exchange_frames(fingerprint, out, in, deadline);
  move(out, in, framed ? kEagerBytes : 0, deadline);
}

// Everybody gets everything and reduces it in rank order: one round of messages.
void MessageGroup::reduce_small(const Fingerprint& fingerprint, Slice buffer, Clock::time_point deadline) {
  const auto count = static_cast<std::size_t>(size());
  const auto self = static_cast<std::size_t>(rank());
  std::vector<std::byte> memory(buffer.bytes * count);
  std::vector<Slice> out(count, buffer), in(count);
  std::vector<const void*> parts(count);
  for (std::size_t peer = 0; peer < count; ++peer) {
    in[peer] = {memory.data() + peer * buffer.bytes, buffer.bytes};
    parts[peer] = peer == self ? buffer.data : in[peer].data;
  }
  in[self].bytes = 0;
  exchange(fingerprint, out, in, deadline);
  reduce_parts(*fingerprint.op, fingerprint.dtype, buffer.data, parts, fingerprint.numel);
}

// Rank r reduces the r-th part of the buffer, in rank order, and sends the result to all: piece by piece, so that
// pieces are reduced while others are under way.
void MessageGroup::reduce_large(const Fingerprint& fingerprint, Slice buffer, Clock::time_point deadline) {
  const auto count = static_cast<std::size_t>(size());
  const auto self = static_cast<std::size_t>(rank());
  const auto numel = static_cast<std::size_t>(fingerprint.numel);
  const std::size_t element = buffer.bytes / numel;
  if (config_.options.fingerprint) {
    const std::vector<Slice> nothing(count);
    exchange_frames(fingerprint, nothing, nothing, deadline);
  }
  const std::size_t pieces = std::max<std::size_t>(1, buffer.bytes / count / kPieceBytes);
  const auto piece = [&](std::size_t owner, std::size_t index) {
    const Cut part = part_of(numel, count, owner);
    const Cut cut = part_of(part.count, pieces, index);
    return Slice{buffer.data + (part.begin + cut.begin) * element, cut.count * element};
  };
  const std::size_t mine = part_of(numel, count, self).count * element;
  // Not a vector: nobody needs the zeros.
  const std::unique_ptr<std::byte[]> memory(new std::byte[mine * (count - 1)]);
  const auto received = [&](std::size_t peer, std::size_t index) {
    const std::size_t row = peer < self ? peer : peer - 1;
    const Slice own = piece(self, index);
    return Slice{memory.get() + row * mine + (own.data - piece(self, 0).data), own.bytes};
  };

  // arrivals[i] and departures[i]: the i-th piece of my part from everybody, and of everybody's part to him.
  std::vector<Messages> arrivals(pieces), departures(pieces);
  Messages results;
  for (std::size_t index = 0; index < pieces; ++index) {
    for (std::size_t step = 1; step < count; ++step) {
      const std::size_t from = (self + step) % count;
      const std::size_t to = (self + count - step) % count;
      if (mine > 0) {
        arrivals[index].emplace_back(
            from, messenger_->receive(static_cast<std::int64_t>(from), kDataSlot, received(from, index)));
      }
      if (const Slice slice = piece(to, index); slice.bytes > 0) {
        departures[index].emplace_back(to, messenger_->send(static_cast<std::int64_t>(to), kDataSlot, slice));
      }
    }
  }
  std::vector<const void*> parts(count);
  for (std::size_t index = 0; index < pieces; ++index) {
    await(arrivals[index], deadline);
    const Slice own = piece(self, index);
    if (own.bytes > 0) {
      for (std::size_t peer = 0; peer < count; ++peer) {
        parts[peer] = peer == self ? own.data : received(peer, index).data;
      }
      reduce_parts(*fingerprint.op, fingerprint.dtype, own.data, parts, static_cast<std::int64_t>(own.bytes / element));
      for (std::size_t step = 1; step < count; ++step) {
        const std::size_t to = (self + count - step) % count;
        results.emplace_back(to, messenger_->send(static_cast<std::int64_t>(to), kGatherSlot, own));
      }
    }
    // The others' results take the place of what was sent to them, which must be gone by then.
    await(departures[index], deadline);
    for (std::size_t step = 1; step < count; ++step) {
      const std::size_t from = (self + step) % count;
      if (const Slice slice = piece(from, index); slice.bytes > 0) {
        results.emplace_back(from, messenger_->receive(static_cast<std::int64_t>(from), kGatherSlot, slice));
      }
    }
  }
  await(results, deadline);
}

// The root sends each rank a part; the ranks send their parts to each other. The root sends the buffer once, not once
// a rank.
void MessageGroup::broadcast_large(const Fingerprint& fingerprint, Slice buffer, Clock::time_point deadline) {
  const auto count = static_cast<std::size_t>(size());
  const auto self = static_cast<std::size_t>(rank());
  const auto root = static_cast<std::size_t>(fingerprint.root);
  const auto part = [&](std::size_t owner) {
    const Cut cut = part_of(buffer.bytes, count, owner);
    return Slice{buffer.data + cut.begin, cut.count};
  };
  std::vector<Slice> out(count), in(count);
  for (std::size_t peer = 0; peer < count; ++peer) {
    if (self == root && peer != root) out[peer] = part(peer);
  }
  if (self != root) in[root] = part(self);
  exchange(fingerprint, out, in, deadline);
  for (std::size_t peer = 0; peer < count; ++peer) {
    in[peer] = self == root || peer == self ? Slice{} : part(peer);
    out[peer] = peer == root || peer == self ? Slice{} : part(self);
  }
  move(out, in, 0, deadline);
}

namespace {
std::vector<Slice> slices(const at::Tensor& buffer, const std::vector<std::int64_t>& counts) {
  std::vector<Slice> result;
  result.reserve(counts.size());
  auto* at = static_cast<std::byte*>(buffer.data_ptr());
  for (const std::int64_t count : counts) {
    const std::size_t bytes = static_cast<std::size_t>(count) * buffer.element_size();
    result.push_back({at, bytes});
    if (bytes > 0) at += bytes;
  }
  return result;
}

Slice whole(const at::Tensor& buffer) {
  return {static_cast<std::byte*>(buffer.data_ptr()), static_cast<std::size_t>(buffer.nbytes())};
}

void check_tag(Operation operation, std::int64_t tag) {
  if (tag < 0 || tag >= kTags) {
    fail_invalid(
        to_string(operation),
        {.what = "this is no tag", .got = std::to_string(tag), .expected = "0 to " + std::to_string(kTags - 1)});
  }
}

void check_cpu(const Communicator& group, const at::Tensor& buffer) {
  if (buffer.defined() && !buffer.device().is_cpu()) {
    fail_invalid(
        group.describe(),
        {.what = "the buffer is not in this group's memory", .got = buffer.device().str(), .expected = "a CPU tensor"});
  }
}
}  // namespace

WorkPtr MessageGroup::all_reduce(const at::Tensor& buffer, ReduceOp op) {
  const Fingerprint fingerprint = check_all_reduce(*this, buffer, op);
  check_cpu(*this, buffer);
  return enqueue(fingerprint, {buffer},
                 [this, slice = whole(buffer)](const Fingerprint& what, Clock::time_point deadline) {
                   if (slice.bytes <= kEagerBytes) {
                     reduce_small(what, slice, deadline);
                   } else if (size() > 1) {
                     reduce_large(what, slice, deadline);
                   } else {
                     const void* const part = slice.data;
                     reduce_parts(*what.op, what.dtype, slice.data, {&part, 1}, what.numel);
                   }
                 });
}

WorkPtr MessageGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                                 const std::vector<std::int64_t>& counts) {
  const Fingerprint fingerprint = check_all_gather(*this, output, input, counts);
  check_cpu(*this, output);
  check_cpu(*this, input);
  return enqueue(fingerprint, {output, input},
                 [this, in = slices(output, counts), out = std::vector<Slice>(counts.size(), whole(input))](
                     const Fingerprint& what, Clock::time_point deadline) { exchange(what, out, in, deadline); });
}

WorkPtr MessageGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                     const std::vector<std::int64_t>& counts, ReduceOp op) {
  const Fingerprint fingerprint = check_reduce_scatter(*this, output, input, counts, op);
  check_cpu(*this, output);
  check_cpu(*this, input);
  return enqueue(fingerprint, {output, input},
                 [this, out = slices(input, counts), result = whole(output), mine = output.numel()](
                     const Fingerprint& what, Clock::time_point deadline) {
                   const auto self = static_cast<std::size_t>(rank());
                   const std::unique_ptr<std::byte[]> memory(new std::byte[result.bytes * (out.size() - 1)]);
                   std::vector<Slice> in(out.size());
                   std::vector<const void*> parts(out.size());
                   for (std::size_t peer = 0; peer < out.size(); ++peer) {
                     const std::size_t row = peer < self ? peer : peer - 1;
                     if (peer != self) in[peer] = {memory.get() + row * result.bytes, result.bytes};
                     parts[peer] = peer == self ? out[self].data : in[peer].data;
                   }
                   exchange(what, out, in, deadline);
                   reduce_parts(*what.op, what.dtype, result.data, parts, mine);
                 });
}

WorkPtr MessageGroup::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                 const std::vector<std::int64_t>& recv_counts,
                                 const std::vector<std::int64_t>& send_counts) {
  const Fingerprint fingerprint = check_all_to_all(*this, output, input, recv_counts, send_counts);
  check_cpu(*this, output);
  check_cpu(*this, input);
  return enqueue(fingerprint, {output, input},
                 [this, in = slices(output, recv_counts), out = slices(input, send_counts)](
                     const Fingerprint& what, Clock::time_point deadline) { exchange(what, out, in, deadline); });
}

WorkPtr MessageGroup::broadcast(const at::Tensor& buffer, std::int64_t root) {
  const Fingerprint fingerprint = check_broadcast(*this, buffer, root);
  check_cpu(*this, buffer);
  return enqueue(fingerprint, {buffer},
                 [this, slice = whole(buffer), root](const Fingerprint& what, Clock::time_point deadline) {
                   if (slice.bytes > kLargeBroadcast && size() > 2) return broadcast_large(what, slice, deadline);
                   const auto count = static_cast<std::size_t>(size());
                   std::vector<Slice> out(count), in(count);
                   if (rank() == root) {
                     std::fill(out.begin(), out.end(), slice);
                   } else {
                     in[static_cast<std::size_t>(root)] = slice;
                   }
                   exchange(what, out, in, deadline);
                 });
}

WorkPtr MessageGroup::scatter(const at::Tensor& output, const at::Tensor& input,
                              const std::vector<std::int64_t>& counts, std::int64_t root) {
  const Fingerprint fingerprint = check_scatter(*this, output, input, counts, root);
  check_cpu(*this, output);
  check_cpu(*this, input);
  auto out = rank() == root ? slices(input, counts) : std::vector<Slice>(counts.size());
  std::vector<Slice> in(counts.size());
  in[static_cast<std::size_t>(root)] = whole(output);
  return enqueue(fingerprint, {output, input},
                 [this, in = std::move(in), out = std::move(out)](const Fingerprint& what, Clock::time_point deadline) {
                   exchange(what, out, in, deadline);
                 });
}

WorkPtr MessageGroup::barrier() {
  return enqueue({.operation = Operation::kBarrier, .op = {}}, {},
                 [this](const Fingerprint& what, Clock::time_point deadline) {
                   const std::vector<Slice> nothing(static_cast<std::size_t>(size()));
                   exchange(what, nothing, nothing, deadline);
                 });
}

WorkPtr MessageGroup::agree_then(const Fingerprint& fingerprint, const std::vector<at::Tensor>& buffers,
                                 std::function<void()> launch) {
  return enqueue(fingerprint, buffers,
                 [this, launch = std::move(launch)](const Fingerprint& what, Clock::time_point deadline) {
                   const std::vector<Slice> nothing(static_cast<std::size_t>(size()));
                   exchange(what, nothing, nothing, deadline);
                   launch();
                 });
}

WorkPtr MessageGroup::send(const at::Tensor& buffer, std::int64_t to, std::int64_t tag) {
  const Fingerprint fingerprint = check_point_to_point(*this, Operation::kSend, buffer, to, tag);
  check_cpu(*this, buffer);
  check_tag(Operation::kSend, tag);
  return enqueue_message(fingerprint, buffer, to);
}

WorkPtr MessageGroup::receive(const at::Tensor& buffer, std::int64_t from, std::int64_t tag) {
  const Fingerprint fingerprint = check_point_to_point(*this, Operation::kReceive, buffer, from, tag);
  check_cpu(*this, buffer);
  check_tag(Operation::kReceive, tag);
  return enqueue_message(fingerprint, buffer, from);
}

namespace {
// Both sides of a message tell each other what they are about to do; the sender also says where the data will come.
struct Handshake {
  std::array<std::uint64_t, Fingerprint::kWords + 1> mine{};
  std::array<std::uint64_t, Fingerprint::kWords + 1> theirs{};
  MessagePtr told;
  MessagePtr heard;
};
template <class Array>
Slice slice_of(Array& words) {
  return {reinterpret_cast<std::byte*>(words.data()), words.size() * sizeof(std::uint64_t)};
}
}  // namespace

std::function<void()> MessageGroup::start_message(const Fingerprint& fingerprint, Slice buffer, std::int64_t peer,
                                                  Clock::time_point deadline) {
  if (!messenger_) return [] {};  // poisoned before it was connected, as whoever runs this will find
  const bool sending = fingerprint.operation == Operation::kSend;
  const int slot = kTagSlots + 2 * static_cast<int>(fingerprint.root);
  const auto transfer = [this, sending, peer, buffer](int where) -> MessagePtr {
    return sending ? messenger_->send(peer, where, buffer) : messenger_->receive(peer, where, buffer);
  };
  if (!config_.options.fingerprint) {
    if (buffer.bytes == 0) return [] {};
    auto message = std::make_shared<Messages>();
    message->emplace_back(peer, transfer(slot));
    return [this, message, deadline] { await(*message, deadline); };
  }
  auto hands = std::make_shared<Handshake>();
  const auto words = fingerprint.words();
  std::copy(words.begin(), words.end(), hands->mine.begin());
  hands->mine.back() = sending ? sent_[peer]++ % kMessageSlotCount : 0;
  hands->heard = messenger_->receive(peer, sending ? slot + 1 : slot, slice_of(hands->theirs));
  hands->told = messenger_->send(peer, sending ? slot : slot + 1, slice_of(hands->mine));
  return [this, hands, fingerprint, buffer, peer, deadline, sending, transfer] {
    Messages messages;
    messages.emplace_back(peer, std::move(hands->heard));
    messages.emplace_back(peer, std::move(hands->told));
    await(messages, deadline);
    Fingerprint theirs = Fingerprint::from_words(
        std::span<const std::uint64_t, Fingerprint::kWords>(hands->theirs.data(), Fingerprint::kWords));
    const Fingerprint said = theirs;
    theirs.operation = fingerprint.operation;
    if (!theirs.agrees_with(fingerprint)) {
      const auto world = [&](std::int64_t member) { return std::to_string(ranks()[static_cast<std::size_t>(member)]); };
      fail_diverged(
          *this, fingerprint,
          "rank " + world(rank()) + ": " + fingerprint.to_string() + ", rank " + world(peer) + ": " + said.to_string());
    }
    if (buffer.bytes == 0) return;
    const std::uint64_t number = sending ? hands->mine.back() : hands->theirs.back();
    messages.clear();
    messages.emplace_back(peer, transfer(kMessageSlots + static_cast<int>(number % kMessageSlotCount)));
    await(messages, deadline);
  };
}

}  // namespace dtensor::messages
