// Text to token ids and back for one model: byte-level BPE as a Hugging Face tokenizer.json describes it, id for id
// equal to that library. Immutable after loading, so any number of threads may use one. About 100 bytes per vocabulary
// entry.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/text/added_tokens.h"
#include "router/text/bpe.h"
#include "router/text/bytes_map.h"
#include "router/text/pre_tokenizer.h"
#include "router/text/token_bytes.h"

namespace millrace {

struct TokenizerConfig;
struct TokenizerParts;

class Tokenizer {
 public:
  static constexpr size_t kMaxTextBytes = 16 << 20;

  // Reads tokenizer.json and, if present, tokenizer_config.json of a model directory.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::filesystem::path& model_dir);
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(std::string_view tokenizer_json);

  struct EncodeOptions {
    bool add_special_tokens = false;  // what the post-processor adds, BOS usually
    bool special_as_text = false;     // special tokens spelt in the text are ordinary text
  };
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view utf8, EncodeOptions options) const;

  // A rendered chat prompt. The pieces are encoded as one text, in which special tokens count only where every byte of
  // them is the template's own. No BOS is added: templates write it themselves.
  struct Piece {
    std::string text;
    bool is_user_text = false;
  };
  absl::StatusOr<std::vector<int32_t>> EncodePieces(absl::Span<const Piece> pieces) const;

  // U+FFFD stands for each maximal invalid part. Unknown ids are nothing.
  std::string Decode(absl::Span<const int32_t> ids, bool skip_special) const;

  std::string_view TokenBytes(int32_t id) const { return bytes_[id]; }
  bool IsSpecial(int32_t id) const { return id >= 0 && id < vocab_size() && special_[id]; }
  int32_t vocab_size() const { return bytes_.size(); }           // largest id + 1
  std::optional<int32_t> TokenId(std::string_view token) const;  // by its bytes or an added token's text

  // Of tokenizer_config.json; nothing when it names none.
  std::optional<int32_t> bos_id() const { return bos_id_; }
  std::optional<int32_t> eos_id() const { return eos_id_; }

 private:
  Tokenizer(TokenizerParts parts, const TokenizerConfig& config);
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Make(std::string_view tokenizer_json,
                                                         const TokenizerConfig& config);
  absl::StatusOr<std::vector<int32_t>> EncodeText(std::string_view utf8, absl::Span<const ByteRange> plain) const;
  void ApplyAddBos(std::optional<bool> add_bos);

  bool nfc_;
  PreTokenizer pre_tokenizer_;
  AddedTokens added_;
  BytesMap<int32_t> id_of_;
  Bpe bpe_;
  millrace::TokenBytes bytes_;
  std::vector<bool> special_;  // by id
  std::vector<int32_t> prefix_, suffix_;
  std::optional<int32_t> bos_id_, eos_id_;
};

}  // namespace millrace
