// What operators see of a router: metrics, health, and the line of a request.
#include <set>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/health_client.h"
#include "tests/http_get.h"
#include "tests/router/api/router_fixture.h"

namespace millrace {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr char kReadiness[] = "millrace.v1.InferenceService";

class OperationsTest : public RouterTest {
 protected:
  std::string Scrape() { return HttpGet(router_->metrics_address(), "/metrics"); }
  // Of a series as it is spelled in the page; -1: not there.
  double Value(const std::string& series) {
    for (const absl::string_view line : absl::StrSplit(Scrape(), '\n')) {
      double value = 0;
      if (absl::StartsWith(line, series + " ") && absl::SimpleAtod(line.substr(series.size() + 1), &value)) {
        return value;
      }
    }
    return -1;
  }
  // A call is filed when its last owner lets go, which may be after its client knows the end.
  void AwaitValue(const std::string& series, double value) {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    double seen;
    do {
      seen = Value(series);
    } while (seen != value && absl::Now() < deadline);
    EXPECT_EQ(seen, value) << series;
  }
  HealthClient Health() { return HealthClient(absl::StrCat("127.0.0.1:", router_->port())); }
};

TEST_F(OperationsTest, CountsWhatClientsGot) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest two = Request(12);
  two.mutable_sampling()->set_n(2);
  EXPECT_TRUE(Generate(Request(7)).status.ok());
  EXPECT_TRUE(Generate(Request(7)).status.ok());
  EXPECT_TRUE(Generate(two).status.ok());
  v1::GenerateRequest bad = Request(7);
  bad.set_priority(1000);
  EXPECT_FALSE(Generate(bad).status.ok());

  AwaitValue("millrace_requests_total{code=\"OK\"}", 3);
  AwaitValue("millrace_requests_total{code=\"INVALID_ARGUMENT\"}", 1);
  AwaitValue("vllm:request_success_total{model_name=\"tiny\",finished_reason=\"length\"}", 4);
  AwaitValue("vllm:prompt_tokens_total{model_name=\"tiny\"}", 20);
  AwaitValue("vllm:generation_tokens_total{model_name=\"tiny\"}", 38);
  AwaitValue("vllm:prefix_cache_queries_total{model_name=\"tiny\"}", 20);
  AwaitValue("vllm:time_to_first_token_seconds_count{model_name=\"tiny\"}", 4);
  AwaitValue("vllm:inter_token_latency_seconds_count{model_name=\"tiny\"}", 34);
  AwaitValue("vllm:e2e_request_latency_seconds_count{model_name=\"tiny\"}", 4);
  AwaitValue("vllm:request_generation_tokens_sum{model_name=\"tiny\"}", 38);
  AwaitValue("vllm:num_requests_running{model_name=\"tiny\"}", 0);
  AwaitValue("millrace_prefix_mismatches_total", 0);
  AwaitValue("millrace_workers{state=\"ready\"}", 1);
  AwaitValue("millrace_worker_ready{worker=\"w\"}", 1);
  AwaitValue("millrace_ready", 1);
  EXPECT_EQ(Value("millrace_real_cached_tokens_total"), Value("vllm:prefix_cache_hits_total{model_name=\"tiny\"}"));
}

// Of its guesses each step's last one is wrong.
TEST_F(OperationsTest, TellsWhatSpeculationBrought) {
  FakeWorker worker("w");
  worker::v1::Drafter* drafter = worker.ready().add_drafters();
  drafter->set_method(worker::v1::DRAFT_METHOD_MODEL);
  drafter->set_max_length(4);
  drafter->set_step_us(10);
  Start({&worker});
  AwaitReady();
  const Output output = Generate(Request(400));
  ASSERT_TRUE(output.status.ok());
  const Output::Choice& choice = output.choices.at(0);
  EXPECT_EQ(choice.tokens, Expected(1, 400)) << "no token depends on it";
  const uint32_t drafted = choice.finish.speculation().drafted_tokens();
  const uint32_t accepted = choice.finish.speculation().accepted_tokens();
  EXPECT_GT(accepted, 100u);
  EXPECT_GT(drafted, accepted);
  AwaitValue("vllm:spec_decode_num_draft_tokens_total{model_name=\"tiny\"}", drafted);
  AwaitValue("vllm:spec_decode_num_accepted_tokens_total{model_name=\"tiny\"}", accepted);
  double sum = 0;
  for (int position = 0; position < 16; ++position) {
    sum += Value(absl::StrCat("vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"tiny\",position=\"",
                              position, "\"}"));
  }
  EXPECT_EQ(sum, accepted);
  AwaitValue("millrace_draft_length{worker=\"w\"}", 0);  // nobody decodes any more
  EXPECT_EQ(Status().workers(0).drafted_tokens(), drafted);
  EXPECT_EQ(Status().workers(0).accepted_tokens(), accepted);
}

