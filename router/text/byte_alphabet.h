// Byte-level BPE writes every byte as one printable character: most of Latin-1 as itself, the other 68 bytes, in order,
// as U+0100, U+0101, … tokenizer.json spells its vocabulary in this alphabet. Stateless; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace millrace {

// The bytes that `symbols` stands for; nothing when a character of it is not in the alphabet.
std::optional<std::string> BytesFromSymbols(std::string_view symbols);

}  // namespace millrace
