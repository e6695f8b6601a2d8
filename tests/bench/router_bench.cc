// router_bench [--router PROGRAM] [--rate N] [--seconds S] [--streams N] [--overhead ROUNDS]: what the router costs. A
// worker without a model (a process of its own) answers at once, so that all that takes time is gRPC and the router.
//
//   latency     requests at a rate, 64 tokens in and one out: time to the first token through the router, beside the
//               same call answered by the worker's process directly, which is what gRPC alone takes
//   throughput  streams that get a token at every step: tokens per second of the router's CPU time
//
// With --overhead, instead: the same work, in turns, for routers that differ in one thing, TLS on both sides, metrics
// scraped once a second, or a log line a request; how much work a second of CPU does, as a share of what it does
// for one without any of them.
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cli/child.h"
#include "cli/completion_call.h"
#include "kernels/check.h"
#include "tests/fixtures.h"
#include "tests/http_get.h"
#include "tests/router/fleet/fake_worker.h"

namespace millrace {
namespace {

using Stub = v1::InferenceService::Stub;

// Answers with one token at once.
class Echo final : public v1::InferenceService::CallbackService {
  class Answer final : public grpc::ServerWriteReactor<v1::GenerateResponse> {
   public:
    Answer() {
      message_.add_token_ids(10);
      message_.set_text("a");
      message_.mutable_finish()->set_reason(v1::FINISH_REASON_LENGTH);
      StartWriteAndFinish(&message_, {}, grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    v1::GenerateResponse message_;
  };
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext*,
                                                           const v1::GenerateRequest*) override {
    return new Answer;
  }
};

// One certificate for everybody, which is its own authority: FOLDER/tls.crt and FOLDER/tls.key.
void MakeCertificate(const std::string& folder) {
  const std::string command = absl::StrCat(
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=bench -addext "
      "subjectAltName=DNS:localhost,URI:spiffe://millrace/router,URI:spiffe://millrace/worker -keyout ",
      folder, "/tls.key -out ", folder, "/tls.crt 2>/dev/null");
  MILLRACE_CHECK(std::system(command.c_str()) == 0, "openssl makes a certificate");
}

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// `folder`: of the certificate; empty: plaintext.
int RunWorker(const std::string& folder) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  FakeWorker worker("worker");
  worker.Stop();
  worker.ready().set_num_slots(1024);
  worker.ready().set_num_blocks(1 << 16);
  worker.ready().set_block_tokens(32);
  worker.ready().mutable_model()->set_max_context(4096);
  worker.ready().mutable_step_cost()->set_step_us(10);
  worker.ready().mutable_step_cost()->set_prefill_token_us(0.01);
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  if (!folder.empty()) {
    grpc::SslServerCredentialsOptions tls(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    tls.pem_root_certs = Contents(folder + "/tls.crt");
    tls.pem_key_cert_pairs.push_back({Contents(folder + "/tls.key"), Contents(folder + "/tls.crt")});
    credentials = grpc::SslServerCredentials(tls);
  }
  worker.Listen(0, credentials);
  Echo echo;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&echo);
  const auto server = builder.BuildAndStart();
  std::cout << worker.address() << " 127.0.0.1:" << port << std::endl;
  pause();
  return 0;
}

// The first line that a child prints.
std::string FirstLine(Child& child) {
  std::string first;
  while (first.empty() && child.out().fd() >= 0) {
    child.out().Read([&](const std::string& line) {
      if (first.empty()) first = line;
    });
    child.err().Read([](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); });
    pollfd pipes[] = {{child.out().fd(), POLLIN, 0}, {child.err().fd(), POLLIN, 0}};
    if (first.empty()) poll(pipes, std::size(pipes), -1);
  }
  MILLRACE_CHECK(!first.empty(), "a child says where it listens");
  return first;
}

double CpuSeconds(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string word;
  for (int i = 0; i < 13; ++i) stat >> word;
  double user = 0, system = 0;
  stat >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

v1::GenerateRequest Request(uint64_t seed, int prompt, int output) {
  v1::GenerateRequest request;
  for (int i = 0; i < prompt; ++i) {
    request.mutable_token_ids()->add_ids(static_cast<int32_t>((seed * 7919 + static_cast<uint64_t>(i) * 31) % 300));
  }
  request.mutable_sampling()->set_max_tokens(output);
  request.mutable_sampling()->set_ignore_eos(true);
  request.mutable_sampling()->set_seed(seed);
  return request;
}

class Calls {
 public:
  void Start(Stub& stub, v1::GenerateRequest request) {
    {
      const absl::MutexLock lock(&mutex_);
      ++open_;
    }
    const auto begin = std::chrono::steady_clock::now();
    CompletionCall::Start(
        stub, std::move(request), std::nullopt,
        [this, begin, first = true](const v1::GenerateResponse& piece) mutable {
          const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
          const absl::MutexLock lock(&mutex_);
          if (first) first_us_.push_back(taken.count());
          first = false;
          tokens_ += piece.token_ids_size();
        },
        [this](const grpc::Status& status) {
          MILLRACE_CHECK(status.ok(), status.error_message().c_str());
          const absl::MutexLock lock(&mutex_);
          --open_;
        });
  }
  void Await() {
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](int* open) { return *open == 0; }, &open_));
  }
  std::vector<double> TakeTimes() {
    const absl::MutexLock lock(&mutex_);
    std::ranges::sort(first_us_);
    return std::exchange(first_us_, {});
  }
  int64_t TakeTokens() {
    const absl::MutexLock lock(&mutex_);
    return std::exchange(tokens_, 0);
  }

 private:
  absl::Mutex mutex_;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<double> first_us_ ABSL_GUARDED_BY(mutex_);
};

