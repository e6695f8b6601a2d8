#include "router/text/tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/text/file.h"
#include "router/text/tokenizer_config.h"
#include "router/text/tokenizer_json.h"
#include "router/text/unicode.h"
#include "router/text/utf8.h"

namespace millrace {
namespace {

constexpr uint64_t kMaxTokenizerBytes = 256 << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::filesystem::path& model_dir) {
  const absl::StatusOr<std::string> text = ReadFile(model_dir / "tokenizer.json", kMaxTokenizerBytes);
  if (!text.ok()) return text.status();
  const absl::StatusOr<TokenizerConfig> config = TokenizerConfig::Load(model_dir);
  if (!config.ok()) return config.status();
  return Make(*text, *config);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(std::string_view tokenizer_json) {
  return Make(tokenizer_json, TokenizerConfig());
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Make(std::string_view tokenizer_json,
                                                           const TokenizerConfig& config) {
  absl::StatusOr<TokenizerParts> parts = ParseTokenizerJson(tokenizer_json);
  if (!parts.ok()) return parts.status();
  return std::unique_ptr<Tokenizer>(new Tokenizer(*std::move(parts), config));
}

Tokenizer::Tokenizer(TokenizerParts parts, const TokenizerConfig& config)
    : nfc_(parts.nfc),
      pre_tokenizer_(std::move(parts.pre_tokenizer)),
      added_(parts.added),
      id_of_(parts.bpe.id_of),
      bpe_(std::move(parts.bpe)),
      bytes_(parts.bytes_of),
      special_(parts.bytes_of.size()),
      prefix_(std::move(parts.prefix)),
      suffix_(std::move(parts.suffix)) {
  for (const AddedToken& token : parts.added) {
    special_[token.id] = token.special;
    id_of_[token.content] = token.id;
  }
  bos_id_ = TokenId(config.bos_token);
  eos_id_ = TokenId(config.eos_token);
  ApplyAddBos(config.add_bos_token);
}

void Tokenizer::ApplyAddBos(std::optional<bool> add_bos) {
  if (!add_bos.has_value() || !bos_id_.has_value()) return;
  const bool has_bos = !prefix_.empty() && prefix_.front() == *bos_id_;
  if (*add_bos && !has_bos) prefix_.insert(prefix_.begin(), *bos_id_);
  if (!*add_bos && has_bos) prefix_.erase(prefix_.begin());
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view utf8, EncodeOptions options) const {
  const ByteRange all = {0, utf8.size()};
  absl::StatusOr<std::vector<int32_t>> ids =
      EncodeText(utf8, absl::MakeConstSpan(&all, options.special_as_text && !utf8.empty() ? 1 : 0));
  if (ids.ok() && options.add_special_tokens) {
    ids->insert(ids->begin(), prefix_.begin(), prefix_.end());
    ids->insert(ids->end(), suffix_.begin(), suffix_.end());
  }
  return ids;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodePieces(absl::Span<const Piece> pieces) const {
  std::string text;
  std::vector<ByteRange> plain;
  for (const Piece& piece : pieces) {
    if (piece.is_user_text && !piece.text.empty()) plain.push_back({text.size(), text.size() + piece.text.size()});
    text += piece.text;
  }
  return EncodeText(text, plain);
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::EncodeText(std::string_view utf8,
                                                           absl::Span<const ByteRange> plain) const {
  if (utf8.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat("text of ", utf8.size(), " bytes, limit ", kMaxTextBytes));
  }
  const size_t invalid = FirstInvalidUtf8(utf8);
  if (invalid != utf8.size()) {
    return absl::InvalidArgumentError(absl::StrCat("text is not UTF-8: invalid byte at offset ", invalid));
  }
  std::vector<int32_t> ids;
  ids.reserve(utf8.size() / 4 + 1);
  for (const AddedTokens::Segment& segment : added_.Split(utf8, plain)) {
    if (segment.id >= 0) {
      ids.push_back(segment.id);
      continue;
    }
    const std::string normalized = nfc_ ? NormalizeNfc(segment.text) : std::string();
    const absl::Status status = pre_tokenizer_.Split(nfc_ ? std::string_view(normalized) : segment.text,
                                                     [&](std::string_view piece) { bpe_.Encode(piece, ids); });
    if (!status.ok()) return status;
  }
  return ids;
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (!(skip_special && IsSpecial(id))) bytes += TokenBytes(id);
  }
  std::string text;
  if (AppendLossyUtf8(bytes, text) > 0) text += kReplacementCharacter;
  return text;
}

std::optional<int32_t> Tokenizer::TokenId(std::string_view token) const {
  const auto it = id_of_.find(token);
  if (it == id_of_.end()) return std::nullopt;
  return it->second;
}

}  // namespace millrace
