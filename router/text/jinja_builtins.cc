#include "router/text/jinja_builtins.h"

#include <algorithm>
#include <ctime>

#include "router/text/jinja_budget.h"
#include "router/text/python_float.h"
#include "router/text/unicode.h"
#include "router/text/utf8.h"

namespace millrace {
namespace {

using jinja::func_args;
using jinja::is_val;
using jinja::mk_val;
using jinja::value;
using jinja::value_array;
using jinja::value_bool;
using jinja::value_float;
using jinja::value_int;
using jinja::value_object;
using jinja::value_string;

// Bytes [begin, end) of a string, every part keeping its origin.
jinja::string Part(const jinja::string& text, size_t begin, size_t end) {
  jinja::string out;
  size_t at = 0;
  for (const auto& part : text.parts) {
    const size_t from = std::max(begin, at), to = std::min(end, at + part.val.size());
    if (from < to) out.append(jinja::string(part.val.substr(from - at, to - from), part.is_input));
    at += part.val.size();
  }
  return out;
}

value MakeString(jinja::string text) { return mk_val<value_string>(text); }

jinja::string TextArgument(const func_args& args, size_t index) {
  const value argument = args.get_pos(index);
  if (!is_val<value_string>(argument)) throw std::runtime_error(argument->type() + " is not a string");
  return argument->as_string();
}

int64_t IntArgument(const func_args& args, size_t index, int64_t if_missing) {
  return args.count() > index && is_val<value_int>(args.get_pos(index)) ? args.get_pos(index)->as_int() : if_missing;
}

// Python's str.isspace for one character.
bool IsPythonSpace(uint32_t c) { return IsWhiteSpace(c) || (c >= 0x1C && c <= 0x1F); }

value StripSides(const func_args& args, bool left, bool right) {
  const jinja::string text = TextArgument(args, 0);
  const value chars = args.get_kwarg_or_pos("chars", 1);
  const std::string set = is_val<value_string>(chars) ? chars->as_string().str() : "";
  const std::string bytes = text.str();
  const auto stripped = [&](std::string_view at, const Utf8Step& step) {
    if (is_val<value_string>(chars)) return set.find(at.substr(0, step.length)) != std::string::npos;
    return step.kind == Utf8Step::Kind::kCharacter && IsPythonSpace(step.code_point);
  };
  size_t begin = 0, end = bytes.size();
  while (left && begin < end) {
    const std::string_view rest = std::string_view(bytes).substr(begin);
    const Utf8Step step = NextUtf8(rest);
    if (!stripped(rest, step)) break;
    begin += step.length;
  }
  while (right && end > begin) {
    size_t last = end - 1;
    while (last > begin && (static_cast<uint8_t>(bytes[last]) & 0xC0) == 0x80) --last;
    const std::string_view rest = std::string_view(bytes).substr(last, end - last);
    if (!stripped(rest, NextUtf8(rest))) break;
    end = last;
  }
  return MakeString(Part(text, begin, end));
}

// Offsets of the characters of `bytes`, and its size at the end.
std::vector<size_t> CharacterOffsets(std::string_view bytes) {
  JinjaBudget::Charge(bytes.size() * sizeof(size_t));
  std::vector<size_t> offsets;
  for (size_t at = 0; at < bytes.size(); at += NextUtf8(bytes.substr(at)).length) offsets.push_back(at);
  offsets.push_back(bytes.size());
  return offsets;
}

// Where `text` is to be cut: pairs of begin and end of each separator. Without one, runs of white space.
std::vector<std::pair<size_t, size_t>> Separators(const std::string& bytes, const std::string& separator) {
  std::vector<std::pair<size_t, size_t>> found;
  for (size_t at = 0; (at = bytes.find(separator, at)) != std::string::npos; at += separator.size()) {
    JinjaBudget::Charge(sizeof(found[0]));
    found.emplace_back(at, at + separator.size());
  }
  return found;
}

value SplitAt(const jinja::string& text, const std::vector<std::pair<size_t, size_t>>& cuts) {
  auto out = mk_val<value_array>();
  size_t part = 0, before = 0;  // walks the parts once, so that many cuts stay linear
  size_t begin = 0;
  const auto add = [&](size_t end) {
    jinja::string piece;
    while (part < text.parts.size() && before < end) {
      const auto& source = text.parts[part];
      const size_t from = std::max(begin, before), to = std::min(end, before + source.val.size());
      if (from < to) piece.append(jinja::string(source.val.substr(from - before, to - from), source.is_input));
      if (before + source.val.size() > end) break;
      before += source.val.size();
      ++part;
    }
    out->push_back(MakeString(piece));
  };
  for (const auto& [cut, next] : cuts) {
    add(cut);
    begin = next;
  }
  add(text.length());
  return out;
}

std::vector<std::pair<size_t, size_t>> Cuts(const func_args& args, const jinja::string& text) {
  const std::string bytes = text.str();
  if (args.count() > 1 && is_val<value_string>(args.get_pos(1))) {
    const std::string separator = args.get_pos(1)->as_string().str();
    if (separator.empty()) throw std::runtime_error("empty separator");
    return Separators(bytes, separator);
  }
  std::vector<std::pair<size_t, size_t>> runs;
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Step step = NextUtf8(std::string_view(bytes).substr(at));
    if (step.kind == Utf8Step::Kind::kCharacter && IsPythonSpace(step.code_point)) {
      JinjaBudget::Charge(sizeof(runs[0]));
      if (!runs.empty() && runs.back().second == at) {
        runs.back().second = at + step.length;
      } else {
        runs.emplace_back(at, at + step.length);
      }
    }
    at += step.length;
  }
  return runs;
}

bool SplitsOnSpace(const func_args& args) { return args.count() < 2 || !is_val<value_string>(args.get_pos(1)); }

struct JsonStyle {
  int indent = -1;  // -1: one line
  std::string item_separator, key_separator;
  bool ascii = false, sort = false;
};

void WriteJsonString(const std::string& text, bool ascii, std::string& out) {
  static constexpr char kHex[] = "0123456789abcdef";
  const auto unit = [&](uint32_t u) {
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out.push_back(kHex[u >> shift & 15]);
  };
  out.push_back('"');
  for (std::string_view rest = text; !rest.empty();) {
    const Utf8Step step = NextUtf8(rest);
    const uint32_t c = step.kind == Utf8Step::Kind::kCharacter ? step.code_point : 0xFFFD;
    const size_t special = std::string_view("\"\\\b\f\n\r\t").find(static_cast<char>(c));
    if (c < 0x80 && c != 0 && special != std::string_view::npos) {
      out += {'\\', "\"\\bfnrt"[special]};
    } else if (c < 0x20 || (ascii && c >= 0x7F && c < 0x10000)) {
      unit(c);
    } else if (ascii && c >= 0x10000) {
      unit(0xD800 + ((c - 0x10000) >> 10));
      unit(0xDC00 + ((c - 0x10000) & 0x3FF));
    } else {
      out.append(rest.substr(0, step.length));
    }
    rest.remove_prefix(step.length);
  }
  out.push_back('"');
}

void WriteJson(const value& node, const JsonStyle& style, int level, std::string& out);

// `count` items between brackets, each written by `item`.
template <typename Item>
void WriteItems(char open, char close, size_t count, const JsonStyle& style, int level, std::string& out, Item item) {
  const auto line = [&](int depth) {
    if (style.indent < 0) return;
    const size_t spaces = static_cast<size_t>(depth) * style.indent;
    JinjaBudget::Charge(spaces + 1);
    out.append("\n").append(spaces, ' ');
  };
  out.push_back(open);
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) out += style.item_separator;
    line(level + 1);
    item(i);
  }
  if (count > 0) line(level);
  out.push_back(close);
}