TEST_F(OperationsTest, SpeculationCanBeSwitchedOff) {
  FakeWorker worker("w");
  worker.ready().add_drafters()->set_method(worker::v1::DRAFT_METHOD_MODEL);
  worker.ready().mutable_drafters(0)->set_max_length(4);
  RouterOptions options;
  options.speculation = "off";
  Start({&worker}, options);
  AwaitReady();
  EXPECT_TRUE(Generate(Request(100)).status.ok());
  EXPECT_EQ(Status().workers(0).drafted_tokens(), 0u);
  options.model = "folder";
  options.workers = {"127.0.0.1:1"};
  EXPECT_TRUE(options.Validate().ok());
  options.speculation = "yes";
  EXPECT_THAT(options.Validate().message(), HasSubstr("--speculation is \"yes\"; it must be auto or off"));
}

TEST_F(OperationsTest, CountsAnAbandonedSequenceAsAborted) {
  FakeWorker worker("w");
  worker.SetSteps(2);
  Start({&worker});
  AwaitReady();
  {
    grpc::ClientContext context;
    const auto reader = stub_->Generate(&context, Request(300));
    v1::GenerateResponse message;
    ASSERT_TRUE(reader->Read(&message));
    AwaitValue("vllm:num_requests_running{model_name=\"tiny\"}", 1);
    AwaitValue("millrace_open_calls", 1);
    context.TryCancel();
    while (reader->Read(&message)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  AwaitValue("millrace_requests_total{code=\"CANCELLED\"}", 1);
  AwaitValue("vllm:request_success_total{model_name=\"tiny\",finished_reason=\"abort\"}", 1);
}

// A client that leaves before its message has come asked for nothing invalid.
TEST_F(OperationsTest, CountsACallThatEndedBeforeItsRequestCameAsCancelled) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  grpc::GenericStub stub(channel_);
  const auto call = stub.PrepareCall(&context, "/millrace.v1.InferenceService/Generate", &queue);
  call->StartCall(&context);
  ASSERT_TRUE(queue.Next(&tag, &ok));
  context.TryCancel();
  AwaitValue("millrace_requests_total{code=\"CANCELLED\"}", 1);
  grpc::Status status;
  call->Finish(&status, &status);
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(OperationsTest, LogsOneLineARequestWithoutItsText) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  testing::internal::CaptureStderr();
  v1::GenerateRequest request = Request(7);
  request.set_request_id("the id");
  request.set_text("a secret");
  const Output output = Generate(request);
  EXPECT_TRUE(output.status.ok());
  AwaitValue("millrace_requests_total{code=\"OK\"}", 1);
  EXPECT_FALSE(Generate(v1::GenerateRequest()).status.ok());
  router_->Shutdown(std::chrono::milliseconds(100));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr(" info request id=\"the id\" status=OK finish=length worker=w prompt_tokens="));
  EXPECT_THAT(text, HasSubstr(" generated_tokens=7 "));
  EXPECT_THAT(text, HasSubstr(" info request status=INVALID_ARGUMENT total_us="));
  EXPECT_THAT(text, Not(HasSubstr("secret")));
  EXPECT_THAT(text, Not(HasSubstr(output.choices.at(0).text)));
}

TEST_F(OperationsTest, ReadinessComesWithTheFirstWorker) {
  FakeWorker worker("w");
  const int port = worker.port();
  worker.Stop();
  Start({&worker});
  HealthClient health = Health();
  const auto watch = health.StartWatch(kReadiness);
  EXPECT_EQ(health.Check(""), HealthCheckResponse::SERVING);
  EXPECT_EQ(health.Check("millrace.v1.NoService"), HealthCheckResponse::SERVICE_UNKNOWN);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  worker.Listen(port);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
}

