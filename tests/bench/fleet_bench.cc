// fleet_bench overload|placement [--router PROGRAM] [--seconds S] [--trace FILE] [--speed X]: real routers, gRPC on
// both sides and real time; workers that only take the time of an 8B model on an H200 (paced_worker.h), so that two
// cores hold a fleet. Beside each run what the simulator says of the same requests (virtual_cluster.h).
//
//   overload   the most good requests a second at rates around the capacity of two workers, then ten times that rate
//              by four tenants that ask for 1 : 2 : 4 : 8, each request with 8 s to be done
//   placement  the trace, before four workers: placed by the router, and by turns or by fewest requests in flight
//              before four routers of one worker each
#include <poll.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cli/child.h"
#include "cli/completion_call.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "router/schedule/step_cost.h"
#include "tests/cluster/sim/paced_worker.h"
#include "tests/cluster/sim/virtual_cluster.h"
#include "tests/fixtures.h"

namespace millrace {
namespace {

constexpr Time kSecond = 1'000'000;
constexpr Time kWire = 150;
constexpr uint32_t kTraceBlock = 512;

worker::v1::Ready Ready(int worker) {
  worker::v1::Ready ready;
  ready.set_worker_id(absl::StrCat("worker-", worker));
  ready.set_instance_id("instance");
  ready.mutable_model()->set_name("paced");
  ready.mutable_model()->set_vocab_size(337);
  ready.mutable_model()->set_max_context(1 << 18);
  ready.mutable_model()->add_eos_token_ids(2);
  ready.mutable_model()->set_fingerprint("f");
  ready.set_num_blocks(25'000);
  ready.set_block_tokens(32);
  ready.set_num_slots(256);
  ready.set_step_target_us(45'000);
  ready.mutable_step_cost()->set_step_us(4500);
  ready.mutable_step_cost()->set_prefill_token_us(1e6 / 45'000);
  ready.mutable_step_cost()->set_prefill_context_ns(1e9 / 45'000 / 28'000);
  ready.mutable_step_cost()->set_row_us(20);
  ready.mutable_step_cost()->set_context_ns(34.3);
  return ready;
}

struct Arrival {
  Time at = 0;
  std::vector<int32_t> prompt;
  uint32_t output = 1;
  int tenant = 0;
  // What became of it. Times from the beginning of the run; 0: never.
  Time begun = 0, first = 0, ended = 0;
  uint32_t received = 0;
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  std::string why;

  double limit() const {  // seconds until its first token
    return std::max(2.0, 2 * PrefillSeconds(Ready(0).step_cost(), 0, static_cast<double>(prompt.size())));
  }
  bool good() const {
    if (code != grpc::StatusCode::OK || received != output) return false;
    const double decode = static_cast<double>(ended - first) * 1e-6;
    return static_cast<double>(first - at) * 1e-6 <= limit() && decode <= 0.05 * std::max(output, 20u);
  }
};

using Arrivals = std::vector<Arrival>;
enum class Policy { kMillrace, kRoundRobin, kLeastLoad };

std::vector<uint32_t> Ends(const Arrivals& arrivals) {
  std::vector<uint32_t> ends;
  for (const Arrival& it : arrivals) ends.push_back(static_cast<uint32_t>(it.prompt.size()) + it.output);
  return ends;
}

// Which of n groups each request goes to; `in_flight` answers for now.
template <class InFlight>
size_t Choose(Policy policy, size_t request, size_t n, const InFlight& in_flight) {
  if (policy == Policy::kMillrace || n == 1) return 0;
  if (policy == Policy::kRoundRobin) return request % n;
  size_t least = 0;
  for (size_t i = 1; i < n; ++i) least = in_flight(i) < in_flight(least) ? i : least;
  return least;
}

// A router with its workers.
class Group {
 public:
  Group(const std::string& program, int first_worker, int num_workers, const std::vector<uint32_t>* ends) {
    std::string addresses;
    for (int i = 0; i < num_workers; ++i) {
      workers_.push_back(std::make_unique<PacedWorker>(Ready(first_worker + i), ends));
      absl::StrAppend(&addresses, i == 0 ? "" : ",", workers_.back()->address());
    }
    auto child = Child::Start({program, "--model", Fixture("qwen3-tiny-6x32").string(), "--listen", "127.0.0.1:0",
                               "--workers", addresses, "--log_level", "error", "--metrics_listen", ""});
    MILLRACE_CHECK(child.ok(), "the router starts");
    router_ = *std::move(child);
    std::string ready;
    while (ready.empty()) {
      pollfd out{router_->out().fd(), POLLIN, 0};
      poll(&out, 1, -1);
      router_->out().Read([&](const std::string& line) { ready = line; });
    }
    channel_ = grpc::CreateChannel(ready.substr(ready.find(' ') + 1), grpc::InsecureChannelCredentials());
    stub_ = v1::InferenceService::NewStub(channel_);
  }
  v1::InferenceService::Stub& stub() { return *stub_; }
  const std::vector<std::unique_ptr<PacedWorker>>& workers() const { return workers_; }
  int in_flight = 0;

 private:
  std::vector<std::unique_ptr<PacedWorker>> workers_;
  std::unique_ptr<Child> router_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

struct InVain {
  size_t late = 0;       // admitted after the deadline
  size_t unsampled = 0;  // admitted, and gone without a token, the deadline past
  size_t admitted = 0;
};

// Plays the arrivals in real time; what became of them is written into them.
InVain Play(const std::string& program, Policy policy, int num_workers, std::optional<Time> patience,
            Arrivals* arrivals) {
  const std::vector<uint32_t> ends = Ends(*arrivals);
  std::vector<std::unique_ptr<Group>> groups;
  const int num_groups = policy == Policy::kMillrace ? 1 : num_workers;
  for (int i = 0; i < num_groups; ++i) {
    groups.push_back(std::make_unique<Group>(program, i, num_workers / num_groups, &ends));
  }
  absl::Mutex mutex;
  size_t open = 0;
  const Time start = SteadyNow();
  for (size_t i = 0; i < arrivals->size(); ++i) {
    Arrival& it = (*arrivals)[i];
    std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::microseconds(start + it.at)));
    v1::GenerateRequest request;
    request.mutable_token_ids()->mutable_ids()->Add(it.prompt.begin(), it.prompt.end());
    request.mutable_sampling()->set_max_tokens(static_cast<int32_t>(it.output + 64));
    request.mutable_sampling()->set_ignore_eos(true);
    request.mutable_sampling()->set_seed(i);
    request.set_tenant(absl::StrCat("tenant-", it.tenant));
    mutex.Lock();
    Group* const group = groups[Choose(policy, i, groups.size(), [&](size_t n) { return groups[n]->in_flight; })].get();
    ++group->in_flight;
    ++open;
    it.begun = SteadyNow() - start;
    mutex.Unlock();
    const std::optional<std::chrono::milliseconds> timeout =
        patience.has_value() ? std::optional(std::chrono::milliseconds(*patience / 1000)) : std::nullopt;
    CompletionCall::Start(
        group->stub(), std::move(request), timeout,
        [&it, start](const v1::GenerateResponse& piece) {
          if (it.first == 0 && piece.token_ids_size() > 0) it.first = SteadyNow() - start;
          it.received += static_cast<uint32_t>(piece.token_ids_size());
        },
        [&, group](const grpc::Status& status) {
          absl::MutexLock lock(&mutex);
          it.ended = SteadyNow() - start;
          it.code = status.error_code();
          it.why = status.error_message();
          --group->in_flight;
          --open;
        });
  }
  mutex.LockWhen(absl::Condition(
      +[](size_t* n) { return *n == 0; }, &open));
  mutex.Unlock();
  InVain vain;
  for (const auto& group : groups) {
    for (const auto& worker : group->workers()) {
      for (const PacedWorker::Admission& admission : worker->admissions()) {
        const Arrival& it = (*arrivals)[admission.seed];
        ++vain.admitted;
        vain.late += patience.has_value() && admission.at - start > it.begun + *patience;
        vain.unsampled += !admission.sampled && it.code == grpc::StatusCode::DEADLINE_EXCEEDED && it.received == 0;
      }
    }
  }
  return vain;
}

// The same in virtual time.
void Simulate(Policy policy, int num_workers, std::optional<Time> patience, Arrivals* arrivals) {
  const int num_groups = policy == Policy::kMillrace ? 1 : num_workers;
  std::vector<std::unique_ptr<VirtualCluster>> groups;
  for (int i = 0; i < num_groups; ++i) {
    groups.push_back(std::make_unique<VirtualCluster>(SchedulerOptions(), kWire));
    for (int worker = 0; worker < num_workers / num_groups; ++worker) {
      groups.back()->Join(Ready(i + worker), Ready(0).step_cost());
    }
  }
  std::vector<std::pair<size_t, size_t>> places;  // group, number there
  for (size_t i = 0; i < arrivals->size(); ++i) {
    const Arrival& it = (*arrivals)[i];
    for (const auto& group : groups) group->Run(it.at);
    const size_t group = Choose(policy, i, groups.size(), [&](size_t n) {
      return std::ranges::count_if(groups[n]->requests(), [](const VirtualRequest& other) { return other.ended == 0; });
    });
    VirtualRequest request;
    request.prompt = it.prompt;
    request.output = it.output;
    request.tenant = absl::StrCat("tenant-", it.tenant);
    if (patience.has_value()) request.patience = *patience;
    places.emplace_back(group, groups[group]->Arrive(it.at + kWire, std::move(request)));
  }
  for (const auto& group : groups) group->Run();
  for (size_t i = 0; i < arrivals->size(); ++i) {
    const VirtualRequest& was = groups[places[i].first]->requests()[places[i].second];
    Arrival& it = (*arrivals)[i];
    it.begun = it.at;
    it.first = was.first;
    it.ended = was.ended;
    it.received = was.received;
    it.code = static_cast<grpc::StatusCode>(was.status.code());
    it.why = std::string(was.status.message());
  }
}

double At(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

struct Outcome {
  double goodput = 0, good_tokens = 0, good = 0, ttft_p50 = 0, ttft_p99 = 0;  // good requests and their tokens a second
};

Outcome Judge(const char* what, double rate, const Arrivals& arrivals) {
  size_t good = 0, refused = 0, expired = 0, tokens = 0;
  std::vector<double> ttft;
  for (const Arrival& it : arrivals) {
    good += it.good();
    if (it.good()) tokens += it.prompt.size() + it.output;
    refused += it.code == grpc::StatusCode::RESOURCE_EXHAUSTED;
    expired += it.code == grpc::StatusCode::DEADLINE_EXCEEDED;
    if (it.first != 0) ttft.push_back(static_cast<double>(it.first - it.at) * 1e-6);
  }
  const double seconds = static_cast<double>(arrivals.back().at) * 1e-6;
  const Outcome outcome{static_cast<double>(good) / seconds, static_cast<double>(tokens) / seconds,
                        static_cast<double>(good) / static_cast<double>(arrivals.size()), At(ttft, 0.5),
                        At(ttft, 0.99)};
  std::printf(
      "%-28s %6.1f/s: %5zu requests, good %.1f %% = %.2f/s, refused %zu, expired %zu, TTFT p50 %.3f p99 %.3f s\n", what,
      rate, arrivals.size(), 100 * outcome.good, outcome.goodput, refused, expired, outcome.ttft_p50, outcome.ttft_p99);
  std::fflush(stdout);
  return outcome;
}

// Every third prompt goes on from an earlier one. Tenants ask for 1 : 2 : 4 : 8.
Arrivals Made(uint64_t seed, double rate, double seconds) {
  std::mt19937_64 rng(seed);
  Arrivals arrivals;
  double at = 0;
  std::exponential_distribution<double> gap(rate);
  std::lognormal_distribution<double> length(8.0, 0.7);
  while ((at += gap(rng)) < seconds) {
    Arrival it;
    it.at = static_cast<Time>(at * kSecond) + 1;
    if (arrivals.size() > 10 && rng() % 3 == 0) it.prompt = arrivals[arrivals.size() - 1 - rng() % 10].prompt;
    if (it.prompt.size() > 12'000) it.prompt.resize(6'000);
    for (size_t n = std::clamp<size_t>(static_cast<size_t>(length(rng)), 100, 16'000); n > 0; --n) {
      it.prompt.push_back(3 + static_cast<int32_t>(rng() % 300));
    }
    it.output = 20 + static_cast<uint32_t>(rng() % 80);
    it.tenant = static_cast<int>(std::bit_width(1 + rng() % 15)) - 1;
    arrivals.push_back(std::move(it));
  }
  return arrivals;
}

// Of the trace's first requests, at `speed` times its own; ids become tokens of a small vocabulary.
Arrivals Traced(const std::string& file, double speed, double seconds) {
  std::FILE* const lines = popen(absl::StrCat("zcat '", file, "'").c_str(), "r");
  MILLRACE_CHECK(lines != nullptr, "the trace opens");
  Arrivals arrivals;
  std::mt19937_64 rng(1);
  std::vector<char> line(1 << 16);
  while (std::fgets(line.data(), static_cast<int>(line.size()), lines) != nullptr) {
    const nlohmann::json request = nlohmann::json::parse(line.data());
    Arrival it;
    const double tick = request.at("timestamp").get<double>() * 1e-3 + static_cast<double>(rng() % 3000) * 1e-3;
    it.at = static_cast<Time>(tick / speed * kSecond) + 1;
    if (request.at("timestamp").get<double>() * 1e-3 / speed > seconds) break;
    const uint32_t length = request.at("input_length");
    for (uint32_t i = 0; i < length; ++i) {
      const uint32_t id = request.at("hash_ids").at(i / kTraceBlock);
      it.prompt.push_back(3 + static_cast<int32_t>((id >> (i % 4 * 8)) & 255));
    }
    it.output = std::max(1u, request.at("output_length").get<uint32_t>());
    arrivals.push_back(std::move(it));
  }
  pclose(lines);
  std::ranges::stable_sort(arrivals, {}, &Arrival::at);
  return arrivals;
}

struct Options {
  std::string router = "build/cpu/bin/millrace-router";
  std::string trace = "../shared/traces/conversation_trace.jsonl.gz";
  double seconds = 30, speed = 1.8;
};

int Overload(const Options& options) {
  constexpr Time kPatience = 8 * kSecond;
  Outcome peak, virtual_peak;
  double peak_rate = 0;
  for (const double rate : {12.0, 16.0, 20.0, 24.0, 28.0}) {
    Arrivals arrivals = Made(1, rate, options.seconds), simulated = arrivals;
    Play(options.router, Policy::kMillrace, 2, kPatience, &arrivals);
    Simulate(Policy::kMillrace, 2, kPatience, &simulated);
    const Outcome outcome = Judge("measured", rate, arrivals), expected = Judge("simulated", rate, simulated);
    if (expected.goodput > virtual_peak.goodput) virtual_peak = expected;
    if (outcome.goodput <= peak.goodput) continue;
    peak = outcome;
    peak_rate = rate;
  }
  Arrivals flood = Made(2, 10 * peak_rate, options.seconds), simulated = flood;
  const InVain vain = Play(options.router, Policy::kMillrace, 2, kPatience, &flood);
  Simulate(Policy::kMillrace, 2, kPatience, &simulated);
  const Outcome outcome = Judge("measured", 10 * peak_rate, flood);
  const Outcome expected = Judge("simulated", 10 * peak_rate, simulated);
  std::vector<double> at_once, shed;
  double served[4] = {}, sum = 0, squares = 0;
  for (const Arrival& it : flood) {
    if (it.code == grpc::StatusCode::OK) served[it.tenant] += static_cast<double>(it.prompt.size()) + it.received;
    if (it.code != grpc::StatusCode::RESOURCE_EXHAUSTED) continue;
    const bool waited =
        it.why.find("the queue is full") != std::string::npos || it.why.find("its answer takes") != std::string::npos;
    (waited ? shed : at_once).push_back(static_cast<double>(it.ended - it.begun) * 1e-3);
  }
  for (const double it : served) sum += it, squares += it * it;
  std::printf(
      "good at ten times the rate of the peak, of the peak: %.1f %% of the requests (simulated: %.1f %%), %.1f %% of "
      "their tokens (simulated: %.1f %%)\n",
      100 * outcome.goodput / peak.goodput, 100 * expected.goodput / virtual_peak.goodput,
      100 * outcome.good_tokens / peak.good_tokens, 100 * expected.good_tokens / virtual_peak.good_tokens);
  std::printf("refused at once: %zu, p50 %.2f p99 %.2f ms; given up after they had waited: %zu, p50 %.0f ms\n",
              at_once.size(), At(at_once, 0.5), At(at_once, 0.99), shed.size(), At(shed, 0.5));
  std::printf("tokens served by tenant: %.0f %.0f %.0f %.0f, Jain index %.3f\n", served[0], served[1], served[2],
              served[3], sum * sum / 4 / squares);
  std::printf("%zu admissions: %zu after the deadline, %zu without a token when it passed\n", vain.admitted, vain.late,
              vain.unsampled);
  return 0;
}

int Placement(const Options& options) {
  const Arrivals arrivals = Traced(options.trace, options.speed, options.seconds);
  const double rate = static_cast<double>(arrivals.size()) / static_cast<double>(arrivals.back().at) * 1e6;
  Outcome measured[3], simulated[3];
  const char* const names[] = {"Millrace", "round robin", "least load"};
  for (int policy = 0; policy < 3; ++policy) {
    Arrivals played = arrivals, predicted = arrivals;
    Play(options.router, static_cast<Policy>(policy), 4, std::nullopt, &played);
    measured[policy] = Judge(absl::StrCat(names[policy], ", measured").c_str(), rate, played);
    Simulate(static_cast<Policy>(policy), 4, std::nullopt, &predicted);
    simulated[policy] = Judge(absl::StrCat(names[policy], ", simulated").c_str(), rate, predicted);
  }
  for (int policy = 1; policy < 3; ++policy) {
    std::printf("Millrace over %s: goodput %.2f (simulated %.2f), TTFT p50 %.2f (simulated %.2f)\n", names[policy],
                measured[0].goodput / measured[policy].goodput, simulated[0].goodput / simulated[policy].goodput,
                measured[0].ttft_p50 / measured[policy].ttft_p50, simulated[0].ttft_p50 / simulated[policy].ttft_p50);
  }
  return 0;
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  Options options;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--router") options.router = argv[i + 1];
    if (flag == "--trace") options.trace = argv[i + 1];
    if (flag == "--seconds") options.seconds = std::atof(argv[i + 1]);
    if (flag == "--speed") options.speed = std::atof(argv[i + 1]);
  }
  if (mode == "overload") return Overload(options);
  if (mode == "placement") return Placement(options);
  std::fprintf(stderr, "fleet_bench overload|placement, not \"%s\"\n", mode.c_str());
  return 2;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) { return millrace::Main(argc, argv); }
