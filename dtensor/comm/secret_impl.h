#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace dtensor::secrets {

using Digest = std::array<std::uint8_t, 32>;

// FIPS 180-4 and RFC 2104.
Digest sha256(std::span<const std::uint8_t> message);
Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message);

// Takes the same time wherever the two differ.
bool equal_in_constant_time(std::span<const std::uint8_t> left, std::span<const std::uint8_t> right);

// From the operating system's random source.
Digest random_digest();
// A secret for one job: 32 random bytes as 64 hexadecimal digits.
std::string make_secret();

// An error unless `secret` is empty (no secret) or 16 to 1024 printable ASCII characters without blanks. The error
// shows the length at most, never the secret. `where` and `name` say where it comes from.
void check_secret(std::string_view where, std::string_view name, std::string_view secret);

// What both sides of a connection prove to each other. The role keeps a proof of one side from being sent back as the
// other's; the nonces (one from each side) keep an old proof from being used again.
enum class Role : std::uint8_t { kClient = 1, kServer = 2 };
struct Handshake {
  std::int64_t rank = 0;
  std::int64_t size = 0;
  Digest client_nonce{};
  Digest server_nonce{};
};
Digest prove(std::string_view secret, Role role, const Handshake& handshake);

}  // namespace dtensor::secrets
