// `millrace up`: validates, then runs a cluster in the foreground.
#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cli/cluster.h"
#include "cli/command.h"

namespace millrace {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string model, host = "127.0.0.1", log_dir, kv_memory, device = "cpu";
  int64_t port = 7400, workers = 1, threads = 0, max_slots = 0;
  double step_target_ms = 0;
  bool unencrypted = false;
};

void Describe(Options& options, Arguments& arguments) {
  arguments.Add("model", &options.model, "folder of the model (config.json, tokenizer.json, *.safetensors)");
  arguments.Add("host", &options.host, "address that the router listens on");
  arguments.Add("port", &options.port, 0, 65535, "port that the router listens on; 0: any");
  arguments.Add("unencrypted", &options.unencrypted, "listen in plaintext beyond this machine, without authentication");
  arguments.Add("workers", &options.workers, 1, 64, "worker processes");
  arguments.Add("device", &options.device, "cpu, or cuda: the n-th worker takes the n-th GPU");
  arguments.Add("threads", &options.threads, 0, 1024, "threads of a worker; 0: the cores divided among the workers");
  arguments.Add("kv_memory", &options.kv_memory, "KV cache of a worker, e.g. 512MiB (default: the worker's)");
  arguments.Add("max_slots", &options.max_slots, 0, 65535,
                "sequences that a worker runs at once; 0: the worker's default");
  arguments.Add("step_target_ms", &options.step_target_ms, 0, 10000, "longest step; 0: the worker's default");
  arguments.Add("log_dir", &options.log_dir, "folder for one log a process (default: all on stderr, prefixed)");
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
}

absl::Status CheckAddressIsFree(const Options& options) {
  const std::string& host = options.host;
  const int64_t port = options.port;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return absl::InvalidArgumentError(absl::StrCat("--host '", host, "': ", gai_strerror(error)));
  if (!options.unencrypted && !IsLoopback(found->ai_addr)) {
    freeaddrinfo(found);
    return absl::InvalidArgumentError(
        absl::StrCat("--host ", host, " is not this machine alone: that needs --unencrypted"));
  }
  // Without SO_REUSEPORT, unlike gRPC's own bind, which would share the port with another server of the same user.
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1) == 0;
  const int why = errno;
  close(fd);
  freeaddrinfo(found);
  if (bound) return absl::OkStatus();
  if (why == EADDRINUSE) return absl::UnavailableError(absl::StrCat("port ", port, " of ", host, " is taken"));
  return absl::UnavailableError(absl::StrCat("cannot listen on ", host, ":", port, ": ", std::strerror(why)));
}

bool IsMemorySize(absl::string_view text) {
  for (const char* unit : {"KiB", "MiB", "GiB", "TiB"}) {
    if (absl::ConsumeSuffix(&text, unit)) break;
  }
  double number = 0;
  return absl::SimpleAtod(text, &number) && number > 0 && number < 0x1p60;
}

absl::Status CheckOptions(const Options& options) {
  if (options.model.empty()) return absl::InvalidArgumentError("--model is missing");
  if (options.host.empty()) return absl::InvalidArgumentError("--host is empty");
  std::error_code ignored;
  for (const char* name : {"config.json", "tokenizer.json"}) {
    if (!fs::is_regular_file(fs::path(options.model) / name, ignored)) {
      return absl::InvalidArgumentError(absl::StrCat("--model ", options.model, ": no ", name, " in that folder"));
    }
  }
  if (options.device != "cpu" && options.device != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("--device takes cpu or cuda, not '", options.device, "'"));
  }
  if (!options.kv_memory.empty() && !IsMemorySize(options.kv_memory)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv_memory takes a size such as 512MiB, not '", options.kv_memory, "'"));
  }
  if (!options.log_dir.empty()) {
    std::error_code error;
    fs::create_directories(options.log_dir, error);
    if (error || access(options.log_dir.c_str(), W_OK) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--log_dir ", options.log_dir, ": not a folder that can be written"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Sibling(const std::string& name) {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  const fs::path path = self.parent_path() / name;
  if (error || access(path.c_str(), X_OK) != 0) return absl::NotFoundError(absl::StrCat("no program ", path.string()));
  return path.string();
}

absl::StatusOr<ClusterOptions> Plan(const Options& options) {
  absl::StatusOr<std::string> worker = Sibling("millrace-worker");
  if (!worker.ok()) return worker.status();
  absl::StatusOr<std::string> router = Sibling("millrace-router");
  if (!router.ok()) return router.status();
  const int64_t cores = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
  const int64_t threads = options.threads > 0 ? options.threads : std::max<int64_t>(cores / options.workers, 1);
  // The folder's name is the model's name, so "." and a slash at the end must not hide it.
  const fs::path model = fs::absolute(fs::path(options.model) / "").lexically_normal().parent_path();
  ClusterOptions plan;
  plan.host = absl::StrContains(options.host, ':') ? absl::StrCat("[", options.host, "]") : options.host;
  plan.log_dir = options.log_dir;
  plan.num_workers = static_cast<size_t>(options.workers);
  plan.worker_argv = {*worker, absl::StrCat("--model=", model.string()), absl::StrCat("--threads=", threads)};
  plan.on_gpus = options.device == "cuda";
  if (!options.kv_memory.empty()) plan.worker_argv.push_back(absl::StrCat("--kv_memory=", options.kv_memory));
  if (options.max_slots > 0) {
    plan.worker_argv.push_back(absl::StrCat("--max_slots=", options.max_slots));
  }
  if (options.step_target_ms > 0) plan.worker_argv.push_back(absl::StrCat("--step_target_ms=", options.step_target_ms));
  plan.router_argv = {*router, absl::StrCat("--model=", model.string()),
                      absl::StrCat("--listen=", plan.host, ":", options.port)};
  if (options.unencrypted) plan.router_argv.push_back("--unencrypted");
  return plan;
}

}  // namespace

int RunUp(Words words, Terminal terminal) {
  Options options;
  Arguments arguments(
      "up --model DIR [--flag value]…",
      "Starts a router and its workers on this machine and stays in the foreground. Prints `ready HOST:PORT`\n"
      "once they serve; SIGINT or SIGTERM ends all of them.",
      "millrace up --model models/smollm2 --port 7400 --workers 2");
  Describe(options, arguments);
  if (const int code = ParseOrExit(arguments, words, terminal); code >= 0) return code;
  if (absl::Status status = CheckOptions(options); !status.ok()) return Fail(terminal, status, kExitUsage);
  if (absl::Status status = CheckAddressIsFree(options); !status.ok()) {
    return Fail(terminal, status, absl::IsInvalidArgument(status) ? kExitUsage : kExitFailed);
  }
  absl::StatusOr<ClusterOptions> plan = Plan(options);
  if (!plan.ok()) return Fail(terminal, plan.status());
  Cluster cluster(*std::move(plan), terminal);
  const absl::Status status = cluster.Run();
  return status.ok() ? kExitOk : Fail(terminal, status);
}

}  // namespace millrace