void WriteJson(const value& node, const JsonStyle& style, int level, std::string& out) {
  const JinjaBudget::Nesting nesting;
  const size_t before = out.size();
  if (is_val<value_bool>(node)) {
    out += node->as_bool() ? "true" : "false";
  } else if (is_val<value_int>(node)) {
    out += node->as_string().str();
  } else if (is_val<value_float>(node)) {
    out += PythonFloat(node->as_float());
  } else if (is_val<value_string>(node)) {
    WriteJsonString(node->as_string().str(), style.ascii, out);
  } else if (is_val<value_array>(node)) {
    const auto& items = node->as_array();
    WriteItems('[', ']', items.size(), style, level, out,
               [&](size_t i) { WriteJson(items[i], style, level + 1, out); });
    return;
  } else if (is_val<value_object>(node)) {
    auto members = node->as_ordered_object();
    const auto key = [&](size_t i) { return members[i].first->as_string().str(); };
    if (style.sort) {
      std::stable_sort(members.begin(), members.end(), [](const auto& a, const auto& b) {
        return a.first->as_string().str() < b.first->as_string().str();
      });
    }
    WriteItems('{', '}', members.size(), style, level, out, [&](size_t i) {
      WriteJsonString(key(i), style.ascii, out);
      out += style.key_separator;
      WriteJson(members[i].second, style, level + 1, out);
    });
    return;
  } else {
    out += "null";
  }
  JinjaBudget::Charge(out.size() - before);
}

}  // namespace