double At(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1))];
}

std::vector<double> AtRate(Stub& stub, double rate, double seconds) {
  Calls calls;
  const auto begin = std::chrono::steady_clock::now();
  const auto count = static_cast<uint64_t>(rate * seconds);
  for (uint64_t i = 0; i < count; ++i) {
    std::this_thread::sleep_until(begin +
                                  std::chrono::nanoseconds(static_cast<int64_t>(1e9 * static_cast<double>(i) / rate)));
    calls.Start(stub, Request(i, 64, 1));
  }
  calls.Await();
  return calls.TakeTimes();
}

struct Variant {
  const char* name;
  bool tls, metrics, logs;
};

std::string FreeAddress() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  MILLRACE_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0, "a port is free");
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
}

// A worker and a router of their own, somebody who reads its log, and a scraper.
class Deployment {
 public:
  Deployment(const std::string& program, const std::string& folder, const Variant& variant) : variant_(variant) {
    worker_ = *Child::Start(
        {std::filesystem::read_symlink("/proc/self/exe").string(), "worker", variant.tls ? folder : std::string()});
    const std::string addresses = FirstLine(*worker_);
    const std::string metrics = variant.metrics ? FreeAddress() : "";
    std::vector<std::string> argv = {program,
                                     absl::StrCat("--model=", Fixture("qwen3-tiny-6x32").string()),
                                     "--listen=127.0.0.1:0",
                                     absl::StrCat("--workers=", addresses.substr(0, addresses.find(' '))),
                                     absl::StrCat("--metrics_listen=", metrics),
                                     absl::StrCat("--log_level=", variant.logs ? "info" : "warning")};
    const std::string certificate = folder + "/tls.crt", key = folder + "/tls.key";
    if (variant.tls) {
      for (const std::string prefix : {"--tls", "--workers_tls"}) {
        argv.push_back(absl::StrCat(prefix, "_certificate=", certificate));
        argv.push_back(absl::StrCat(prefix, "_key=", key));
      }
      argv.push_back("--workers_tls_ca=" + certificate);
    }
    router_ = *Child::Start(argv);
    const std::string ready = FirstLine(*router_);
    const std::string port = ready.substr(ready.rfind(':'));
    stub_ = v1::InferenceService::NewStub(
        variant.tls ? grpc::CreateChannel("localhost" + port, grpc::SslCredentials({Contents(certificate), "", ""}))
                    : grpc::CreateChannel("127.0.0.1" + port, grpc::InsecureChannelCredentials()));
    reader_ = std::thread([this, metrics] {
      while (!Stopped(absl::Seconds(1))) {
        router_->err().Read([](const std::string&) {});
        if (!metrics.empty()) MILLRACE_CHECK(!HttpGet(metrics, "/metrics").empty(), "the router is scraped");
      }
    });
  }
  ~Deployment() {
    {
      const absl::MutexLock lock(&mutex_);
      stop_ = true;
    }
    reader_.join();
  }

  // Of `calls` calls, 64 at a time, each with `output` tokens: per second of the router's CPU time.
  double CallsPerCpuSecond(int calls, int output) {
    const double before = CpuSeconds(router_->pid());
    Calls open;
    for (int i = 0; i < calls; ++i) {
      open.Start(*stub_, Request(static_cast<uint64_t>(i), 64, output));
      if (i % 64 == 63) open.Await();
    }
    open.Await();
    return calls / (CpuSeconds(router_->pid()) - before);
  }
  const Variant& variant() const { return variant_; }

 private:
  bool Stopped(absl::Duration patience) {
    const absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&stop_), patience);
  }

  const Variant variant_;
  std::unique_ptr<Child> worker_, router_;
  std::unique_ptr<Stub> stub_;
  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread reader_;
};

