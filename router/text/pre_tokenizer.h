// Cuts text into the pieces that BPE works on: a short row of stages, each cutting the pieces of the one before.
// Constant after loading, safe for any number of threads.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "router/text/regex.h"

namespace millrace {

struct PreTokenizerStage {
  enum class Keep { kBoth, kMatches, kGaps };  // which parts become pieces
  std::unique_ptr<Regex> regex;
  Keep keep = Keep::kBoth;
};

class PreTokenizer {
 public:
  static constexpr size_t kMaxStages = 8;

  PreTokenizer() = default;
  PreTokenizer(std::vector<PreTokenizerStage> stages, bool add_prefix_space)
      : stages_(std::move(stages)), add_prefix_space_(add_prefix_space) {}

  // Calls `piece` for each piece of `text` (valid UTF-8), in order.
  absl::Status Split(std::string_view text, absl::FunctionRef<void(std::string_view)> piece) const;

 private:
  absl::Status SplitFrom(size_t stage, std::string_view text, absl::FunctionRef<void(std::string_view)> piece) const;

  std::vector<PreTokenizerStage> stages_;
  bool add_prefix_space_ = false;
};

}  // namespace millrace
