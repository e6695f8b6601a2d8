#include "service/server_limits.h"

#include <limits>

namespace millrace {
namespace {

constexpr int kMaxMetadataBytes = 16 << 10;
constexpr int kLeastPingIntervalMs = 9'000;  // peers ping every 10 s, and clocks differ
constexpr int kKeepaliveTimeoutMs = 10'000;

}  // namespace

void SetServerLimits(const ServerLimits& limits, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(limits.max_message_bytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.max_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  // A peer may ping every 10 s, also without a call; one that does so more often is sent away.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kLeastPingIntervalMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, limits.keepalive_ms);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Connections do not age: a stream is as long as its answer, and ours end at a drain.
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, std::numeric_limits<int>::max());
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // two processes never share an address
}

}  // namespace millrace
