#include "router/text/tokenizer_json.h"

#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "router/text/byte_alphabet.h"
#include "router/text/json.h"
#include "router/text/pipeline_json.h"

namespace millrace {
namespace {

using nlohmann::json;
constexpr int64_t kMaxTokenId = (1 << 22) - 1;
constexpr size_t kMaxTokenBytes = 64 << 10;
constexpr size_t kMaxMerges = 1 << 22;
constexpr size_t kMaxAddedTokens = 1 << 16;

absl::Status Invalid(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", why));
}

const json& Field(const json& object, const char* key) {
  static const json null;
  if (!object.is_object()) return null;
  const auto it = object.find(key);
  return it == object.end() ? null : *it;
}

bool Flag(const json& object, const char* key) {
  const json& value = Field(object, key);
  return value.is_boolean() && value.get<bool>();
}

absl::StatusOr<int32_t> TokenId(const json& value, const std::string& token) {
  const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(kMaxTokenId);
  if (!value.is_number_integer() || huge || value.get<int64_t>() < 0) {
    return Invalid(absl::StrCat("id ", value.dump(), " of token '", token, "' is not in 0…", kMaxTokenId));
  }
  return static_cast<int32_t>(value.get<int64_t>());
}

std::string& BytesOf(TokenizerParts& parts, int32_t id) {
  if (static_cast<size_t>(id) >= parts.bytes_of.size()) parts.bytes_of.resize(id + 1);
  return parts.bytes_of[id];
}

using Vocabulary = absl::flat_hash_map<std::string_view, int32_t>;  // tokens as spelt in the file

absl::StatusOr<Vocabulary> ParseVocabulary(const json& vocab, TokenizerParts& parts) {
  if (!vocab.is_object() || vocab.empty()) return Invalid("model.vocab is not an object with tokens");
  Vocabulary ids;
  ids.reserve(vocab.size());
  absl::flat_hash_set<int32_t> seen;
  for (const auto& [symbols, value] : vocab.items()) {
    const absl::StatusOr<int32_t> id = TokenId(value, symbols);
    if (!id.ok()) return id.status();
    if (!seen.insert(*id).second) return Invalid(absl::StrCat("two tokens have id ", *id, ", one is '", symbols, "'"));
    if (symbols.size() > kMaxTokenBytes) {
      return Invalid(absl::StrCat("token ", *id, " has ", symbols.size(), " bytes, limit ", kMaxTokenBytes));
    }
    const std::string_view key = vocab.find(symbols).key();
    ids.emplace(key, *id);
    std::optional<std::string> bytes = BytesFromSymbols(symbols);
    if (bytes.has_value()) parts.bpe.id_of.emplace(*bytes, *id);
    BytesOf(parts, *id) = bytes.has_value() ? *std::move(bytes) : symbols;
  }
  return ids;
}

// A merge is written "left right" or ["left", "right"].
std::optional<std::pair<std::string_view, std::string_view>> MergePair(const json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return std::pair<std::string_view, std::string_view>(merge[0].get_ref<const std::string&>(),
                                                         merge[1].get_ref<const std::string&>());
  }
  if (!merge.is_string()) return std::nullopt;
  const std::string_view text = merge.get_ref<const std::string&>();
  const size_t space = text.find(' ');
  if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) return std::nullopt;
  return std::pair(text.substr(0, space), text.substr(space + 1));
}

absl::Status ParseMerges(const json& merges, const Vocabulary& ids, Bpe::Parts& bpe) {
  if (!merges.is_array()) return Invalid("model.merges is not an array");
  if (merges.size() > kMaxMerges) return Invalid(absl::StrCat(merges.size(), " merges, limit ", kMaxMerges));
  bpe.merges.reserve(merges.size());
  std::string merged;
  int32_t rank = 0;
  for (const json& merge : merges) {
    const auto pair = MergePair(merge);
    if (!pair.has_value() || pair->first.empty() || pair->second.empty()) {
      return Invalid(absl::StrCat("merge ", rank, " is not a pair of tokens"));
    }
    merged.assign(pair->first).append(pair->second);
    const auto left = ids.find(pair->first), right = ids.find(pair->second), whole = ids.find(merged);
    if (left == ids.end() || right == ids.end() || whole == ids.end()) {
      return Invalid(absl::StrCat("merge ", rank, " to '", merged, "': a token of it is not in the vocabulary"));
    }
    bpe.merges.insert_or_assign(std::pair(left->second, right->second), Bpe::Merge{rank, whole->second});
    ++rank;
  }
  return absl::OkStatus();
}

