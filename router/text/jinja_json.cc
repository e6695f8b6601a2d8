#include "router/text/jinja_json.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "router/text/json.h"

namespace millrace {
namespace {

using jinja::mk_val;
using jinja::value;

// An integer past 64 bits: prints its digits, computes as the nearest double would.
struct BigInteger : jinja::value_int_t {
  explicit BigInteger(std::string digits_in) : value_int_t(0), digits(std::move(digits_in)) {
    val_flt = std::stod(digits);
    val_int = val_flt < 0 ? INT64_MIN : INT64_MAX;
  }
  jinja::string as_string() const override { return jinja::string(digits); }
  std::string digits;
};

class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(bool drop_null_members) : drop_null_members_(drop_null_members) {}

  bool null() override {
    if (drop_null_members_ && open_.size() == 2 && jinja::is_val<jinja::value_object>(open_.back().node)) return true;
    return Add(mk_val<jinja::value_none>());
  }
  bool boolean(bool b) override { return Add(mk_val<jinja::value_bool>(b)); }
  bool number_integer(int64_t n) override { return Add(mk_val<jinja::value_int>(n)); }
  bool number_unsigned(uint64_t n) override {
    if (n <= INT64_MAX) return Add(mk_val<jinja::value_int>(static_cast<int64_t>(n)));
    return Add(std::make_shared<BigInteger>(std::to_string(n)));
  }
  bool number_float(double number, const std::string& digits) override {
    if (digits.find_first_not_of("-0123456789") == std::string::npos) return Add(std::make_shared<BigInteger>(digits));
    return Add(mk_val<jinja::value_float>(number));
  }
  bool string(std::string& text) override { return Add(Input(text)); }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(mk_val<jinja::value_object>()); }
  bool start_array(size_t) override { return Open(mk_val<jinja::value_array>()); }
  bool key(std::string& text) override {
    open_.back().key = Input(text);
    return true;
  }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    error_ = error.what();
    return false;
  }

  const value& root() const { return root_; }
  const std::string& error() const { return error_; }

 private:
  struct Level {
    value node;
    value key;
  };

  static value Input(const std::string& text) {
    auto out = mk_val<jinja::value_string>(text);
    out->mark_input();
    return out;
  }
  bool Add(value node) {
    if (open_.empty()) {
      root_ = std::move(node);
    } else if (auto* array = jinja::cast_val<jinja::value_array>(open_.back().node)) {
      array->push_back(node);
    } else {
      open_.back().node->insert(open_.back().key, node);
    }
    return true;
  }
  bool Open(value node) {
    open_.push_back({std::move(node), nullptr});
    return true;
  }
  bool Close() {
    value node = std::move(open_.back().node);
    open_.pop_back();
    return Add(std::move(node));
  }

  const bool drop_null_members_;
  std::vector<Level> open_;
  value root_;
  std::string error_;
};

}  // namespace

absl::StatusOr<value> JinjaFromJson(std::string_view text, const std::string& what, bool drop_null_members) {
  const absl::Status shape = CheckJsonShape(text, what, kMaxTemplateMembers);
  if (!shape.ok()) return shape;
  Builder builder(drop_null_members);
  if (!nlohmann::json::sax_parse(text, &builder)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": not JSON: ", builder.error()));
  }
  return builder.root();
}

}  // namespace millrace
