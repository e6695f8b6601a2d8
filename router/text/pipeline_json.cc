#include "router/text/pipeline_json.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

using nlohmann::json;

// GPT-2's rule, which a ByteLevel stage applies itself when "use_regex" is set.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr size_t kMaxAffixTokens = 16;

absl::Status Unserved(const char* what, const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 200) text.resize(200);
  return absl::UnimplementedError(absl::StrCat("tokenizer.json: ", what, " ", text, " is not served"));
}

std::string TypeOf(const json& value) {
  if (!value.is_object()) return "";
  const auto it = value.find("type");
  return it != value.end() && it->is_string() ? it->get<std::string>() : "";
}

bool Flag(const json& object, const char* key, bool if_missing) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() ? it->get<bool>() : if_missing;
}

// The members of a "Sequence", or the stage itself as the only one.
std::vector<json> Flatten(const json& value, const char* members) {
  if (value.is_null()) return {};
  if (TypeOf(value) != "Sequence") return {value};
  const auto it = value.find(members);
  if (it == value.end() || !it->is_array()) return {value};
  return std::vector<json>(it->begin(), it->end());
}

absl::StatusOr<PreTokenizerStage> SplitStage(const json& split) {
  using Keep = PreTokenizerStage::Keep;
  const auto pattern = split.find("pattern");
  std::string source;
  if (pattern != split.end() && pattern->is_object() && pattern->contains("Regex") && (*pattern)["Regex"].is_string()) {
    source = (*pattern)["Regex"];
  } else if (pattern != split.end() && pattern->is_object() && pattern->contains("String") &&
             (*pattern)["String"].is_string()) {
    source = absl::StrCat("\\Q", (*pattern)["String"].get<std::string>(), "\\E");
  } else {
    return Unserved("pre_tokenizer", split);
  }
  absl::StatusOr<std::unique_ptr<Regex>> regex = Regex::Compile(source);
  if (!regex.ok()) return regex.status();
  const bool invert = Flag(split, "invert", false);
  const auto behavior = split.find("behavior");
  if (behavior == split.end() || (*behavior != "Isolated" && *behavior != "Removed")) {
    return Unserved("pre_tokenizer", split);
  }
  const Keep keep = *behavior == "Isolated" ? Keep::kBoth : invert ? Keep::kMatches : Keep::kGaps;
  return PreTokenizerStage{*std::move(regex), keep};
}

absl::StatusOr<PreTokenizerStage> RegexStage(std::string_view pattern) {
  absl::StatusOr<std::unique_ptr<Regex>> regex = Regex::Compile(pattern);
  if (!regex.ok()) return regex.status();
  return PreTokenizerStage{*std::move(regex), PreTokenizerStage::Keep::kBoth};
}

}  // namespace

absl::Status ParseNormalizer(const json& normalizer, bool& nfc) {
  nfc = false;
  for (const json& stage : Flatten(normalizer, "normalizers")) {
    if (TypeOf(stage) != "NFC") return Unserved("normalizer", stage);
    nfc = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<PreTokenizer> ParsePreTokenizer(const json& pre_tokenizer) {
  std::vector<PreTokenizerStage> stages;
  bool byte_level = false, add_prefix_space = false;
  for (const json& stage : Flatten(pre_tokenizer, "pretokenizers")) {
    const std::string type = TypeOf(stage);
    absl::StatusOr<PreTokenizerStage> parsed = absl::UnknownError("");
    // Nothing may follow ByteLevel: it would see the byte alphabet instead of text.
    if (byte_level || stages.size() == PreTokenizer::kMaxStages) return Unserved("pre_tokenizer", pre_tokenizer);
    if (type == "Split") {
      parsed = SplitStage(stage);
    } else if (type == "Digits") {
      parsed = RegexStage(Flag(stage, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
    } else if (type == "ByteLevel") {
      byte_level = true;
      add_prefix_space = Flag(stage, "add_prefix_space", true);
      if (add_prefix_space && !stages.empty()) return Unserved("pre_tokenizer", pre_tokenizer);
      if (!Flag(stage, "use_regex", true)) continue;
      parsed = RegexStage(kByteLevelPattern);
    } else {
      return Unserved("pre_tokenizer", stage);
    }
    if (!parsed.ok()) return parsed.status();
    stages.push_back(*std::move(parsed));
  }
  if (!byte_level) return Unserved("pre_tokenizer (without ByteLevel)", pre_tokenizer);
  return PreTokenizer(std::move(stages), add_prefix_space);
}

absl::Status ParsePostProcessor(const json& post_processor, std::vector<int32_t>& prefix,
                                std::vector<int32_t>& suffix) {
  for (const json& stage : Flatten(post_processor, "processors")) {
    const std::string type = TypeOf(stage);
    if (type == "ByteLevel") continue;  // moves offsets only
    const auto single = stage.is_object() ? stage.find("single") : stage.end();
    if (type != "TemplateProcessing" || single == stage.end() || !single->is_array()) {
      return Unserved("post_processor", stage);
    }
    bool after_text = false;
    for (const json& item : *single) {
      if (!item.is_object()) return Unserved("post_processor", stage);
      if (item.contains("Sequence")) {
        after_text = true;
        continue;
      }
      try {
        const json& ids = stage.at("special_tokens").at(item.at("SpecialToken").at("id").get<std::string>()).at("ids");
        std::vector<int32_t>& side = after_text ? suffix : prefix;
        for (const json& id : ids) {
          const int64_t value = id.get<int64_t>();
          if (value < 0 || value > INT32_MAX || side.size() == kMaxAffixTokens)
            return Unserved("post_processor", stage);
          side.push_back(static_cast<int32_t>(value));
        }
      } catch (const json::exception&) {
        return Unserved("post_processor", stage);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace millrace
