// HOST:PORT as flags spell it; an IPv6 host stands in brackets. A value; any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace millrace {

struct Address {
  std::string host;  // without brackets
  int port = 0;      // 0 … 65535; 0: any free one, for listening

  std::string ToString() const;
  bool IsLoopback() const;  // 127.0.0.0/8, ::1 or localhost
};

absl::StatusOr<Address> ParseAddress(absl::string_view text);

}  // namespace millrace
