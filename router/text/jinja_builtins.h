// Functions that replace the engine's own where those lose track of what came from the request, count bytes instead of
// characters, need quadratic time, or crash. Included by the patched engine and by nothing else.
#pragma once

#include "jinja/runtime.h"
#include "jinja/value.h"
#include "router/text/jinja_values.h"

namespace millrace {

// What a template's raise_exception throws; no std::exception, so that the message arrives as it was written.
struct TemplateRaised {
  std::string message;
};

jinja::value Raise(const jinja::func_args& args);
jinja::value StrftimeNow(const jinja::func_args& args);
jinja::value DivisibleBy(const jinja::func_args& args);
jinja::value ToJson(const jinja::func_args& args);
jinja::value Split(const jinja::func_args& args);
jinja::value SplitRight(const jinja::func_args& args);
jinja::value Replace(const jinja::func_args& args);
jinja::value Strip(const jinja::func_args& args);
jinja::value StripLeft(const jinja::func_args& args);
jinja::value StripRight(const jinja::func_args& args);
jinja::value Length(const jinja::func_args& args);
jinja::value Slice(const jinja::func_args& args);
jinja::value Indent(const jinja::func_args& args);
jinja::value Join(const jinja::func_args& args);
jinja::value StringIndex(const jinja::value& text, int64_t index);

}  // namespace millrace

#define MILLRACE_JINJA_GLOBALS                                                   \
  {"raise_exception", millrace::Raise}, {"strftime_now", millrace::StrftimeNow}, \
      {"test_is_divisibleby", millrace::DivisibleBy},
#define MILLRACE_JINJA_STRING_METHODS                                                                \
  {"split", millrace::Split}, {"rsplit", millrace::SplitRight}, {"replace", millrace::Replace},      \
      {"strip", millrace::Strip}, {"lstrip", millrace::StripLeft}, {"rstrip", millrace::StripRight}, \
      {"length", millrace::Length}, {"slice", millrace::Slice}, {"indent", millrace::Indent},