absl::Status ParseModel(const json& model, TokenizerParts& parts) {
  const json& type = Field(model, "type");
  if (!model.is_object() || !(type.is_null() || type == "BPE")) {
    return absl::UnimplementedError(absl::StrCat("tokenizer.json: model type ", type.dump(), ", only BPE is served"));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json& value = Field(model, key);
    if (!value.is_null() && value != "") {
      return absl::UnimplementedError(absl::StrCat("tokenizer.json: model.", key, " ", value.dump()));
    }
  }
  if (Flag(model, "byte_fallback")) return absl::UnimplementedError("tokenizer.json: model.byte_fallback");
  const absl::StatusOr<Vocabulary> ids = ParseVocabulary(Field(model, "vocab"), parts);
  if (!ids.ok()) return ids.status();
  parts.bpe.ignore_merges = Flag(model, "ignore_merges");
  parts.bpe.fuse_unknown = Flag(model, "fuse_unk");
  const json& unknown = Field(model, "unk_token");
  if (unknown.is_string()) {
    const auto it = ids->find(unknown.get_ref<const std::string&>());
    if (it != ids->end()) parts.bpe.unknown = it->second;
  }
  return ParseMerges(Field(model, "merges"), *ids, parts.bpe);
}

absl::Status ParseAddedTokens(const json& list, TokenizerParts& parts) {
  if (list.is_null()) return absl::OkStatus();
  if (!list.is_array()) return Invalid("added_tokens is not an array");
  if (list.size() > kMaxAddedTokens)
    return Invalid(absl::StrCat(list.size(), " added tokens, limit ", kMaxAddedTokens));
  absl::flat_hash_set<std::string> contents;
  absl::flat_hash_set<int32_t> ids;
  for (const json& entry : list) {
    const json& content = Field(entry, "content");
    if (!content.is_string()) return Invalid("an added token has no content");
    AddedToken token;
    token.content = content.get<std::string>();
    const absl::StatusOr<int32_t> id = TokenId(Field(entry, "id"), token.content);
    if (!id.ok()) return id.status();
    if (token.content.empty() || token.content.size() > AddedTokens::kMaxContentBytes) {
      return Invalid(absl::StrCat("added token ", *id, " has ", token.content.size(), " bytes, allowed are 1…",
                                  AddedTokens::kMaxContentBytes));
    }
    if (!contents.insert(token.content).second || !ids.insert(*id).second) {
      return Invalid(absl::StrCat("added token '", token.content, "' or its id ", *id, " occurs twice"));
    }
    token.id = *id;
    token.special = Flag(entry, "special");
    token.normalized = Flag(entry, "normalized");
    token.single_word = Flag(entry, "single_word");
    token.lstrip = Flag(entry, "lstrip");
    token.rstrip = Flag(entry, "rstrip");
    BytesOf(parts, token.id) = token.content;
    parts.added.push_back(std::move(token));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view text) {
  const absl::StatusOr<json> root = ParseJson(text, "tokenizer.json");
  if (!root.ok()) return root.status();
  if (!root->is_object()) return Invalid("not an object");
  TokenizerParts parts;
  absl::Status status = ParseModel(Field(*root, "model"), parts);
  if (status.ok()) status = ParseAddedTokens(Field(*root, "added_tokens"), parts);
  if (status.ok()) status = ParseNormalizer(Field(*root, "normalizer"), parts.nfc);
  if (status.ok()) status = ParsePostProcessor(Field(*root, "post_processor"), parts.prefix, parts.suffix);
  if (!status.ok()) return status;
  absl::StatusOr<PreTokenizer> pre_tokenizer = ParsePreTokenizer(Field(*root, "pre_tokenizer"));
  if (!pre_tokenizer.ok()) return pre_tokenizer.status();
  parts.pre_tokenizer = *std::move(pre_tokenizer);
  for (const std::vector<int32_t>* ids : {&parts.prefix, &parts.suffix}) {
    for (const int32_t id : *ids) {
      if (id < 0 || static_cast<size_t>(id) >= parts.bytes_of.size()) {
        return Invalid(absl::StrCat("post_processor adds token ", id, ", which does not exist"));
      }
    }
  }
  return parts;
}

}  // namespace millrace
