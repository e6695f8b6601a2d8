#include "router/fleet/worker_session.h"

#include <utility>

namespace millrace {
namespace {

constexpr int kMaxReportBytes = 64 << 20;  // 1,024 rows with 21 log-probabilities each, many times over
constexpr int kKeepaliveMs = 10'000;
constexpr int kKeepaliveTimeoutMs = 5'000;

std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                       const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxReportBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A connection of its own, so that gRPC's back-off of an earlier one does not add to ours.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

}  // namespace

WorkerSession::WorkerSession(Listener* listener, size_t member, const std::string& address,
                             const std::shared_ptr<grpc::ChannelCredentials>& credentials, worker::v1::Hello hello)
    : listener_(listener), member_(member), stub_(worker::v1::WorkerService::NewStub(Connect(address, credentials))) {
  *out_.mutable_hello() = std::move(hello);
}

// The hold stands for writes, which come from outside any reaction: it falls once reading has ended and no write is
// claimed.
void WorkerSession::Start() {
  stub_->async()->Execute(&context_, this);
  AddHold();
  StartWrite(&out_);
  StartRead(&in_);
  StartCall();
}

void WorkerSession::End() { context_.TryCancel(); }

bool WorkerSession::ClaimWrite() {
  absl::MutexLock lock(&mutex_);
  if (writing_ || broken_ || read_ended_) return false;
  writing_ = true;
  return true;
}

void WorkerSession::Write(worker::v1::Edit edit) {
  *out_.mutable_edit() = std::move(edit);
  StartWrite(&out_);
}

void WorkerSession::OnReadDone(bool ok) {
  if (ok) {
    listener_->OnMessage(this, in_);
    return;
  }
  bool idle;
  {
    absl::MutexLock lock(&mutex_);
    read_ended_ = true;
    idle = !writing_;
  }
  if (idle) RemoveHold();
}

void WorkerSession::OnWriteDone(bool ok) {
  bool ended;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) broken_ = true;
    ended = read_ended_;
  }
  if (ended) {
    RemoveHold();
  } else if (ok) {
    listener_->OnWritable(this);
  }
}

void WorkerSession::OnDone(const grpc::Status& status) { listener_->OnEnd(this, status); }

}  // namespace millrace
