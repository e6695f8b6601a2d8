// The processes of `millrace up`: workers first, then the router that knows their addresses. One main-thread loop that
// waits for signals, pipes and timers together. Lives as long as the command.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/command.h"
#include "cli/member.h"
#include "grpcpp/channel.h"

namespace millrace {

struct ClusterOptions {
  std::string host;  // as in HOST:PORT
  std::string log_dir;
  std::vector<std::string> worker_argv;  // without its address
  std::vector<std::string> router_argv;  // without the workers' addresses
  size_t num_workers = 1;
  bool on_gpus = false;  // worker i on GPU i
};

class Cluster {
 public:
  // Blocks SIGINT, SIGTERM and SIGCHLD in this thread and those that come after it.
  Cluster(ClusterOptions options, Terminal terminal);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  // Until a signal (OK) or a failure that ends the cluster. Nothing runs afterwards.
  absl::Status Run();

 private:
  absl::Status Serve();
  void Shutdown();
  // Waits for something to happen, at most until `until`. True when a signal asks us to end.
  bool Wait(absl::Time until);
  absl::Status AfterEnd(Member& member);
  absl::Status StartRouterWhenWorkersAre();
  absl::Status AnnounceWhenReady();
  void StopMembers(size_t first, size_t count, int signal, absl::Duration patience);

  const ClusterOptions options_;
  const Terminal terminal_;
  int signals_;                                   // signalfd
  std::vector<std::unique_ptr<Member>> members_;  // the workers, then the router
  std::shared_ptr<grpc::Channel> channel_;        // to the router, while its workers are awaited
  std::string waiting_for_;                       // last said on stderr
  absl::Time give_up_at_ = absl::InfiniteFuture();
  bool announced_ = false;
};

}  // namespace millrace
