// The way to a router. Safe for any number of threads; lives as long as the command.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"

namespace millrace {

// Waits at most ten seconds for the connection; "cannot reach HOST:PORT: why" otherwise.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& address);

}  // namespace millrace
