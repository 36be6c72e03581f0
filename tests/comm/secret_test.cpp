#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "dtensor/comm/rank_list_impl.h"
#include "dtensor/comm/secret_impl.h"
#include "tests/comm/errors.h"

namespace dtensor {
namespace {

using testing::error_of;
using Bytes = std::vector<std::uint8_t>;

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string hex(const secrets::Digest& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(hex(secrets::sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(secrets::sha256(bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(secrets::sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(secrets::sha256(Bytes(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The digest of the digests of "", "a", "aa", … up to 259 letters: every length of a last block, several times.
TEST(Sha256, PadsEveryLength) {
  Bytes all;
  for (std::size_t length = 0; length < 260; ++length) {
    const auto digest = secrets::sha256(Bytes(length, 'a'));
    all.insert(all.end(), digest.begin(), digest.end());
  }
  EXPECT_EQ(hex(secrets::sha256(all)), "2f2d4000d5f75fc70a1cdd5c05c8a31ebc4de4b8444cd3726892cf8b1d5a0fc2");
}

// RFC 4231.
TEST(HmacSha256, GivesTheDigestsOfTheRfc) {
  Bytes counting(25);
  std::iota(counting.begin(), counting.end(), std::uint8_t{1});
  const struct {
    Bytes key, message;
    std::string digest;
  } cases[] = {
      {Bytes(20, 0x0b), bytes("Hi There"), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {bytes("Jefe"), bytes("what do ya want for nothing?"),
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {Bytes(20, 0xaa), Bytes(50, 0xdd), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, Bytes(50, 0xcd), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {Bytes(20, 0x0c), bytes("Test With Truncation"), "a3b6167473100ee06e0c796c2955552b"},
      {Bytes(131, 0xaa), bytes("Test Using Larger Than Block-Size Key - Hash Key First"),
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {Bytes(131, 0xaa),
       bytes("This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
             "hashed before being used by the HMAC algorithm."),
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const auto& [key, message, digest] : cases) {
    EXPECT_EQ(hex(secrets::hmac_sha256(key, message)).substr(0, digest.size()), digest);
  }
}

TEST(Secret, ComparesAllBytes) {
  const Bytes one = bytes("0123456789abcdef");
  EXPECT_TRUE(secrets::equal_in_constant_time(one, one));
  EXPECT_TRUE(secrets::equal_in_constant_time({}, {}));
  EXPECT_FALSE(secrets::equal_in_constant_time(one, bytes("0123456789abcde")));
  for (std::size_t i = 0; i < one.size(); ++i) {
    Bytes other = one;
    other[i] ^= 1;
    EXPECT_FALSE(secrets::equal_in_constant_time(one, other)) << i;
  }
}

TEST(Secret, IsNewForEveryJob) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string secret = secrets::make_secret();
    EXPECT_EQ(secret.size(), 64u);
    EXPECT_EQ(secret.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_TRUE(seen.insert(secret).second);
    secrets::check_secret("test", "it", secret);
  }
}

TEST(Secret, ErrorsDoNotShowIt) {
  secrets::check_secret("environment", "DTENSOR_SECRET", "");
  secrets::check_secret("environment", "DTENSOR_SECRET", "exactly-16-chars");
  EXPECT_EQ(error_of([] { secrets::check_secret("environment", "DTENSOR_SECRET", "hunter2"); }),
            "[environment] DTENSOR_SECRET has the wrong length; got 7 characters; expected 16 to 1024; try the output "
            "of: openssl rand -hex 32");
  EXPECT_EQ(error_of([] { secrets::check_secret("environment", "DTENSOR_SECRET", "a secret with blanks"); }),
            "[environment] DTENSOR_SECRET has a character that a secret may not have; expected printable ASCII without "
            "blanks; try the output of: openssl rand -hex 32");
}

TEST(Secret, ProofsDependOnEverything) {
  using secrets::Role;
  const secrets::Handshake base{1, 4, secrets::sha256(bytes("a")), secrets::sha256(bytes("b"))};
  const std::string secret = "0123456789abcdef0123456789abcdef";
  std::set<std::string> proofs = {hex(prove(secret, Role::kClient, base)), hex(prove(secret, Role::kServer, base)),
                                  hex(prove(secret + "0", Role::kClient, base))};
  const auto with = [&](auto change) {
    secrets::Handshake other = base;
    change(other);
    proofs.insert(hex(prove(secret, Role::kClient, other)));
  };
  with([](auto& h) { h.rank = 2; });
  with([](auto& h) { h.size = 5; });
  with([](auto& h) { h.client_nonce[31] ^= 1; });
  with([](auto& h) { h.server_nonce[0] ^= 1; });
  with([](auto& h) { std::swap(h.client_nonce, h.server_nonce); });
  EXPECT_EQ(proofs.size(), 8u);
}

TEST(RankList, StaysShort) {
  EXPECT_EQ(rank_list({3}), "rank 3");
  EXPECT_EQ(rank_list({5, 3}), "ranks 3, 5");
  EXPECT_EQ(rank_list({1, 2}), "ranks 1, 2");
  EXPECT_EQ(rank_list({1, 2, 3}), "ranks 1-3");
  std::vector<std::int64_t> ranks = {3, 5};
  for (std::int64_t rank = 8; rank <= 20; ++rank) ranks.push_back(rank);
  EXPECT_EQ(rank_list(ranks), "ranks 3, 5, 8-20");
  ranks.clear();
  for (std::int64_t rank = 0; rank < 2'000'000; rank += 2) ranks.push_back(rank);
  EXPECT_EQ(rank_list(ranks), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 999,992 others");
  ranks = {0, 2, 4, 6, 8, 10, 12, 14, 16};
  EXPECT_EQ(rank_list(ranks), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 1 other");
}

TEST(RankList, OfLargeGroupsShowsTheFirstMembers) {
  EXPECT_EQ(member_list({2, 0, 1}), "{2,0,1}");
  std::vector<std::int64_t> ranks(1 << 20);
  std::iota(ranks.begin(), ranks.end(), 0);
  EXPECT_EQ(member_list(ranks), "{0,1,2,3,4,5,6,7 and 1,048,568 others}");
}

}  // namespace
}  // namespace dtensor
