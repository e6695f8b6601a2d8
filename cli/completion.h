// What one request came to: its pieces put together by choice, and its JSON line. Lives as long as the call;
// single-threaded.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"
#include "millrace/v1/inference.pb.h"
#include "nlohmann/json.hpp"

namespace millrace {

class Completion {
 public:
  static constexpr uint32_t kMaxChoices = 8;

  void Add(const v1::GenerateResponse& piece);
  // The line of a call that ended with `status`: one choice as an object, several as {"choices": […]}, a failure as
  // {"error": NAME, "message": TEXT}.
  nlohmann::ordered_json Json(const grpc::Status& status, bool several_choices) const;

 private:
  std::vector<v1::GenerateResponse> choices_;  // by index, all pieces merged into one
};

absl::Status ToAbsl(const grpc::Status& status);  // the two share their codes
nlohmann::ordered_json ErrorJson(const absl::Status& status);
// One line of output, without its end. ASCII alone, since some readers take U+2028 or U+0085 for the end of a line.
std::string DumpLine(const nlohmann::ordered_json& json);

}  // namespace millrace
