#include "tests/cluster/sim/paced_worker.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace millrace {

Time SteadyNow() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

PacedWorker::PacedWorker(worker::v1::Ready ready, const std::vector<uint32_t>* ends)
    : ready_(std::move(ready)), ends_(ends) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  builder.SetMaxReceiveMessageSize(-1);
  server_ = builder.BuildAndStart();
  address_ = absl::StrCat("127.0.0.1:", port);
}

PacedWorker::~PacedWorker() {
  {
    absl::MutexLock lock(&mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }
  server_->Shutdown(std::chrono::system_clock::now());
}

std::vector<PacedWorker::Admission> PacedWorker::admissions() {
  absl::MutexLock lock(&mutex_);
  return admissions_;
}

grpc::Status PacedWorker::Execute(grpc::ServerContext* context, Stream* stream) {
  worker::v1::RouterMessage hello;
  if (!stream->Read(&hello) || !hello.has_hello()) return {grpc::StatusCode::INVALID_ARGUMENT, "expected a hello"};
  {
    absl::MutexLock lock(&mutex_);
    if (context_ != nullptr) return {grpc::StatusCode::FAILED_PRECONDITION, "another stream is open"};
    context_ = context;
    reading_ = true;
    edits_.clear();
    by_slot_.clear();
  }
  worker::v1::WorkerMessage first;
  *first.mutable_ready() = ready_;
  stream->Write(first);
  std::thread reader([&] {
    worker::v1::RouterMessage message;
    while (stream->Read(&message)) {
      absl::MutexLock lock(&mutex_);
      edits_.push_back(std::move(*message.mutable_edit()));
    }
    absl::MutexLock lock(&mutex_);
    reading_ = false;
  });
  Play(stream);
  context->TryCancel();
  reader.join();
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
  return grpc::Status::OK;
}

bool PacedWorker::TakeEdits(VirtualWorker* worker) {
  const bool any = !edits_.empty();
  for (; !edits_.empty(); edits_.pop_front()) {
    worker->Apply(edits_.front());
    for (const worker::v1::Admit& admit : edits_.front().admit()) {
      by_slot_[admit.slot()] = admissions_.size();
      admissions_.push_back({admit.sampling().seed(), SteadyNow()});
    }
  }
  return any;
}

void PacedWorker::Sampled(const worker::v1::StepReport& report) {
  for (const worker::v1::Row& row : report.rows()) admissions_[by_slot_.at(row.slot())].sampled = true;
}

void PacedWorker::Play(Stream* stream) {
  VirtualWorker worker(ready_, ready_.step_cost(), ends_, {});
  absl::Time begun = absl::Now();  // the step
  while (true) {
    worker::v1::WorkerMessage message;
    {
      absl::MutexLock lock(&mutex_);
      bool tell = TakeEdits(&worker);
      Time duration = worker.Begin();
      if (duration == 0) {
        if (!tell)
          tell = !mutex_.AwaitWithTimeout(absl::Condition(this, &PacedWorker::Changed), absl::Milliseconds(200));
        if (!reading_) return;
        begun = absl::Now();
        if (!tell) continue;
        *message.mutable_report() = worker.Heartbeat();
      } else {
        begun += absl::Microseconds(duration);
        if (mutex_.AwaitWithDeadline(absl::Condition(this, &PacedWorker::Left), begun)) return;
        *message.mutable_report() = worker.End();
        Sampled(message.report());
      }
    }
    if (!stream->Write(message)) return;
  }
}

}  // namespace millrace
