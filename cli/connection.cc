#include "cli/connection.h"

#include <chrono>
#include <limits>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "millrace/v1/inference.grpc.pb.h"

namespace millrace {

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(std::numeric_limits<int>::max());  // prompt_logprobs of a long prompt
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Each refusal doubles the wait before the next attempt: bounded, so that a router that comes up is found at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  // A cheap call: it fails with the reason, which waiting for the channel's state would not tell.
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::ListModelsResponse models;
  const grpc::Status status = v1::InferenceService::NewStub(channel)->ListModels(&context, {}, &models);
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::UnavailableError(absl::StrCat("cannot reach ", address, ": ", status.error_message()));
  }
  return channel;
}

}  // namespace millrace
