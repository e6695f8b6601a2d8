// Greedy paths that an independent implementation computed: golden.json beside a model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace millrace {

struct GoldenCase {
  std::string name;
  std::vector<int32_t> prompt, greedy;
  size_t robust_tokens;  // the path is beyond doubt up to here
  size_t bf16_tokens;    // and with activations in bf16: up to the first gap below 0.3
  std::vector<std::vector<std::pair<int32_t, float>>>
      top5;            // (token, log-probability) at the first generated positions
  std::string logits;  // the tensor of logits.safetensors with the last prompt token's; may be empty
};

inline std::vector<GoldenCase> ReadGolden(const std::filesystem::path& folder) {
  std::ifstream file(folder / "golden.json");
  const nlohmann::json golden_file = nlohmann::json::parse(file);
  std::vector<GoldenCase> cases;
  for (const nlohmann::json& json : golden_file.at("cases")) {
    GoldenCase golden = {json.at("name"), json.at("prompt"), json.at("greedy"), 0, 0, {}, ""};
    golden.robust_tokens = json.value("robust_tokens", golden.greedy.size());
    golden.bf16_tokens = golden.robust_tokens;
    const auto gaps = json.value("gaps", std::vector<float>());
    const auto close = std::ranges::find_if(gaps, [](float gap) { return gap < 0.3f; });
    if (close != gaps.end()) {
      golden.bf16_tokens = std::min(golden.bf16_tokens, static_cast<size_t>(close - gaps.begin()));
    }
    for (const nlohmann::json& position : json.value("top5", nlohmann::json::array())) {
      golden.top5.emplace_back();
      for (const nlohmann::json& entry : position) golden.top5.back().emplace_back(entry.at("id"), entry.at("logprob"));
    }
    if (json.contains("logits"))
      golden.logits = json.at("logits").get<std::string>().substr(std::string("logits.safetensors:").size());
    cases.push_back(std::move(golden));
  }
  return cases;
}

}  // namespace millrace
