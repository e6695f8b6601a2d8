#include "worker/api/execute_service.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/health_client.h"
#include "tests/http_get.h"
#include "tests/worker/engine/edits.h"
#include "tests/worker/engine/fake_model.h"
#include "worker/api/execute_stream.h"
#include "worker/api/worker_server.h"

namespace millrace::testing {
namespace {

using ::testing::HasSubstr;
using worker::v1::Edit;
using worker::v1::RouterMessage;
using worker::v1::StepReport;
using worker::v1::WorkerMessage;

class Client {
 public:
  explicit Client(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);            // whose window does not grow
    stub_ = worker::v1::WorkerService::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream_ = stub_->Execute(&context_);
  }
  ~Client() {
    context_.TryCancel();
    if (stream_ != nullptr) (void)End();
  }

  void Hello(uint64_t epoch) {
    RouterMessage message;
    message.mutable_hello()->set_router_id("router");
    message.mutable_hello()->set_epoch(epoch);
    Write(message);
  }
  void Send(const Edit& edit) {
    RouterMessage message;
    *message.mutable_edit() = edit;
    Write(message);
  }
  void Write(const RouterMessage& message) { stream_->Write(message); }

  // Hello, and the answer.
  worker::v1::Ready Greet(uint64_t epoch) {
    Hello(epoch);
    WorkerMessage message;
    EXPECT_TRUE(ReadsReady(&message));
    return message.ready();
  }
  // What the blocks hold comes first.
  bool ReadsReady(WorkerMessage* message) {
    while (stream_->Read(message) && message->has_cached()) cached_.push_back(message->cached());
    return message->has_ready();
  }
  bool ReadsReady() {
    WorkerMessage message;
    return ReadsReady(&message);
  }
  const std::vector<worker::v1::CachedBlocks>& cached() const { return cached_; }
  // Reads reports up to one that fits.
  StepReport ReadUntil(const std::function<bool(const StepReport&)>& fits) {
    WorkerMessage message;
    while (stream_->Read(&message)) {
      for (const auto& row : message.report().rows()) {
        tokens_.insert(tokens_.end(), row.token_ids().begin(), row.token_ids().end());
      }
      if (fits(message.report())) return message.report();
    }
    ADD_FAILURE() << "the stream has ended";
    return {};
  }
  worker::v1::Goodbye ReadGoodbye() {
    WorkerMessage message;
    while (stream_->Read(&message)) {
      if (message.has_goodbye()) return message.goodbye();
    }
    ADD_FAILURE() << "the stream has ended";
    return {};
  }
  std::vector<int32_t> ReadTokens() {
    ReadUntil([](const StepReport& report) { return report.rows_size() > 0 && report.rows(0).finish_reason() != 0; });
    return std::exchange(tokens_, {});
  }
  void HalfClose() { stream_->WritesDone(); }
  void Cancel() { context_.TryCancel(); }
  grpc::Status End() {
    WorkerMessage message;
    while (stream_->Read(&message)) {
    }
    const grpc::Status status = stream_->Finish();
    stream_ = nullptr;
    return status;
  }

 private:
  std::unique_ptr<worker::v1::WorkerService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<RouterMessage, WorkerMessage>> stream_;
  std::vector<int32_t> tokens_;
  std::vector<worker::v1::CachedBlocks> cached_;
};

class ExecuteServiceTest : public ::testing::Test {
 protected:
  ExecuteServiceTest() { Open(SmallLimits()); }

  void Open(const EngineLimits& limits) {
    EngineOptions options;
    options.limits = limits;
    worker::v1::Ready ready;
    ready.set_worker_id("a worker");
    ready.set_num_slots(8);
    auto model = std::make_unique<FakeModel>(limits);
    model_ = model.get();
    auto engine = std::make_unique<Engine>(std::move(model), options);
    auto worker = WorkerServer::Serve(
        std::move(engine), ready, *WorkerAccess::Open({}, {}),
        {.listen = "127.0.0.1:0", .metrics_listen = "127.0.0.1:0", .probe_listen = "", .otlp_endpoint = ""},
        absl::Milliseconds(20));
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }

