#include "cli/cluster.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "millrace/v1/admin.grpc.pb.h"

namespace millrace {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(5);         // between SIGTERM and SIGKILL
constexpr absl::Duration kRouterPatience = absl::Seconds(10);  // it lets open calls go on for 5 s
constexpr absl::Duration kJoining = absl::Seconds(120);        // from the router's start until it has every worker
constexpr absl::Duration kPollPeriod = absl::Milliseconds(100);

std::string PortOf(const std::string& address) { return address.substr(address.rfind(':') + 1); }

}  // namespace

Cluster::Cluster(ClusterOptions options, Terminal terminal) : options_(std::move(options)), terminal_(terminal) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);  // a reader of our output that goes away does not end the cluster
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

Cluster::~Cluster() { close(signals_); }

absl::Status Cluster::Run() {
  const absl::Status status = Serve();
  Shutdown();
  return status;
}

absl::Status Cluster::Serve() {
  for (size_t i = 0; i < options_.num_workers; ++i) {
    std::vector<std::string> argv = options_.worker_argv;
    argv.push_back("--listen=127.0.0.1:0");
    if (options_.on_gpus) argv.push_back(absl::StrCat("--device=cuda:", i));
    argv.push_back(absl::StrCat("--worker_id=worker-", i));
    members_.push_back(
        std::make_unique<Member>(absl::StrCat("worker-", i), std::move(argv), options_.log_dir, terminal_.err));
    if (absl::Status status = members_.back()->Start(); !status.ok()) return status;
  }
  while (true) {
    absl::Time wake = give_up_at_;
    if (channel_ != nullptr) wake = absl::Now() + kPollPeriod;
    for (const auto& member : members_) wake = std::min(wake, member->restart_at());
    if (Wait(wake)) return absl::OkStatus();
    for (size_t i = 0; i < members_.size(); ++i) {
      Member& member = *members_[i];
      if (member.Poll(absl::Now())) {
        if (absl::Status status = AfterEnd(member); !status.ok()) return status;
      } else if (!member.running() && member.restart_at() <= absl::Now()) {
        if (absl::Status status = member.Restart(); !status.ok()) return status;
      }
    }
    if (absl::Status status = StartRouterWhenWorkersAre(); !status.ok()) return status;
    if (absl::Status status = AnnounceWhenReady(); !status.ok()) return status;
  }
}

bool Cluster::Wait(absl::Time until) {
  std::vector<pollfd> fds = {{signals_, POLLIN, 0}};
  for (const auto& member : members_) {
    if (!member->running()) continue;
    fds.push_back({member->child()->out().fd(), POLLIN, 0});  // a closed pipe is -1, which poll ignores
    fds.push_back({member->child()->err().fd(), POLLIN, 0});
  }
  const absl::Duration left = std::clamp(until - absl::Now(), absl::ZeroDuration(), absl::Hours(1));
  poll(fds.data(), fds.size(), static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1)))));
  bool ends = false;
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof(info)) == sizeof(info)) ends |= info.ssi_signo != SIGCHLD;
  return ends;
}

absl::Status Cluster::AfterEnd(Member& member) {
  const bool is_router = members_.size() > options_.num_workers && &member == members_.back().get();
  if (is_router || !member.ever_ready()) {
    return absl::UnavailableError(absl::StrCat(
        member.name(), member.ever_ready() ? " ended with " : " did not start: ", member.end(), member.LastWords()));
  }
  const absl::Duration wait = std::max(member.restart_at() - absl::Now(), absl::ZeroDuration());
  terminal_.err << "millrace: " << member.name() << " ended with " << member.end() << "; starting it again in "
                << absl::FormatDuration(absl::Ceil(wait, absl::Milliseconds(100))) << std::endl;
  return absl::OkStatus();
}

absl::Status Cluster::StartRouterWhenWorkersAre() {
  const bool started = members_.size() > options_.num_workers;
  if (started || !std::all_of(members_.begin(), members_.end(), [](const auto& m) { return m->ever_ready(); })) {
    return absl::OkStatus();
  }
  std::vector<std::string> argv = options_.router_argv;
  argv.push_back(absl::StrCat("--workers=", absl::StrJoin(members_, ",", [](std::string* out, const auto& member) {
                                *out += member->address();
                              })));
  members_.push_back(std::make_unique<Member>("router", std::move(argv), options_.log_dir, terminal_.err));
  give_up_at_ = absl::Now() + kJoining;
  return members_.back()->Start();
}

absl::Status Cluster::AnnounceWhenReady() {
  const bool router_ready = members_.size() > options_.num_workers && members_.back()->ready();
  if (announced_ || !router_ready) {
    if (absl::Now() < give_up_at_) return absl::OkStatus();
    return absl::DeadlineExceededError("the router did not get ready");
  }
  const std::string port = PortOf(members_.back()->address());
  if (channel_ == nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    channel_ = grpc::CreateCustomChannel(members_.back()->address(), grpc::InsecureChannelCredentials(), arguments);
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  v1::GetStatusResponse response;
  const grpc::Status call = v1::AdminService::NewStub(channel_)->GetStatus(&context, {}, &response);
  size_t num_ready = 0;
  std::string why = call.ok() ? "" : call.error_message();
  for (const v1::WorkerStatus& worker : response.workers()) {
    num_ready += worker.state() == v1::WorkerStatus::STATE_READY;
    if (!worker.last_error().empty()) why = absl::StrCat(worker.address(), ": ", worker.last_error());
  }
  if (num_ready >= options_.num_workers) {
    terminal_.out << "ready " << options_.host << ":" << port << std::endl;
    announced_ = true;
    give_up_at_ = absl::InfiniteFuture();
    channel_.reset();
    return absl::OkStatus();
  }
  const std::string waiting =
      absl::StrCat(num_ready, " of ", options_.num_workers, " workers ready", why.empty() ? "" : "; ", why);
  if (waiting != waiting_for_ && !why.empty()) terminal_.err << "millrace: " << waiting << std::endl;
  waiting_for_ = waiting;
  if (absl::Now() < give_up_at_) return absl::OkStatus();
  return absl::DeadlineExceededError(waiting);
}

void Cluster::StopMembers(size_t first, size_t count, int signal, absl::Duration patience) {
  const absl::Time until = absl::Now() + patience;
  for (size_t i = first; i < first + count; ++i) {
    if (members_[i]->running()) members_[i]->child()->Signal(signal);
  }
  bool hurry = false;  // a second signal ends the patience
  while (!hurry && absl::Now() < until) {
    for (const auto& member : members_) member->Poll(absl::Now());
    const auto begin = members_.begin() + static_cast<ptrdiff_t>(first);
    if (std::none_of(begin, begin + static_cast<ptrdiff_t>(count), [](const auto& m) { return m->running(); })) return;
    hurry = Wait(until);
  }
}

void Cluster::Shutdown() {
  const size_t workers = std::min(members_.size(), options_.num_workers);
  StopMembers(workers, members_.size() - workers, SIGTERM, kRouterPatience);  // the router first: it tells its clients
  StopMembers(0, workers, SIGTERM, kPatience);
  StopMembers(0, members_.size(), SIGKILL, kPatience);
  members_.clear();
}

}  // namespace millrace
