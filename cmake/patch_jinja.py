"""Puts bounds, provenance and Python's string rules into the template engine.

patch_jinja.py COMMON_DIR

Every edit names a place that must occur exactly once; a new version of the engine that moved it fails here, loudly.
The code that the edits call is router/text/jinja_budget.h and router/text/jinja_builtins.h.
"""
import pathlib
import sys

ROOT = pathlib.Path(sys.argv[1])
GUARD = "millrace::JinjaBudget::Nesting millrace_nesting;"


def edit(name, *changes):
    path = ROOT / "jinja" / name
    text = path.read_text()
    for place, before, after in changes:
        if text.count(place) != 1:
            sys.exit(f"{name}: {text.count(place)} places like: {place}")
        text = text.replace(place, before + place + after)
    path.write_text(text)


def substitute(name, *changes):
    path = ROOT / "jinja" / name
    text = path.read_text()
    for old, new, count in changes:
        if text.count(old) != count:
            sys.exit(f"{name}: {text.count(old)} places, not {count}, like: {old}")
        text = text.replace(old, new)
    path.write_text(text)


# Converting a float beyond int64 is undefined; such a value keeps 0 as its integer, as infinities do.
substitute("value.h", ("val_int = std::isfinite(v) ? static_cast<int64_t>(v) : 0;",
                       "val_int = v > -9.2e18 && v < 9.2e18 ? static_cast<int64_t>(v) : 0;", 1))

# Bytes: every string and every value is charged to the render that makes it.
edit("string.h",
     ('#include "utils.h"', '#include "router/text/jinja_budget.h"\n', ""),
     ("string(const std::string & v, bool user_input = false) {", "", " millrace::JinjaBudget::Charge(v.size());"))
edit("string.cpp", ("string & string::append(const string & other) {", "",
                    " millrace::JinjaBudget::Charge(other.length() + other.parts.size() * sizeof(string_part));"))

# Depth and steps of everything that walks values or nodes; destruction without recursion; provenance of printed lists.
edit("value.h",
     ("bool operator()(const std::pair<value, value> & lhs, const std::pair<value, value> & rhs) const {", "", GUARD))
substitute("value.h",
           ("struct value_equivalence {\n    bool operator()(const value & lhs, const value & rhs) const {",
            "struct value_equivalence {\n    bool operator()(const value & lhs, const value & rhs) const { " + GUARD, 1),
           ("    value_t() = default;", "    value_t() { millrace::JinjaBudget::Charge(sizeof(value_t)); }", 1),
           ("virtual ~value_t() = default;", "virtual ~value_t() { millrace::BuryJinjaValues(val_arr, val_obj); }", 1),
           ("virtual bool is_hashable() const override {\n        if",
            "virtual bool is_hashable() const override { " + GUARD + "\n        if", 2),
           ("return ss.str();\n    }\n    virtual bool as_bool() const override {\n        return !",
            "return millrace::MarkedLike(*this, ss.str());\n    }\n    virtual bool as_bool() const override {\n        return !", 2),
           ("std::string out = std::to_string(val_flt);", "std::string out = millrace::PythonFloat(val_flt); return out;", 1),
           ('#include "string.h"\n', '#include "string.h"\n#include "router/text/jinja_values.h"\n'
            '#include "router/text/python_float.h"\n', 1))
edit("runtime.h",
     ("static void gather_string_parts_recursive(const value & val, value_string & parts) {", "", GUARD),
     ("context(const context & parent) : context() {", "", GUARD))
edit("runtime.cpp", ("value statement::execute(context & ctx) const {", "", GUARD))
substitute("runtime.cpp",
           ("auto builtins = global_builtins();", "const auto & builtins = global_builtins();", 1),
           ("auto builtins = input->get_builtins();", "const auto & builtins = input->get_builtins();", 1),
           ("auto str = object->as_string().str();\n", "return millrace::StringIndex(object, index);\n" +
            "                auto str = object->as_string().str();\n", 1),
           ('#include "utils.h"\n', '#include "utils.h"\n#include "router/text/jinja_builtins.h"\n', 1))
edit("value.cpp",
     ('#include "unicode.h"', "", '\n#include "router/text/jinja_builtins.h"'),
     ("static value tojson(const func_args & args) {", "",
      " return millrace::ToJson(args); }\n[[maybe_unused]] static value original_tojson(const func_args & args) {"),
     ("bool value_compare(const value & a, const value & b, value_compare_op op) {", "", GUARD),
     ("std::string value_to_string_repr(const value & val) {", "", GUARD),
     ("static void value_to_json_internal(std::ostringstream & oss, const value & val, int curr_lvl, int indent, "
      "const std::string_view item_sep, const std::string_view key_sep) {", "", GUARD))
# The first entry of a map's initialiser wins: ours stand before the engine's own.
substitute("value.cpp",
           ('        {"raise_exception", [](', '        MILLRACE_JINJA_GLOBALS\n        {"raise_exception", [](', 1),
           ('        {"default", default_value},\n        {"upper"',
            '        MILLRACE_JINJA_STRING_METHODS\n        {"default", default_value},\n        {"upper"', 1),
           ('        {"default", default_value},\n        {"list", [](',
            '        {"join", millrace::Join},\n        {"default", default_value},\n        {"list", [](', 1),
           ("std::sort(", "std::stable_sort(", 2))
# Recursion of the parser.
edit("parser.cpp",
     ("    statement_ptr parse_any() {", "", GUARD),
     ("    statement_ptr parse_if_statement(size_t start_pos) {", "", GUARD),
     ("    statement_ptr parse_if_expression() {", "", GUARD),
     ("    statement_ptr parse_logical_negation_expression() {", "", GUARD),
     ("    statement_ptr parse_unary_expression() {", "", GUARD),
     ("    statement_ptr parse_call_expression(statement_ptr callee) {", "", GUARD))
