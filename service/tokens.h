// Bearer tokens of a mounted file that may be replaced while the process runs, so that tokens rotate: the new one is
// added, the clients change over, the old one is removed. Any thread. Tokens are never logged. A look-up compares with
// every token, in a time that does not depend on what they are: at most 1,024 of 256 bytes each.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/security/auth_metadata_processor.h"
#include "service/watched_files.h"

namespace millrace {

class Tokens {
 public:
  static constexpr size_t kMaxTokens = 1024, kLeastBytes = 16, kMaxBytes = 256, kMaxTenantBytes = 128;

  // INVALID_ARGUMENT naming the file and the line. A file that gets bad later changes nothing, and that is logged.
  static absl::StatusOr<std::unique_ptr<Tokens>> Open(const std::string& path);
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  // The tenant that the token speaks for, empty where its line names none; nothing if there is no such token.
  std::optional<std::string> Find(absl::string_view token) const;

 private:
  struct Token {
    std::string text, tenant;
  };
  explicit Tokens(std::string path) : path_(std::move(path)) {}

  // A line is TOKEN or TOKEN TENANT; empty lines and those that start with # say nothing.
  static absl::StatusOr<std::vector<Token>> Parse(absl::string_view text);
  absl::Status Take(const WatchedFiles::Contents& contents);

  const std::string path_;
  mutable absl::Mutex mutex_;
  std::vector<Token> tokens_ ABSL_GUARDED_BY(mutex_);
  std::optional<WatchedFiles> watch_;  // last: its thread uses the above
};

// What `authorization: Bearer …` carries; nothing if there is no such entry, or several.
std::optional<absl::string_view> BearerToken(const grpc::AuthMetadataProcessor::InputMetadata& metadata);

}  // namespace millrace
