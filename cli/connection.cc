#include "cli/connection.h"

#include <chrono>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "millrace/v1/inference.grpc.pb.h"
#include "service/watched_files.h"

namespace millrace {
namespace {

class TokenPlugin final : public grpc::MetadataCredentialsPlugin {
 public:
  explicit TokenPlugin(std::string token) : value_("Bearer " + std::move(token)) {}
  bool IsBlocking() const override { return false; }
  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<std::string, std::string>* metadata) override {
    metadata->emplace("authorization", value_);
    return grpc::Status::OK;
  }

 private:
  const std::string value_;
};

// Empty for no path.
absl::StatusOr<std::string> Read(const std::string& path) {
  if (path.empty()) return "";
  auto contents = WatchedFiles::Read({path});
  if (!contents.ok()) return contents.status();
  return std::move(contents->front());
}

// The first token of a file as routers take them, of which a file with one token is the least.
std::string FirstToken(absl::string_view text) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (!words.empty() && words[0][0] != '#') return std::string(words[0]);
  }
  return "";
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const Endpoint& endpoint) {
  const absl::StatusOr<std::string> ca = Read(endpoint.ca), certificate = Read(endpoint.certificate),
                                    key = Read(endpoint.key), token = Read(endpoint.token_file);
  for (const auto* text : {&ca, &certificate, &key, &token}) {
    if (!text->ok()) return text->status();
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  if (!ca->empty()) {
    credentials = grpc::SslCredentials({*ca, *key, *certificate});
  } else {
    // The local kind refuses to talk to another machine.
    credentials = endpoint.token_file.empty() ? grpc::InsecureChannelCredentials()
                                              : grpc::experimental::LocalCredentials(LOCAL_TCP);
  }
  if (endpoint.token_file.empty()) return credentials;
  return grpc::CompositeChannelCredentials(
      credentials,
      grpc::experimental::MetadataCredentialsFromPlugin(std::make_unique<TokenPlugin>(FirstToken(*token)),
                                                        ca->empty() ? GRPC_SECURITY_NONE : GRPC_PRIVACY_AND_INTEGRITY));
}

}  // namespace

void AddEndpoint(Arguments& arguments, Endpoint* endpoint) {
  arguments.Add("router", &endpoint->router, "HOST:PORT of the router");
  arguments.Add("ca", &endpoint->ca, "PEM file: who must have signed the router's certificate; given: TLS");
  arguments.Add("server_name", &endpoint->server_name,
                "the name in the router's certificate, where it is not --router's host");
  arguments.Add("certificate", &endpoint->certificate, "PEM file: what we show to the router, where it wants that");
  arguments.Add("key", &endpoint->key, "PEM file: its private key");
  arguments.Add("token_file", &endpoint->token_file,
                "file with the bearer token that the router wants; of several lines, the first");
}

absl::Status CheckEndpoint(const Endpoint& endpoint) {
  if (absl::Status status = CheckAddress("router", endpoint.router); !status.ok()) return status;
  if (endpoint.certificate.empty() != endpoint.key.empty()) {
    return absl::InvalidArgumentError("--certificate and --key go together");
  }
  if (!endpoint.certificate.empty() && endpoint.ca.empty()) {
    return absl::InvalidArgumentError("--certificate needs --ca: without TLS nobody sees it");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const Endpoint& endpoint) {
  const auto credentials = MakeCredentials(endpoint);
  if (!credentials.ok()) return credentials.status();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(std::numeric_limits<int>::max());  // prompt_logprobs of a long prompt
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (!endpoint.server_name.empty()) arguments.SetSslTargetNameOverride(endpoint.server_name);
  // Each refusal doubles the wait before the next attempt: bounded, so that a router that comes up is found at once.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  auto channel = grpc::CreateCustomChannel(endpoint.router, *credentials, arguments);
  // A cheap call: it fails with the reason, which waiting for the channel's state would not tell.
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::ListModelsResponse models;
  const grpc::Status status = v1::InferenceService::NewStub(channel)->ListModels(&context, {}, &models);
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::UnavailableError(absl::StrCat("cannot reach ", endpoint.router, ": ", status.error_message()));
  }
  return channel;
}

}  // namespace millrace
