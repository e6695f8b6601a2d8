// What a server of ours allows its peers, set in one place so that both processes agree on what they share: pings,
// metadata, ports. Start-up only.
#pragma once

#include "grpcpp/server_builder.h"

namespace millrace {

struct ServerLimits {
  int max_message_bytes = 0;  // received
  int max_streams = 0;        // of one connection; further ones wait at the client
  int keepalive_ms = 0;       // between pings of ours, so that a peer that is gone without a word is noticed
};

void SetServerLimits(const ServerLimits& limits, grpc::ServerBuilder* builder);

}  // namespace millrace
