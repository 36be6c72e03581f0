// What is on the disk when something goes wrong: killed programs, full disks, folders that may not be written to.
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <random>
#include <thread>

#include "dtensor/core/text.h"
#include "tests/checkpoint/store.h"

namespace dtensor {
namespace {

using testing::error_of;
using testing::Folder;

std::vector<SaveItem> two_tensors() {
  return {{"a", Spec::parse("f32[64,256] @ 3(x) : S(0)")}, {"b", Spec::parse("f32[1000] @ 3(x) : R")}};
}

void expect_whole(const std::string& where) {
  Checkpoint checkpoint = Checkpoint::open(where);
  const std::vector<std::string> wrong = checkpoint.verify();
  EXPECT_TRUE(wrong.empty()) << (wrong.empty() ? "" : wrong[0]);
  testing::expect_reads(checkpoint, "a", Spec::parse("f32[64,256] @ 2(x) : S(1)"));
  testing::expect_reads(checkpoint, "b", Spec::parse("f32[1000] @ 2(x) : S(0)"));
}

// Runs this in a process of its own; its exit code, or minus the signal that ended it.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (...) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Commit, KeepsTheLastOnes) {
  const Folder folder;
  for (std::int64_t step = 1; step <= 5; ++step)
    testing::save_all(folder.path(), two_tensors(), 3, {.step = step * 10}, 2);
  EXPECT_EQ(list_steps(folder.path()), (std::vector<std::int64_t>{40, 50}));
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{".lock", "step-00000040", "step-00000050"}));
  // Without a number it is the next one; saved again, it is replaced.
  EXPECT_EQ(testing::save_all(folder.path(), two_tensors(), 3), folder / "step-00000051");
  EXPECT_EQ(testing::save_all(folder.path(), two_tensors(), 3, {.step = 51, .metadata = {{"second", "yes"}}}),
            folder / "step-00000051");
  EXPECT_EQ(Checkpoint::open(folder.path()).info().metadata.at("second"), "yes");
  EXPECT_EQ(names_in(folder.path()).size(), 4u);
  // Saving an old step again does not remove what was just saved.
  testing::save_all(folder.path(), two_tensors(), 3, {.step = 7}, 1);
  EXPECT_EQ(list_steps(folder.path()), (std::vector<std::int64_t>{7, 51}));
}

TEST(Commit, NamesAreNumbers) {
  EXPECT_EQ(step_name(12), "step-00000012");
  EXPECT_EQ(step_name(123456789012), "step-123456789012");
  EXPECT_EQ(step_of("step-00000012"), 12);
  EXPECT_EQ(step_of("step-123456789012"), 123456789012);
  for (const char* name :
       {"step-12", "step-000000012", "step-0000001x", "step-", "", ".saving-1", "step-999999999999999999999"}) {
    EXPECT_EQ(step_of(name), std::nullopt) << name;
  }
}

TEST(Commit, OneAtATime) {
  const Folder folder;
  const Commit first(folder.path(), 1, 0);
  EXPECT_EQ(
      error_of([&] { Commit second(folder.path(), 2, 20); }),
      "[checkpoint] another save has not ended; got " + in_quotes(folder.path()) + "; try one program per folder");
}

// Killed at any moment, 200 times: what was complete is complete.
TEST(Commit, SurvivesKill) {
  const Folder folder;
  const auto start = std::chrono::steady_clock::now();
  testing::save_all(folder.path(), two_tensors(), 3, {.step = 0}, 2);
  const auto one = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
  std::mt19937 random(20261115);
  int finished = 0;
  std::int64_t last = 0;
  for (int round = 1; round <= 200; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (std::int64_t step = last + 1;; ++step) testing::save_all(folder.path(), two_tensors(), 3, {.step = step}, 2);
    }
    std::this_thread::sleep_for(one * 6 * (random() % 1000) / 1000);  // in any of the first saves
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::vector<std::int64_t> steps = list_steps(folder.path());
    ASSERT_FALSE(steps.empty()) << "round " << round;
    ASSERT_GE(steps.back(), last) << "round " << round;
    finished += steps.back() > last;
    last = steps.back();
    for (const std::int64_t step : steps) expect_whole(folder / step_name(step));
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
  EXPECT_GT(finished, 20) << "nearly all were killed before they had saved once";
  // The next save clears what they left.
  testing::save_all(folder.path(), two_tensors(), 3, {.step = last + 1}, 2);
  for (const std::string& name : names_in(folder.path())) EXPECT_FALSE(name.starts_with(".saving")) << name;
}

// What a save that failed says, and that it left nothing of itself and all of the others.
void expect_failure(const std::string& root, const std::string& text, const std::string& expected) {
  EXPECT_NE(text.find(expected), std::string::npos) << text;
  EXPECT_EQ(list_steps(root), (std::vector<std::int64_t>{1}));
  for (const std::string& name : names_in(root)) EXPECT_FALSE(name.starts_with(".saving")) << name;
  expect_whole(root);
}