struct Options {
  std::string router = "build/cpu/bin/millrace-router";
  double rate = 1000, seconds = 3;
  int streams = 64;
  int overhead = 0;  // rounds
};

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return At(values, 0.5);
}

int RunOverhead(const Options& options) {
  constexpr Variant kVariants[] = {{"plain", false, false, false},
                                   {"tls", true, false, false},
                                   {"metrics", false, true, false},
                                   {"logs", false, false, true}};
  char folder[] = "/tmp/router_bench.XXXXXX";
  MILLRACE_CHECK(mkdtemp(folder) != nullptr, "a folder for the certificate");
  MakeCertificate(folder);
  std::vector<std::unique_ptr<Deployment>> all;
  for (const Variant& variant : kVariants) {
    all.push_back(std::make_unique<Deployment>(options.router, folder, variant));
    all.back()->CallsPerCpuSecond(256, 16);
  }
  std::filesystem::remove_all(folder);
  constexpr struct {
    const char* name;
    int calls, output;
  } kWork[] = {{"streams of 2,000 tokens", 256, 2000}, {"calls of 1 token", 16384, 1}};
  for (const auto& work : kWork) {
    std::vector<std::vector<double>> shares(all.size());
    for (int round = 0; round < options.overhead; ++round) {
      double plain = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        const double rate = all[i]->CallsPerCpuSecond(work.calls, work.output);
        if (i == 0) plain = rate;
        shares[i].push_back(rate / plain);
      }
    }
    for (size_t i = 1; i < all.size(); ++i) {
      const auto [least, most] = std::ranges::minmax(shares[i]);
      std::printf("overhead, %s: with %s %.3f of the work of plain a CPU second (%.3f to %.3f in %d rounds)\n",
                  work.name, all[i]->variant().name, Median(shares[i]), least, most, options.overhead);
    }
    std::fflush(stdout);
  }
  return 0;
}

int Run(const Options& options) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto worker = Child::Start({self, "worker", ""});
  MILLRACE_CHECK(worker.ok(), "the worker starts");
  const std::string addresses = FirstLine(**worker);
  const size_t space = addresses.find(' ');
  const auto router = Child::Start({options.router, "--model", Fixture("qwen3-tiny-6x32").string(), "--listen",
                                    "127.0.0.1:0", "--workers", addresses.substr(0, space)});
  MILLRACE_CHECK(router.ok(), "the router starts");
  const std::string ready = FirstLine(**router);
  const auto connect = [](const std::string& address) {
    return v1::InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  };
  const auto through = connect(ready.substr(ready.find(' ') + 1)), direct = connect(addresses.substr(space + 1));

  AtRate(*through, options.rate, 0.5), AtRate(*direct, options.rate, 0.5);
  for (int run = 0; run < 3; ++run) {
    const double before = CpuSeconds((*router)->pid());
    const std::vector<double> with = AtRate(*through, options.rate, options.seconds);
    const double cpu = (CpuSeconds((*router)->pid()) - before) / static_cast<double>(with.size());
    const std::vector<double> without = AtRate(*direct, options.rate, options.seconds);
    std::printf(
        "latency at %.0f requests/s, us: through the router p50 %.0f p99 %.0f; directly p50 %.0f p99 %.0f; added p50 "
        "%.0f p99 %.0f; "
        "router %.0f us of CPU a request\n",
        options.rate, At(with, 0.5), At(with, 0.99), At(without, 0.5), At(without, 0.99),
        At(with, 0.5) - At(without, 0.5), At(with, 0.99) - At(without, 0.99), 1e6 * cpu);
    std::fflush(stdout);
  }
  for (int run = 0; run < 3; ++run) {
    Calls calls;
    const double before = CpuSeconds((*router)->pid());
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < options.streams; ++i) calls.Start(*through, Request(static_cast<uint64_t>(i), 64, 2000));
    calls.Await();
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
    const double cpu = CpuSeconds((*router)->pid()) - before;
    const auto tokens = static_cast<double>(calls.TakeTokens());
    std::printf("throughput, %d streams: %.0f tokens/s, %.0f tokens per second of the router's CPU (%.2f cores)\n",
                options.streams, tokens / wall.count(), tokens / cpu, cpu / wall.count());
    std::fflush(stdout);
  }
  return 0;
}

int Main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "worker") return RunWorker(argv[2]);
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--router") options.router = argv[i + 1];
    if (flag == "--rate") options.rate = std::atof(argv[i + 1]);
    if (flag == "--seconds") options.seconds = std::atof(argv[i + 1]);
    if (flag == "--streams") options.streams = std::atoi(argv[i + 1]);
    if (flag == "--overhead") options.overhead = std::atoi(argv[i + 1]);
  }
  return options.overhead > 0 ? RunOverhead(options) : Run(options);
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) { return millrace::Main(argc, argv); }
