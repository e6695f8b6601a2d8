// What a certificate file says to those who run us. Stateless; the one place that reads certificates itself, which gRPC
// otherwise does.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace millrace {

struct Certificate {
  absl::Time not_after;
  std::string names;  // subject alternative names, DNS and URI, separated by commas
};

// Of the first certificate in `pem`. INVALID_ARGUMENT if there is none or `key` is not its private key.
absl::StatusOr<Certificate> ReadCertificate(absl::string_view pem, absl::string_view key);
// INVALID_ARGUMENT unless `pem` begins with a certificate.
absl::Status CheckAuthority(absl::string_view pem);

}  // namespace millrace