TEST_F(OperationsTest, ADrainTellsWatchersWithin200MsWhileACallGoesOn) {
  FakeWorker worker("w");
  worker.SetSteps(1);
  Start({&worker});
  AwaitReady();
  HealthClient health = Health();
  EXPECT_EQ(health.Check(kReadiness), HealthCheckResponse::SERVING);
  const auto watch = health.StartWatch(kReadiness);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Request(300));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  const absl::Time begin = absl::Now();
  std::thread shutdown([this] { router_->Shutdown(std::chrono::seconds(1)); });
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_LT(absl::Now() - begin, absl::Milliseconds(200));
  EXPECT_EQ(watch->Next(), HealthCheckResponse::UNKNOWN) << "the watch ends";
  shutdown.join();
}

TEST_F(OperationsTest, IsNotReadyWhileItsWorkersMakeNoStep) {
  FakeWorker worker("w");
  worker.SetSteps(1);
  Start({&worker});
  AwaitReady();
  HealthClient health = Health();
  const auto watch = health.StartWatch(kReadiness);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Request(300));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  const absl::Time begin = absl::Now();
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_LT(absl::Now() - begin, absl::Milliseconds(2000 + 200 + 100));
  AwaitValue("millrace_stuck", 1);
  EXPECT_EQ(health.Check(""), HealthCheckResponse::SERVING);
  worker.SetSteps(FakeWorker::kFree);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
  while (reader->Read(&message)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(OperationsTest, WaitsForAPrefillThatTakesLongByTheWorkersOwnWord) {
  FakeWorker worker("w");
  worker.ready().mutable_step_cost()->set_prefill_token_us(200'000);  // a prompt of 5
  worker.SetSteps(0);
  Start({&worker});
  AwaitReady();
  HealthClient health = Health();
  const auto watch = health.StartWatch(kReadiness);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
  grpc::ClientContext context;
  const absl::Time begin = absl::Now();
  const auto reader = stub_->Generate(&context, Request(1));
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_GE(absl::Now() - begin, absl::Seconds(2.9)) << "1 s is predicted, so 3 s are in order";
  context.TryCancel();
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
}

std::vector<v1::WorkerStatus> ManyWorkers(int count) {
  std::vector<v1::WorkerStatus> workers(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    v1::WorkerStatus& worker = workers[static_cast<size_t>(i)];
    worker.set_address(absl::StrCat("10.0.0.1:", 1000 + i));
    worker.set_worker_id(absl::StrCat("worker-", i));
    worker.set_state(v1::WorkerStatus::STATE_READY);
  }
  return workers;
}

size_t CountSeries(const std::string& page) {
  size_t count = 0;
  for (const absl::string_view line : absl::StrSplit(page.substr(page.find("\r\n\r\n") + 4), '\n')) {
    count += !line.empty() && line[0] != '#';
  }
  return count;
}

TEST_F(OperationsTest, HoldsFewerThan2000SeriesWithAsManyWorkersAsMayBe) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  EXPECT_TRUE(Generate(Request(7)).status.ok());
  const size_t own = CountSeries(Scrape());
  MetricPage page;
  AddWorkerMetrics(ManyWorkers(1024), "tiny", &page);
  size_t of_workers = 0;
  for (const prometheus::MetricFamily& family : page.Take()) of_workers += family.metric.size();
  EXPECT_LE(own + of_workers, 2000u);
  EXPECT_GT(of_workers, 600u) << "64 of them have their own";
}

TEST_F(OperationsTest, NeverGivesTwoWorkersOneSeries) {
  std::vector<v1::WorkerStatus> workers = ManyWorkers(4);
  workers[1].set_worker_id("worker-0");
  workers[3].clear_worker_id();
  MetricPage page;
  AddWorkerMetrics(workers, "tiny", &page);
  std::set<std::string> names;
  for (const prometheus::MetricFamily& family : page.Take()) {
    if (family.name != "millrace_worker_ready") continue;
    for (const prometheus::ClientMetric& metric : family.metric) names.insert(metric.label[0].value);
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("10.0.0.1:1000", "10.0.0.1:1001", "worker-2", "10.0.0.1:1003"));
}

}  // namespace
}  // namespace millrace