TEST(Commit, AFullDiskIsAClearError) {
  // A disk of 100 kB, where this program may mount one.
  const Folder folder;
  const int code = in_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=128k") != 0) {
      return 77;
    }
    testing::save_all(folder.path(), two_tensors(), 3, {.step = 1});
    expect_failure(folder.path(), error_of([&] { testing::save_all(folder.path(), two_tensors(), 3, {.step = 2}); }),
                   "No space left on device; try to make room there, or to keep fewer checkpoints; the ones before are "
                   "as they were");
    return ::testing::Test::HasFailure() ? 1 : 0;
  });
  if (code == 77) GTEST_SKIP() << "this program may not mount a small disk";
  EXPECT_EQ(code, 0);
}

TEST(Commit, AFileThatMayNotGrowIsAClearError) {
  const Folder folder;
  testing::save_all(folder.path(), two_tensors(), 3, {.step = 1});
  EXPECT_EQ(in_child([&] {
              ::signal(SIGXFSZ, SIG_IGN);
              const rlimit limit{10'000, 10'000};
              ::setrlimit(RLIMIT_FSIZE, &limit);
              const std::string text =
                  error_of([&] { testing::save_all(folder.path(), two_tensors(), 3, {.step = 2}); });
              return text.find("[checkpoint] cannot write a file; got '") == 0 &&
                             text.find(": File too large; try to make room") != std::string::npos
                         ? 0
                         : 1;
            }),
            0);
  expect_failure(folder.path(), "", "");
}

TEST(Commit, AReadOnlyFolderIsAClearError) {
  const Folder folder;
  testing::save_all(folder.path(), two_tensors(), 3, {.step = 1});
  ::chmod(folder.path().c_str(), 0555);
  ::chmod((folder / ".lock").c_str(), 0644);
  const int code = in_child([&] {
    // The administrator may write everywhere: be somebody else.
    if (::geteuid() == 0 && (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0)) return 77;
    const std::string text = error_of([&] { testing::save_all(folder.path(), two_tensors(), 3, {.step = 2}); });
    return text.find(": Permission denied; try a folder that this program may write to") != std::string::npos ? 0 : 1;
  });
  ::chmod(folder.path().c_str(), 0755);
  if (code == 77) GTEST_SKIP() << "this program may not become another user";
  EXPECT_EQ(code, 0);
  expect_failure(folder.path(), "", "");
}

TEST(Commit, WhatIsMissingOrDamagedIsNamed) {
  const Folder folder;
  const std::string where = testing::save_all(folder.path(), two_tensors(), 3, {.step = 1});
  const std::string file = where + "/model-00002-of-00003.safetensors";
  const std::string bytes = testing::bytes_of(file);
  const Spec wants = Spec::parse("f32[64,256] @ 1(x) : R");
  std::vector<float> values(64 * 256);
  const auto read = [&] { Checkpoint::open(where).read("a", wants, {0}, {256, 1}, values.data()); };
  std::string damaged = bytes;
  damaged[damaged.size() - 5] ^= 1;  // in the data
  testing::write_bytes(file, damaged);
  const std::string text =
      "[checkpoint] the data is not what was saved: its checksum is another; got bytes " +
      std::to_string(bytes.size() - 22 * 256 * 4) + " to " + std::to_string(bytes.size()) + " of " + in_quotes(file) +
      ", which hold 'a' (as 'a@1'); try an earlier checkpoint, or an undamaged copy of this file; dtensor checkpoint "
      "verify lists all damage";
  EXPECT_EQ(error_of(read), text);
  const Spec same = Spec::parse("f32[64,256] @ 3(x) : S(0)");
  EXPECT_EQ(error_of([&] { Checkpoint::open(where).read("a", same, {1}, {256, 1}, values.data()); }), text);
  EXPECT_EQ(Checkpoint::open(where).verify(), std::vector<std::string>{text});
  testing::write_bytes(file, bytes.substr(0, bytes.size() - 1));
  EXPECT_NE(error_of(read).find("the file ends before its entries do"), std::string::npos) << error_of(read);
  damaged = bytes;
  damaged[damaged.find("\"dtensor.rank\":\"1\"") + 16] = '2';
  testing::write_bytes(file, damaged);
  EXPECT_EQ(error_of(read).substr(0, error_of(read).find(';')),
            "[checkpoint] " + in_quotes(file) + ": the header is not what was saved: its checksum is another");
  // A sound file, but another rank's.
  testing::write_bytes(file, testing::bytes_of(where + "/model-00003-of-00003.safetensors"));
  EXPECT_NE(error_of(read).find("[checkpoint] not the file that was saved; got " + in_quotes(file)), std::string::npos)
      << error_of(read);
  ::unlink(file.c_str());
  EXPECT_EQ(error_of(read), "[checkpoint] cannot open a file; got " + in_quotes(file) +
                                ": No such file or directory; try a folder or file that is there");
  EXPECT_EQ(error_of([&] { Checkpoint::open(folder / "nothing"); }),
            "[checkpoint] no checkpoint; got " + in_quotes(folder / "nothing") +
                ": No such file or directory; try a folder or file that is there");
}

}  // namespace
}  // namespace dtensor
