#include "worker/api/execute_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kMaxRouterIdBytes = 128;

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

ExecuteStream* ExecuteStream::Start(ExecuteService& service) {
  const std::shared_ptr<ExecuteStream> stream(new ExecuteStream(service));
  stream->self_ = stream;
  stream->ReadNext();
  return stream.get();
}

void ExecuteStream::ReadNext() {
  absl::MutexLock lock(&mutex_);
  if (!ended_) StartRead(&incoming_);
}

void ExecuteStream::OnReadDone(bool ok) {
  if (!ok) {  // the router has closed its side, or is gone
    End(grpc::Status::OK);
    return;
  }
  if (const grpc::Status status = OnMessage(); !status.ok()) {
    End(status);
    return;
  }
  ReadNext();
}

grpc::Status ExecuteStream::OnMessage() {
  using worker::v1::RouterMessage;
  switch (incoming_.message_case()) {
    case RouterMessage::kHello:
      return OnHello(incoming_.hello());
    case RouterMessage::kEdit:
      if (!greeted_) return {grpc::StatusCode::INVALID_ARGUMENT, "message 0 is an edit; the first one is a hello"};
      metrics_.OnEdit(incoming_.edit());
      spans_.OnEdit(incoming_.edit());
      return ToGrpc(service_.engine().Post(this, std::move(*incoming_.mutable_edit())));
    case RouterMessage::MESSAGE_NOT_SET:
      break;
  }
  return {grpc::StatusCode::INVALID_ARGUMENT, "message is empty; the limits are hello and edit"};
}

grpc::Status ExecuteStream::OnHello(const worker::v1::Hello& hello) {
  if (greeted_) return {grpc::StatusCode::INVALID_ARGUMENT, "hello comes twice; the limit is once, first"};
  if (hello.router_id().size() > kMaxRouterIdBytes) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            absl::StrCat("hello.router_id has ", hello.router_id().size(), " bytes; the limit is ", kMaxRouterIdBytes)};
  }
  if (hello.epoch() == 0) return {grpc::StatusCode::INVALID_ARGUMENT, "hello.epoch is 0; the limit is at least 1"};
  greeted_ = true;
  grpc::Status status = service_.Begin(self_, hello.epoch());
  bool ended;
  {
    absl::MutexLock lock(&mutex_);
    ended = ended_;
  }
  if (ended) {  // while it was taking over
    service_.engine().Detach(this);
    service_.Forget(this);
  }
  return status;
}

void ExecuteStream::OnBegin(std::vector<worker::v1::CachedBlocks> cached) {
  for (worker::v1::CachedBlocks& blocks : cached) {
    worker::v1::WorkerMessage message;
    message.mutable_cached()->Swap(&blocks);
    Send(std::move(message));
  }
  worker::v1::WorkerMessage message;
  *message.mutable_ready() = service_.ready();
  Send(std::move(message));
  absl::MutexLock lock(&mutex_);
  begun_ = true;
}

void ExecuteStream::OnReport(worker::v1::StepReport report) {
  metrics_.OnReport(report);
  spans_.OnReport(report);
  worker::v1::WorkerMessage message;
  message.mutable_report()->Swap(&report);
  Send(std::move(message));
}

void ExecuteStream::SendGoodbye(uint32_t budget_ms) {
  {
    absl::MutexLock lock(&mutex_);
    if (!begun_) return;
  }
  worker::v1::WorkerMessage message;
  message.mutable_goodbye()->set_budget_ms(budget_ms);
  Send(std::move(message));
}

// One that cannot be written now would not be heard either.
void ExecuteStream::Pulse() {
  absl::MutexLock lock(&mutex_);
  if (std::exchange(sent_since_pulse_, false) || !begun_ || ended_ || !Written()) return;
  worker::v1::WorkerMessage message;
  message.mutable_report()->set_step(last_step_);
  message.mutable_report()->set_applied_edit(last_applied_edit_);
  Queue(std::move(message));
}

void ExecuteStream::OnError(absl::Status status) { End(ToGrpc(status)); }

void ExecuteStream::Send(worker::v1::WorkerMessage message) {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_ || Queue(std::move(message))) return;
  }
  End({grpc::StatusCode::RESOURCE_EXHAUSTED, absl::StrCat("the router leaves ", kMaxPendingReports, " reports or ",
                                                          kMaxPendingBytes, " bytes unread; that is the limit")});
}

bool ExecuteStream::Queue(worker::v1::WorkerMessage message) {
  const size_t bytes = message.ByteSizeLong();
  if (pending_.size() >= kMaxPendingReports || pending_bytes_ + bytes > kMaxPendingBytes) return false;
  if (message.has_report()) {
    last_step_ = message.report().step();
    last_applied_edit_ = message.report().applied_edit();
  }
  sent_since_pulse_ = true;
  pending_.push_back(std::move(message));
  pending_bytes_ += bytes;
  WriteNext();
  return true;
}

void ExecuteStream::WriteNext() {
  if (writing_ || pending_.empty()) return;
  outgoing_ = std::move(pending_.front());
  pending_.pop_front();
  pending_bytes_ -= outgoing_.ByteSizeLong();
  writing_ = true;
  StartWrite(&outgoing_);
}

void ExecuteStream::OnWriteDone(bool ok) {
  if (!ok) {
    End(grpc::Status::CANCELLED);
    return;
  }
  bool last = false;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ended_) WriteNext();
    last = ends_when_written_ && Written();
  }
  if (last) End(grpc::Status::OK);
}

void ExecuteStream::OnCancel() { End(grpc::Status::CANCELLED); }

void ExecuteStream::End(const grpc::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    ended_ = true;
    pending_.clear();
    Finish(status);
  }
  service_.engine().Detach(this);
  service_.Forget(this);
}

void ExecuteStream::EndAfterWrites() {
  {
    absl::MutexLock lock(&mutex_);
    ends_when_written_ = true;
    if (!Written()) return;
  }
  End(grpc::Status::OK);
}

// The callers of End outlive this: a reaction ends before OnDone, the service and the engine hold their own share.
void ExecuteStream::OnDone() { self_.reset(); }

}  // namespace millrace
