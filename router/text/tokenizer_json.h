// Reads a Hugging Face tokenizer.json (byte-level BPE) into the parts that a Tokenizer runs on. What the file asks for
// and this folder cannot do exactly (other models, other normalisers) is refused by name rather than approximated.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "router/text/added_tokens.h"
#include "router/text/bpe.h"
#include "router/text/pre_tokenizer.h"

namespace millrace {

struct TokenizerParts {
  bool nfc = false;
  PreTokenizer pre_tokenizer;
  Bpe::Parts bpe;
  std::vector<AddedToken> added;
  std::vector<std::string> bytes_of;    // by id; empty for ids without a token
  std::vector<int32_t> prefix, suffix;  // what the post-processor puts around a text
};

absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view text);

}  // namespace millrace
