#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor {

// CRC-32C (Castagnoli), as iSCSI, ext4 and many stores have it: checksum("123456789") == 0xe3069283. Go on with what an
// earlier call gave. By wide products or by the processor's instruction where it has them, else by tables; the same
// value.
std::uint32_t checksum(const void* data, std::size_t bytes, std::uint32_t before = 0);
// By tables, on any processor.
std::uint32_t checksum_by_tables(const void* data, std::size_t bytes, std::uint32_t before = 0);

// Copies as well, in the same pass, past the caches: for what is large and not needed at once.
std::uint32_t copy_with_checksum(void* to, const void* from, std::size_t bytes, std::uint32_t before = 0);

// The checksum of `bytes` bytes of which every block of `block_bytes` (the last may be shorter) has one of these.
std::uint32_t join_checksums(const std::vector<std::uint32_t>& blocks, std::int64_t bytes, std::int64_t block_bytes);

// Eight hexadecimal digits.
std::string checksum_text(std::uint32_t value);
std::optional<std::uint32_t> parse_checksum(std::string_view text);

}  // namespace dtensor
