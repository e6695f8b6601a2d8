// A VirtualWorker behind gRPC in real time: its steps take as long as it says, and cost no processor time, so a few
// cores can hold a fleet. Remembers what became of each admission. One stream at a time; any thread may ask.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "millrace/worker/v1/worker.grpc.pb.h"
#include "tests/cluster/sim/virtual_worker.h"

namespace millrace {

class PacedWorker final : public worker::v1::WorkerService::Service {
 public:
  struct Admission {
    uint64_t seed;
    Time at;               // of the steady clock
    bool sampled = false;  // it got a token before it went
  };

  // `ends`: by seed, the length at which a sequence samples its stop token; outlives this.
  PacedWorker(worker::v1::Ready ready, const std::vector<uint32_t>* ends);
  ~PacedWorker() override;

  const std::string& address() const { return address_; }
  std::vector<Admission> admissions();

 private:
  using Stream = grpc::ServerReaderWriter<worker::v1::WorkerMessage, worker::v1::RouterMessage>;

  grpc::Status Execute(grpc::ServerContext* context, Stream* stream) override;
  void Play(Stream* stream);
  bool TakeEdits(VirtualWorker* worker) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // false: none
  void Sampled(const worker::v1::StepReport& report) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Changed() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !reading_ || !edits_.empty(); }
  bool Left() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !reading_; }

  const worker::v1::Ready ready_;
  const std::vector<uint32_t>* const ends_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;

  absl::Mutex mutex_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ServerContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the open stream
  std::deque<worker::v1::Edit> edits_ ABSL_GUARDED_BY(mutex_);
  std::vector<Admission> admissions_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint32_t, size_t> by_slot_ ABSL_GUARDED_BY(mutex_);  // the latest admission
};

Time SteadyNow();

}  // namespace millrace