  FakeModel* model_ = nullptr;
  std::unique_ptr<WorkerServer> worker_;
};

TEST_F(ExecuteServiceTest, GreetsAndServes) {
  Client client(worker_->address());
  EXPECT_EQ(client.Greet(1).worker_id(), "a worker");
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 4), 110)}));
  EXPECT_EQ(client.ReadTokens(), FakeModel::Generate(Prompt(100), 10));
  client.HalfClose();
  EXPECT_TRUE(client.End().ok());
}

TEST_F(ExecuteServiceTest, CountsItsSteps) {
  Client client(worker_->address());
  client.Greet(1);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 4), 110)}));
  client.ReadTokens();
  const std::string page = HttpGet(worker_->metrics_address(), "/metrics");
  for (const char* line :
       {"millrace_engine_generated_tokens_total 10", "millrace_engine_prefill_tokens_total 100",
        "millrace_engine_admissions_total 1", "millrace_engine_edits_total 1", "millrace_engine_streams_total 1",
        "millrace_engine_finished_total{reason=\"length\"} 1", "millrace_engine_router_connected 1",
        "millrace_engine_slots 8", "millrace_engine_progress_age_seconds 0", "millrace_stuck 0", "millrace_ready 1"}) {
    EXPECT_THAT(page, HasSubstr("\n" + std::string(line) + "\n"));
  }
  const auto steps = static_cast<int64_t>(model_->rows_of_steps().size());
  EXPECT_THAT(page, HasSubstr("\nmillrace_engine_steps_total " + std::to_string(steps) + "\n"));
  EXPECT_THAT(page, HasSubstr("\nmillrace_engine_step_seconds_count " + std::to_string(steps) + "\n"));
}

TEST_F(ExecuteServiceTest, IsNotReadyWhileAStepDoesNotEnd) {
  const std::string service = "millrace.worker.v1.WorkerService";
  HealthClient health(worker_->address());
  const auto watch = health.StartWatch(service);
  HealthCheckResponse::ServingStatus status;
  while ((status = watch->Next()) == HealthCheckResponse::NOT_SERVING) {
  }
  EXPECT_EQ(status, HealthCheckResponse::SERVING);
  model_->CloseGate();
  Client client(worker_->address());
  client.Greet(1);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 4), 110)}));
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(health.Check(""), HealthCheckResponse::SERVING);
  model_->OpenGate();
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
  client.ReadTokens();
}

TEST_F(ExecuteServiceTest, SendsHeartbeatsWhenIdleAndDuringALongStep) {
  Client client(worker_->address());
  client.Greet(1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.ReadUntil([](const StepReport&) { return true; }).step_us(), 0u);
  model_->CloseGate();
  model_->LetSteps(1);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 4), 110)}));
  client.ReadUntil([](const StepReport& report) { return report.step() == 1 && report.step_us() > 0; });
  for (int i = 0; i < 3; ++i) {
    const StepReport heartbeat = client.ReadUntil([](const StepReport&) { return true; });
    EXPECT_EQ(heartbeat.step(), 1u);
    EXPECT_EQ(heartbeat.applied_edit(), 1u);
    EXPECT_EQ(heartbeat.step_us(), 0u);
  }
  model_->OpenGate();
  client.ReadTokens();
}

// A new router first hears what the blocks hold, and that is known when the old one's step has ended: no heartbeat
// before.
TEST_F(ExecuteServiceTest, ANewRouterHearsNothingBeforeReady) {
  Client older(worker_->address()), newer(worker_->address());
  older.Greet(1);
  model_->CloseGate();
  older.Send(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 4), 110)}));
  older.ReadUntil([](const StepReport& report) { return report.applied_edit() == 1; });
  newer.Hello(2);
  EXPECT_EQ(older.End().error_code(), grpc::StatusCode::ABORTED);
  model_->OpenGate();
  WorkerMessage message;
  EXPECT_TRUE(newer.ReadsReady(&message));
}

