#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dtensor/checkpoint/checkpoint.h"
#include "dtensor/comm/communicator.h"
#include "dtensor/core/spec.h"

namespace dtensor {

// Those who save or load together.
struct Party {
  std::int64_t rank = 0;
  std::int64_t size = 1;
  CommunicatorPtr group;  // none: alone
  c10::DeviceType device = c10::DeviceType::CPU;
  std::shared_ptr<RankContext> context;
};
// The world of the tensors, or of the mesh; an error when they are of several.
Party party_of(const NamedTensors& tensors, const std::optional<DeviceMesh>& mesh, std::string_view where);

// Every member's text, by rank.
std::vector<std::string> gather_texts(const Party& party, const std::string& text);

// Runs a step that may fail on some ranks, and lets all of them know: its texts by rank, or the same error everywhere.
template <class Step>
std::vector<std::string> together(const Party& party, Step step);

// The layout of one named tensor as this rank knows it, and its part; no part where it is not in the mesh.
struct NamedPart {
  std::string name;
  Spec spec;
  Dims coordinate;
  at::Tensor local;
};
std::vector<NamedPart> parts_of(const NamedTensors& tensors, const Party& party, std::string_view where);

// Names, layouts and what else is said, in few bytes: all ranks must say the same.
std::string digest_of(const std::vector<NamedPart>& parts, const std::string& more);

std::vector<std::string> gather_or_throw(const Party& party, const std::string& text, const std::string& error);

template <class Step>
std::vector<std::string> together(const Party& party, Step step) {
  std::string text;
  std::string error;
  try {
    text = step();
  } catch (const std::exception& caught) {
    error = caught.what();
    if (error.empty()) error = "an error without a text";
  }
  return gather_or_throw(party, text, error);
}

}  // namespace dtensor
