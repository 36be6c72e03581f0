#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace dtensor {

using Json = nlohmann::json;

// Reads JSON that comes from outside. Beyond what JSON says, refuses names that stand twice in one object (others take
// the last, or the first), more than 16 levels, and anything after the value. Costs memory in proportion to the text.
// Errors name `where`, the file and the byte at which reading ended.
Json parse_strict(std::string_view text, std::string_view where, std::string_view file);

// An error unless this is UTF-8, which JSON is written in.
void check_text(std::string_view text, std::string_view where);

}  // namespace dtensor
