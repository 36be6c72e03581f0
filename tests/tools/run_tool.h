#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

// Runs the command as a person would: what it prints on both streams, and its exit code.
struct Outcome {
  int code;
  std::string output;
};

inline Outcome run(const std::string& arguments) {
  const std::string command = std::string(DTENSOR_TOOL) + " " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return {-1, "popen failed"};
  Outcome outcome{0, {}};
  char buffer[4096];
  while (const std::size_t n = fread(buffer, 1, sizeof buffer, pipe)) outcome.output.append(buffer, n);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}
