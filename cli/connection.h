// The way to a router. Safe for any number of threads; lives as long as the command.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cli/arguments.h"
#include "cli/command.h"
#include "grpcpp/channel.h"

namespace millrace {

// Where a router is, and who we are to it: the flags of every command that talks to one.
struct Endpoint {
  std::string router = std::string(kDefaultRouter);
  std::string ca;                // PEM file; given: TLS
  std::string certificate, key;  // PEM files, both or neither
  std::string server_name;       // in the router's certificate; empty: its host
  std::string token_file;        // one token
};

void AddEndpoint(Arguments& arguments, Endpoint* endpoint);
// Looks at the values alone.
absl::Status CheckEndpoint(const Endpoint& endpoint);

// Waits at most ten seconds for the connection; "cannot reach HOST:PORT: why" otherwise. A token goes to this machine
// alone without TLS.
absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const Endpoint& endpoint);

}  // namespace millrace
