#include "service/tokens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "service/log.h"

namespace millrace {
namespace {

// What RFC 6750 lets a bearer token consist of.
bool IsTokenByte(unsigned char c) { return absl::ascii_isalnum(c) || absl::StrContains("-._~+/=", c); }

// In a time that depends on `given` alone, which is the peer's own.
bool Equal(absl::string_view given, absl::string_view token) {
  size_t difference = given.size() ^ token.size();
  for (size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(token[i % token.size()]);
  }
  return difference == 0;
}

}  // namespace

absl::StatusOr<std::vector<Tokens::Token>> Tokens::Parse(absl::string_view text) {
  std::vector<Token> tokens;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    const auto refuse = [&](absl::string_view why) {  // without a word of the line, which may be a token
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", why));
    };
    if (words.size() > 2) return refuse(absl::StrCat(words.size(), " words; the limit is a token and a tenant"));
    if (words[0].size() < kLeastBytes || words[0].size() > kMaxBytes) {
      return refuse(
          absl::StrCat("the token has ", words[0].size(), " bytes; the limits are ", kLeastBytes, " and ", kMaxBytes));
    }
    if (!std::ranges::all_of(words[0], IsTokenByte)) {
      return refuse("the token has bytes other than letters, digits and - . _ ~ + / =");
    }
    if (words.size() == 2 && words[1].size() > kMaxTenantBytes) {
      return refuse(absl::StrCat("the tenant has ", words[1].size(), " bytes; the limit is ", kMaxTenantBytes));
    }
    if (std::ranges::count(tokens, words[0], &Token::text) > 0) return refuse("the token stands above already");
    if (tokens.size() == kMaxTokens) return refuse(absl::StrCat("the limit is ", kMaxTokens, " tokens"));
    tokens.push_back({std::string(words[0]), words.size() == 2 ? std::string(words[1]) : ""});
  }
  if (tokens.empty()) return absl::InvalidArgumentError("there is no token");
  return tokens;
}

absl::StatusOr<std::unique_ptr<Tokens>> Tokens::Open(const std::string& path) {
  std::unique_ptr<Tokens> tokens(new Tokens(path));
  const WatchedFiles::Contents contents = WatchedFiles::Read({path});
  if (absl::Status status = tokens->Take(contents); !status.ok()) return status;
  tokens->watch_.emplace(std::vector<std::string>{path}, contents,
                         [raw = tokens.get()](const WatchedFiles::Contents& now) { (void)raw->Take(now); });
  return tokens;
}

absl::Status Tokens::Take(const WatchedFiles::Contents& contents) {
  absl::StatusOr<std::vector<Token>> parsed =
      contents.ok() ? Parse((*contents)[0]) : absl::StatusOr<std::vector<Token>>(contents.status());
  if (!parsed.ok()) {
    const std::string error = absl::StrCat(path_, ": ", parsed.status().message());
    Log(LogLevel::kError, "tokens_unusable", {{"error", error}});
    return absl::InvalidArgumentError(error);
  }
  Log(LogLevel::kInfo, "tokens", {{"file", path_}, {"count", parsed->size()}});
  absl::MutexLock lock(&mutex_);
  tokens_ = *std::move(parsed);
  return absl::OkStatus();
}

std::optional<std::string> Tokens::Find(absl::string_view token) const {
  if (token.size() > kMaxBytes) return std::nullopt;
  absl::ReaderMutexLock lock(&mutex_);
  const Token* found = nullptr;
  for (const Token& known : tokens_) {
    if (Equal(token, known.text)) found = &known;
  }
  if (found == nullptr) return std::nullopt;
  return found->tenant;
}

std::optional<absl::string_view> BearerToken(const grpc::AuthMetadataProcessor::InputMetadata& metadata) {
  const auto [begin, end] = metadata.equal_range("authorization");
  if (begin == end || std::next(begin) != end) return std::nullopt;
  absl::string_view value(begin->second.data(), begin->second.size());
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return std::nullopt;
  return absl::StripAsciiWhitespace(value.substr(kScheme.size()));
}

}  // namespace millrace