value Raise(const func_args& args) { throw TemplateRaised{TextArgument(args, 0).str()}; }

value StrftimeNow(const func_args& args) {
  std::tm now = {};
  localtime_r(&args.ctx.current_time, &now);
  char text[256];
  const size_t length = std::strftime(text, sizeof(text), TextArgument(args, 0).str().c_str(), &now);
  return mk_val<value_string>(std::string(text, length));
}

value DivisibleBy(const func_args& args) {
  args.ensure_vals<value_int, value_int>();
  const int64_t divisor = args.get_pos(1)->as_int();
  if (divisor == 0) throw std::runtime_error("division by zero");
  return mk_val<value_bool>(divisor == -1 || args.get_pos(0)->as_int() % divisor == 0);
}

value ToJson(const func_args& args) {
  constexpr int64_t kMaxIndent = 16;
  JsonStyle style;
  style.ascii = args.get_kwarg_or_pos("ensure_ascii", 1)->as_bool();
  style.sort = args.get_kwarg_or_pos("sort_keys", 4)->as_bool();
  const value indent = args.get_kwarg_or_pos("indent", 2);
  if (is_val<value_int>(indent)) style.indent = static_cast<int>(std::clamp<int64_t>(indent->as_int(), 0, kMaxIndent));
  const value separators = args.get_kwarg_or_pos("separators", 3);
  style.item_separator = style.indent < 0 ? ", " : ",";
  style.key_separator = ": ";
  if (is_val<value_array>(separators) && separators->as_array().size() == 2) {
    style.item_separator = separators->as_array()[0]->as_string().str();
    style.key_separator = separators->as_array()[1]->as_string().str();
  }
  std::string out;
  WriteJson(args.get_pos(0), style, 0, out);
  return MakeString(MarkedLike(*args.get_pos(0), out));
}

value Split(const func_args& args) {
  jinja::string text = TextArgument(args, 0);
  const int64_t limit = IntArgument(args, 2, -1);
  if (SplitsOnSpace(args)) {
    func_args strip(args.ctx);
    strip.push_back(args.get_pos(0));
    text = StripSides(strip, true, true)->as_string();
    if (text.length() == 0) return mk_val<value_array>();
  }
  auto cuts = Cuts(args, text);
  if (limit >= 0 && static_cast<size_t>(limit) < cuts.size()) cuts.resize(limit);
  return SplitAt(text, cuts);
}

value SplitRight(const func_args& args) {
  const jinja::string text = TextArgument(args, 0);
  const int64_t limit = IntArgument(args, 2, -1);
  if (SplitsOnSpace(args)) return Split(args);
  auto cuts = Cuts(args, text);
  if (limit >= 0 && static_cast<size_t>(limit) < cuts.size()) cuts.erase(cuts.begin(), cuts.end() - limit);
  return SplitAt(text, cuts);
}

