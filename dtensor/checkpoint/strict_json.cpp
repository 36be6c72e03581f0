#include <string>
#include <vector>

#include "dtensor/checkpoint/strict_json_impl.h"
#include "dtensor/core/error.h"
#include "dtensor/core/text.h"

namespace dtensor {
namespace {

constexpr std::size_t kMaxDepth = 16;

// Builds the value from the parser's events; nlohmann's own builder would take names that stand twice.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return refuse("binary data"); }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    const auto [slot, fresh] = open_.back()->get_ref<Json::object_t&>().try_emplace(name, nullptr);
    if (!fresh) return refuse("the name " + in_quotes(name) + " stands twice");
    value_of_key_ = &slot->second;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return refuse("not JSON at byte " + std::to_string(position));
  }

  Json root;
  std::string reason;

 private:
  Json* slot() {
    if (open_.empty()) return &root;
    if (open_.back()->is_object()) return value_of_key_;
    auto& list = open_.back()->get_ref<Json::array_t&>();
    list.emplace_back();
    return &list.back();
  }
  template <class Value>
  bool put(Value&& value) {
    *slot() = std::forward<Value>(value);
    return true;
  }
  bool open(Json value) {
    if (open_.size() == kMaxDepth) return refuse("more than " + std::to_string(kMaxDepth) + " levels");
    Json* const place = slot();
    *place = std::move(value);
    open_.push_back(place);  // stays where it is while it is open: only its own members are added to
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  bool refuse(std::string why) {
    if (reason.empty()) reason = std::move(why);
    return false;
  }

  std::vector<Json*> open_;
  Json* value_of_key_ = nullptr;
};

}  // namespace

Json parse_strict(std::string_view text, std::string_view where, std::string_view file) {
  Builder builder;
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    fail_invalid(where, {.what = in_quotes(file) + ": " + builder.reason, .got = in_quotes(text), .expected = "JSON"});
  }
  return std::move(builder.root);
}

void check_text(std::string_view text, std::string_view where) {
  try {
    (void)Json(text).dump();
  } catch (const Json::exception&) {
    fail_invalid(where, {.what = "text that is not UTF-8", .got = in_quotes(text)});
  }
}

}  // namespace dtensor
