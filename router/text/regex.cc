#include "router/text/regex.h"

#include <pcre2.h>

#include "absl/strings/str_cat.h"
#include "router/text/utf8.h"

namespace millrace {
namespace {

constexpr size_t kMaxPatternBytes = 16 << 10;
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr uint32_t kHeapLimitKib = 64 << 10;

constexpr std::string_view kSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNotSpace =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e})"
    R"(\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";

// Spells out \s and \S, inside and outside of character classes.
std::string WithUnicodeSpaces(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escaped = pattern[++i];
      if (escaped == 's' || escaped == 'S') {
        const std::string_view set = escaped == 's' ? kSpace : kNotSpace;
        if (!in_class) out.push_back('[');
        out += set;
        if (!in_class) out.push_back(']');
      } else {
        out += {c, escaped};
      }
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out.push_back(c);
  }
  return out;
}

std::string ErrorText(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  bool jit = false;
  ~Code() {
    pcre2_code_free(code);
    pcre2_match_context_free(context);
  }
};

Regex::Regex(std::unique_ptr<Code> code) : code_(std::move(code)) {}
Regex::~Regex() = default;

absl::StatusOr<std::unique_ptr<Regex>> Regex::Compile(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("regular expression of ", pattern.size(), " bytes, limit ", kMaxPatternBytes));
  }
  if (FirstInvalidUtf8(pattern) != pattern.size()) return absl::InvalidArgumentError("regular expression is not UTF-8");
  const std::string source = WithUnicodeSpaces(pattern);
  auto code = std::make_unique<Code>();
  int error = 0;
  PCRE2_SIZE offset = 0;
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code->code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("regular expression '", std::string(pattern), "': ", ErrorText(error)));
  }
  code->context = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(code->context, kMatchLimit);
  pcre2_set_heap_limit(code->context, kHeapLimitKib);
  code->jit = pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE) == 0;
  return std::unique_ptr<Regex>(new Regex(std::move(code)));
}

absl::Status Regex::ForEachMatch(std::string_view text, absl::FunctionRef<void(size_t, size_t)> match) const {
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create(1, nullptr),
                                                                            pcre2_match_data_free);
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(data.get());
  size_t at = 0;
  while (at < text.size()) {
    int found = PCRE2_ERROR_JIT_STACKLIMIT;
    if (code_->jit) found = pcre2_jit_match(code_->code, subject, text.size(), at, 0, data.get(), code_->context);
    // The JIT's 32 KiB stack is too small for some patterns on long texts; the interpreter then uses the heap.
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      found = pcre2_match(code_->code, subject, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data.get(),
                          code_->context);
    }
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("tokenizer regular expression failed at byte ", at, ": ", ErrorText(found)));
    }
    if (range[1] > range[0] && range[0] >= at) {
      match(range[0], range[1]);
      at = range[1];
    } else {
      at = range[1] < at ? at : range[1];
      if (at < text.size()) at += NextUtf8(text.substr(at)).length;
    }
  }
  return absl::OkStatus();
}

}  // namespace millrace