value Replace(const func_args& args) {
  const jinja::string text = TextArgument(args, 0), with = TextArgument(args, 2);
  const std::string bytes = text.str(), what = TextArgument(args, 1).str();
  const int64_t limit = IntArgument(args, 3, -1);
  std::vector<std::pair<size_t, size_t>> cuts;
  if (what.empty()) {
    for (const size_t at : CharacterOffsets(bytes)) cuts.emplace_back(at, at);
  } else {
    cuts = Separators(bytes, what);
  }
  if (limit >= 0 && static_cast<size_t>(limit) < cuts.size()) cuts.resize(limit);
  jinja::string out;
  const auto pieces = SplitAt(text, cuts)->as_array();
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0) out.append(with);
    out.append(pieces[i]->as_string());
  }
  // Many small parts of one origin become one again.
  jinja::string merged;
  for (const auto& part : out.parts) {
    if (!merged.parts.empty() && merged.parts.back().is_input == part.is_input) {
      merged.parts.back().val += part.val;
    } else {
      merged.parts.push_back(part);
    }
  }
  return MakeString(merged);
}

value Strip(const func_args& args) { return StripSides(args, true, true); }
value StripLeft(const func_args& args) { return StripSides(args, true, false); }
value StripRight(const func_args& args) { return StripSides(args, false, true); }

value Length(const func_args& args) {
  return mk_val<value_int>(static_cast<int64_t>(CharacterOffsets(TextArgument(args, 0).str()).size() - 1));
}

// text[start:stop:step]; the engine has put in values for those left out.
value Slice(const func_args& args) {
  const jinja::string text = TextArgument(args, 0);
  const std::vector<size_t> offsets = CharacterOffsets(text.str());
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t step = IntArgument(args, 3, 1);
  if (step == 0) throw std::runtime_error("slice step cannot be zero");
  int64_t start = IntArgument(args, 1, 0), stop = IntArgument(args, 2, count);
  if (start < 0) start = std::max<int64_t>(start + count, step < 0 ? -1 : 0);
  if (stop < -1 || (stop < 0 && step > 0)) stop = std::max<int64_t>(stop + count, step < 0 ? -1 : 0);
  if (step == 1) {
    start = std::min(start, count);
    stop = std::clamp(stop, start, count);
    return MakeString(Part(text, offsets[start], offsets[stop]));
  }
  jinja::string out;
  start = std::min(start, step < 0 ? count - 1 : count);
  stop = std::min(stop, count);
  const int64_t stride = std::clamp<int64_t>(step, -count - 1, count + 1);
  for (int64_t i = start; stride > 0 ? i < stop : i > stop; i += stride) {
    out.append(Part(text, offsets[i], offsets[i + 1]));
  }
  return MakeString(out);
}

value Indent(const func_args& args) {
  const jinja::string text = TextArgument(args, 0);
  const value width = args.get_kwarg_or_pos("width", 1);
  const bool first = args.get_kwarg_or_pos("first", 2)->as_bool(), blank = args.get_kwarg_or_pos("blank", 3)->as_bool();
  const size_t spaces = is_val<value_int>(width) ? std::clamp<int64_t>(width->as_int(), 0, 256) : 4;
  const std::string indent = is_val<value_string>(width) ? width->as_string().str() : std::string(spaces, ' ');
  const auto lines = SplitAt(text, Separators(text.str(), "\n"))->as_array();
  jinja::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    const jinja::string line = lines[i]->as_string();
    if (i > 0) out.append(jinja::string(std::string("\n")));
    if (i == 0 ? first : blank || line.length() > 0) out.append(jinja::string(indent));
    out.append(line);
  }
  return MakeString(out);
}

value Join(const func_args& args) {
  const value delimiter = args.get_kwarg_or_pos("d", 1), attribute = args.get_kwarg_or_pos("attribute", 2);
  if (!is_val<value_array>(args.get_pos(0))) throw std::runtime_error("join needs a list");
  jinja::string out;
  bool first = true;
  for (value item : args.get_pos(0)->as_array()) {
    if (!attribute->is_undefined()) {
      value missing = mk_val<jinja::value_undefined>();
      item = item->at(attribute, missing);
    }
    if (!first && is_val<value_string>(delimiter)) out.append(delimiter->as_string());
    first = false;
    if (!item->is_undefined()) out.append(item->as_string());
  }
  return MakeString(out);
}

value StringIndex(const value& text, int64_t index) {
  const std::vector<size_t> offsets = CharacterOffsets(text->as_string().str());
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  if (index < 0) index += count;
  if (index < 0 || index >= count) return mk_val<jinja::value_undefined>("string_index");
  return MakeString(Part(text->as_string(), offsets[index], offsets[index + 1]));
}

}  // namespace millrace