TEST_F(ExecuteServiceTest, LeavesOnceTheRouterHasEmptiedIt) {
  Client client(worker_->address());
  client.Greet(1);
  model_->CloseGate();
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0, 1}, 40), MakeAdmit(1, Prompt(30, 5), {2, 3}, 64)}));
  client.ReadUntil([](const StepReport& report) { return report.applied_edit() == 1; });
  std::thread leaving([&] { worker_->Drain(absl::Seconds(60)); });
  EXPECT_EQ(client.ReadGoodbye().budget_ms(), 60'000u);
  Client late(worker_->address());
  late.Hello(2);
  EXPECT_EQ(late.End().error_code(), grpc::StatusCode::UNAVAILABLE);
  client.Send(MakeEdit(2, {}, {1}));
  model_->OpenGate();
  EXPECT_GE(client.ReadTokens().size(), 10u);
  EXPECT_TRUE(client.End().ok());
  leaving.join();
}

TEST_F(ExecuteServiceTest, LeavesAtOnceWithoutARouter) { worker_->Drain(absl::Hours(1)); }

TEST_F(ExecuteServiceTest, LeavesARouterThatDoesNothingAfterTheBudget) {
  Client client(worker_->address());
  client.Greet(1);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0}, 200)}));  // stalls, and stays
  client.ReadUntil([](const StepReport& report) { return report.stalled_slots_size() == 1; });
  worker_->Drain(absl::ZeroDuration());
  EXPECT_TRUE(client.End().ok());
}

TEST_F(ExecuteServiceTest, AHigherEpochFencesOffTheOlderOne) {
  Client older(worker_->address()), newer(worker_->address());
  older.Greet(3);
  older.Send(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0, 1}, 60)}));
  newer.Greet(4);
  EXPECT_EQ(older.End().error_code(), grpc::StatusCode::ABORTED);
  newer.Send(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(newer.ReadTokens(), FakeModel::Generate(Prompt(50), 5));
}

TEST_F(ExecuteServiceTest, TellsTheNextRouterWhatItsBlocksHold) {
  {
    Client client(worker_->address());
    client.Greet(1);
    EXPECT_TRUE(client.cached().empty());
    client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(2 * kBlockTokens + 3), {4, 6, 5}, 2 * kBlockTokens + 5)}));
    client.ReadTokens();
  }
  Client next(worker_->address());
  next.Greet(2);
  ASSERT_EQ(next.cached().size(), 1u);
  ASSERT_EQ(next.cached()[0].blocks_size(), 2);
  EXPECT_EQ(next.cached()[0].blocks(0).block(), 4u);
  EXPECT_EQ(next.cached()[0].blocks(1).block(), 6u);
  EXPECT_EQ(next.cached()[0].blocks(1).parent(), 4u);
  EXPECT_EQ(next.cached()[0].blocks(1).token_ids(0), Prompt(2 * kBlockTokens)[kBlockTokens]);
}

TEST_F(ExecuteServiceTest, RefusesTheSameAndALowerEpoch) {
  Client current(worker_->address());
  current.Greet(5);
  for (const uint64_t epoch : {5, 4}) {
    Client other(worker_->address());
    other.Hello(epoch);
    const grpc::Status status = other.End();
    EXPECT_EQ(status.error_code(), epoch == 5 ? grpc::StatusCode::FAILED_PRECONDITION : grpc::StatusCode::ABORTED);
    EXPECT_THAT(status.error_message(),
                HasSubstr("hello.epoch is " + std::to_string(epoch) + "; the limit is above 5"));
  }
  current.Send(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(current.ReadTokens(), FakeModel::Generate(Prompt(50), 5));
}

TEST_F(ExecuteServiceTest, ARouterComesBackWithItsEpochButNotWithAnOlderOne) {
  {
    Client client(worker_->address());
    client.Greet(5);
    client.HalfClose();
    EXPECT_TRUE(client.End().ok());
  }
  {
    Client older(worker_->address());
    older.Hello(4);
    EXPECT_EQ(older.End().error_code(), grpc::StatusCode::ABORTED);
  }
  Client client(worker_->address());
  client.Greet(5);
}

TEST_F(ExecuteServiceTest, ABadEditEndsTheStreamAndANewStreamWorks) {
  const std::vector<std::pair<Edit, std::string>> bad = {
      {MakeEdit(1, {MakeAdmit(8, Prompt(10), {0}, 20)}), "admit[0].slot is 8; the limits are 0 and 7"},
      {MakeEdit(7), "edit_id is 7; the limit is 1"},
      {MakeEdit(1, {MakeAdmit(0, Prompt(10), {0}, 20), MakeAdmit(1, Prompt(10), {0}, 20)}), "block 0 to write"},
  };
  uint64_t epoch = 0;
  for (const auto& [edit, message] : bad) {
    Client client(worker_->address());
    client.Greet(++epoch);
    client.Send(edit);
    const grpc::Status status = client.End();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(message));
  }
  Client client(worker_->address());
  client.Greet(++epoch);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(client.ReadTokens(), FakeModel::Generate(Prompt(50), 5));
}

