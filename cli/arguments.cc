#include "cli/arguments.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace millrace {
namespace {

absl::Status Store(absl::string_view name, absl::string_view text, double least, double most,
                   std::variant<std::string*, bool*, int64_t*, double*> value) {
  const auto refuse = [&](absl::string_view want) {
    return absl::InvalidArgumentError(absl::StrCat("--", name, " takes ", want, ", not '", text, "'"));
  };
  if (auto** out = std::get_if<std::string*>(&value)) {
    (*out)->assign(text.data(), text.size());
  } else if (auto** flag = std::get_if<bool*>(&value)) {
    if (!absl::SimpleAtob(text, *flag)) return refuse("true or false");
  } else if (auto** integer = std::get_if<int64_t*>(&value)) {
    if (!absl::SimpleAtoi(text, *integer)) return refuse("an integer");
    if (**integer < least || **integer > most) return refuse(absl::StrFormat("%.0f … %.0f", least, most));
  } else {
    double* number = std::get<double*>(value);
    if (!absl::SimpleAtod(text, number) || !std::isfinite(*number)) return refuse("a number");
    if (*number < least || *number > most) return refuse(absl::StrFormat("%g … %g", least, most));
  }
  return absl::OkStatus();
}

std::string DefaultOf(const std::variant<std::string*, bool*, int64_t*, double*>& value) {
  if (auto* const* text = std::get_if<std::string*>(&value))
    return (*text)->empty() ? "" : absl::StrCat(" [", **text, "]");
  if (auto* const* integer = std::get_if<int64_t*>(&value)) return absl::StrCat(" [", **integer, "]");
  if (auto* const* number = std::get_if<double*>(&value)) return absl::StrCat(" [", **number, "]");
  return "";
}

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

void Arguments::Add(absl::string_view name, std::string* value, absl::string_view help) {
  flags_.push_back({name, help, value});
}
void Arguments::Add(absl::string_view name, bool* value, absl::string_view help) {
  flags_.push_back({name, help, value});
}
void Arguments::Add(absl::string_view name, int64_t* value, int64_t least, int64_t most, absl::string_view help) {
  flags_.push_back({name, help, value, static_cast<double>(least), static_cast<double>(most)});
}
void Arguments::Add(absl::string_view name, double* value, double least, double most, absl::string_view help) {
  flags_.push_back({name, help, value, least, most});
}

Arguments::Flag* Arguments::Find(absl::string_view name) {
  const auto flag = std::find_if(flags_.begin(), flags_.end(), [&](const Flag& f) { return f.name == name; });
  return flag == flags_.end() ? nullptr : &*flag;
}

bool Arguments::given(absl::string_view name) const {
  return std::any_of(flags_.begin(), flags_.end(), [&](const Flag& f) { return f.name == name && f.given; });
}

absl::Status Arguments::Unknown(absl::string_view name) const {
  std::vector<absl::string_view> names = {"help"};
  for (const Flag& flag : flags_) names.push_back(flag.name);
  const absl::string_view closest = ClosestWord(name, names);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown flag --", name, closest.empty() ? "" : absl::StrCat("; did you mean --", closest, "?")));
}

absl::Status Arguments::Parse(absl::Span<const std::string> words) {
  bool flags_ended = false, positional_seen = false;
  for (size_t i = 0; i < words.size(); ++i) {
    absl::string_view word = words[i];
    if (!flags_ended && word == "--") {
      flags_ended = true;
    } else if (flags_ended || word.size() < 2 || word[0] != '-') {
      if (positional_ == nullptr || positional_seen) {
        return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", word, "'"));
      }
      positional_seen = true;
      *positional_ = std::string(word);
    } else if (word == "--help" || word == "-h") {
      help_wanted_ = true;
    } else {
      word.remove_prefix(word[1] == '-' ? 2 : 1);
      const size_t equals = word.find('=');
      Flag* flag = Find(word.substr(0, equals));
      if (flag == nullptr) return Unknown(word.substr(0, equals));
      absl::string_view value = "true";
      if (equals != absl::string_view::npos) {
        value = word.substr(equals + 1);
      } else if (!std::holds_alternative<bool*>(flag->value)) {
        if (++i == words.size()) return absl::InvalidArgumentError(absl::StrCat("--", flag->name, " needs a value"));
        value = words[i];
      }
      if (absl::Status s = Store(flag->name, value, flag->least, flag->most, flag->value); !s.ok()) return s;
      flag->given = true;
    }
  }
  return absl::OkStatus();
}

std::string Arguments::Help() const {
  std::string help = absl::StrCat("usage: millrace ", usage_, "\n", about_, "\n\n");
  for (const Flag& flag : flags_) {
    absl::StrAppend(&help, absl::StrFormat("  --%-20s %s%s\n", flag.name, flag.help, DefaultOf(flag.value)));
  }
  return absl::StrCat(help, absl::StrFormat("  --%-20s %s\n", "help", "print this"), "\nexample:\n  ", example_, "\n");
}

absl::string_view ClosestWord(absl::string_view word, absl::Span<const absl::string_view> words) {
  absl::string_view closest;
  size_t least = std::min<size_t>(word.size(), 64) / 2 + 1;
  for (const absl::string_view candidate : words) {
    const size_t distance = EditDistance(word.substr(0, 64), candidate);
    if (distance < least) {
      least = distance;
      closest = candidate;
    }
  }
  return closest;
}

absl::Status CheckAddress(absl::string_view flag, absl::string_view address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == absl::string_view::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) ||
      port < 1 || port > 65535 || (address[0] != '[' && address.find(':') != colon)) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, " takes HOST:PORT, not '", address, "'"));
  }
  return absl::OkStatus();
}

}  // namespace millrace
