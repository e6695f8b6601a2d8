// A probe and a watcher of grpc.health.v1, with a deadline of a minute each.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace millrace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class HealthClient {
 public:
  explicit HealthClient(const std::string& address)
      : stub_(grpc::health::v1::Health::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

  // SERVICE_UNKNOWN: NOT_FOUND.
  HealthCheckResponse::ServingStatus Check(const std::string& service) {
    grpc::ClientContext context;
    HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    const grpc::Status status = stub_->Check(&context, request, &response);
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) return HealthCheckResponse::SERVICE_UNKNOWN;
    return status.ok() ? response.status() : HealthCheckResponse::UNKNOWN;
  }

  class Watch {
   public:
    Watch(grpc::health::v1::Health::Stub* stub, const std::string& service) {
      HealthCheckRequest request;
      request.set_service(service);
      context_.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
      reader_ = stub->Watch(&context_, request);
    }
    ~Watch() {
      context_.TryCancel();
      HealthCheckResponse rest;
      while (reader_->Read(&rest)) {
      }
      (void)reader_->Finish();
    }
    // UNKNOWN: the stream has ended.
    HealthCheckResponse::ServingStatus Next() {
      HealthCheckResponse response;
      return reader_->Read(&response) ? response.status() : HealthCheckResponse::UNKNOWN;
    }

   private:
    grpc::ClientContext context_;
    std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> reader_;
  };
  std::unique_ptr<Watch> StartWatch(const std::string& service) {
    return std::make_unique<Watch>(stub_.get(), service);
  }

 private:
  std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
};

}  // namespace millrace