TEST_F(ExecuteServiceTest, WantsAHelloFirstAndOnce) {
  const auto status_of = [&](const std::function<void(Client&)>& talk) {
    Client client(worker_->address());
    talk(client);
    const grpc::Status status = client.End();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    return status.error_message();
  };
  EXPECT_THAT(status_of([](Client& c) { c.Send(MakeEdit(1)); }), HasSubstr("the first one is a hello"));
  EXPECT_THAT(status_of([](Client& c) { c.Write({}); }), HasSubstr("message is empty"));
  EXPECT_THAT(status_of([](Client& c) { c.Hello(0); }), HasSubstr("hello.epoch is 0"));
  EXPECT_THAT(status_of([](Client& c) { c.Greet(1), c.Hello(2); }), HasSubstr("hello comes twice"));
  EXPECT_THAT(status_of([](Client& c) {
                RouterMessage message;
                message.mutable_hello()->set_router_id(std::string(129, 'x'));
                c.Write(message);
              }),
              HasSubstr("hello.router_id has 129 bytes"));
}

TEST_F(ExecuteServiceTest, AClientThatVanishesReleasesItsSlots) {
  {
    Client client(worker_->address());
    client.Greet(1);
    client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(30), {0}, 200)}));  // stalls, and stays
    client.ReadUntil([](const StepReport& report) { return report.stalled_slots_size() == 1; });
    client.Cancel();
  }
  Client client(worker_->address());
  client.Greet(2);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(50), {0, 1}, 55)}));
  EXPECT_EQ(client.ReadTokens(), FakeModel::Generate(Prompt(50), 5));
}

// The engine never waits for a router: one that does not read loses its stream, and only that.
TEST_F(ExecuteServiceTest, ARouterThatDoesNotReadIsCutOff) {
  Open({.num_slots = 8,
        .num_blocks = 512,
        .vocab_size = 100,
        .max_context = 2048,
        .max_rows = 64,
        .max_logit_rows = 16});
  Client deaf(worker_->address());
  deaf.Greet(1);
  std::vector<worker::v1::Admit> admits;
  for (uint32_t slot = 0; slot < 8; ++slot) {
    admits.push_back(MakeAdmit(slot, Prompt(20), Blocks(slot * 64, 64), 2048));
    admits.back().mutable_sampling()->set_logprobs(20);
  }
  deaf.Send(MakeEdit(1, admits));
  // Its epoch is free again as soon as it has been cut off.
  for (bool cut_off = false; !cut_off;) {
    Client other(worker_->address());
    other.Hello(1);
    cut_off = other.ReadsReady();
  }
  const grpc::Status status = deaf.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
}

TEST_F(ExecuteServiceTest, ShutsDownWithAStreamOpen) {
  Client client(worker_->address());
  client.Greet(1);
  client.Send(MakeEdit(1, {MakeAdmit(0, Prompt(100), Blocks(0, 8), 250)}));
  worker_.reset();
  EXPECT_EQ(client.End().error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace millrace::testing
