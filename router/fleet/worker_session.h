// One Execute stream to one worker, over a connection of its own, from Hello to the end. gRPC's threads call the
// listener, messages one at a time; Write and End may come from any thread until OnEnd, after which gRPC has let go of
// the session. It must not be deleted on a gRPC thread: the process's last channel joins those threads.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "millrace/worker/v1/worker.grpc.pb.h"

namespace millrace {

class WorkerSession final : public grpc::ClientBidiReactor<worker::v1::RouterMessage, worker::v1::WorkerMessage> {
 public:
  class Listener {
   public:
    // The listener ends by calling ReadNext, once it wants the next message.
    virtual void OnMessage(WorkerSession* session, worker::v1::WorkerMessage& message) = 0;
    virtual void OnWritable(WorkerSession* session) = 0;  // an edit has been written; ClaimWrite may succeed
    virtual void OnEnd(WorkerSession* session, const grpc::Status& status) = 0;

   protected:
    ~Listener() = default;
  };

  // `member` is the listener's own name for the other end.
  WorkerSession(Listener* listener, size_t member, const std::string& address,
                const std::shared_ptr<grpc::ChannelCredentials>& credentials, worker::v1::Hello hello);

  void Start();
  void End();  // OnEnd follows
  void ReadNext() { StartRead(&in_); }

  // Edits are pulled, one at a time: whoever claims the write must write, promptly, and the session lives until then.
  bool ClaimWrite();
  void Write(worker::v1::Edit edit);

  size_t member() const { return member_; }

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  Listener* const listener_;
  const size_t member_;
  const std::unique_ptr<worker::v1::WorkerService::Stub> stub_;
  grpc::ClientContext context_;
  worker::v1::RouterMessage out_;  // of the write in flight
  worker::v1::WorkerMessage in_;

  absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = true;  // from the start: Hello
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // nothing can be written any more
  bool read_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace millrace
