// JSON from a request to values of the template engine, every string and key marked as input. Integers of any size keep
// their digits, as in Python.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "jinja/value.h"

namespace millrace {

// `drop_null_members`: of objects that are elements of the outermost array, members that are null are left out.
absl::StatusOr<jinja::value> JinjaFromJson(std::string_view text, const std::string& what, bool drop_null_members);

}  // namespace millrace
