// Requests and responses as bytes. The services take raw bytes, because gRPC's own parsing answers a broken message
// with an empty UNIMPLEMENTED; here the client learns what was wrong. Stateless; any thread.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"

namespace millrace {

// INVALID_ARGUMENT: not a message of this type, or a string field (named) that is not UTF-8.
absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message);

grpc::Status ToGrpcStatus(const absl::Status& status);

// Parses, handles and answers a call of one request and one response.
template <class Request, class Response>
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const grpc::ByteBuffer& request_bytes,
                                 grpc::ByteBuffer* response_bytes,
                                 absl::FunctionRef<absl::Status(const Request&, Response*)> handle) {
  Request request;
  Response response;
  absl::Status status = ParseMessage(request_bytes, &request);
  if (status.ok()) status = handle(request, &response);
  if (status.ok()) *response_bytes = SerializeMessage(response);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace millrace
