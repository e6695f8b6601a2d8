// Calls that end before they are done, in every phase of their lives, leave nothing behind. MILLRACE_CANCELS: how many.
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "tests/router/api/router_fixture.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

class CancelTest : public RouterTest {};

TEST_F(CancelTest, LeavesNothingBehindInAnyPhase) {
  constexpr int kThreads = 24;  // sixteen slots: the others wait in the queue
  const char* given = std::getenv("MILLRACE_CANCELS");
  const int num_calls = given != nullptr ? std::atoi(given) : 2'000;
  const uint64_t seed = TestSeed(3);
  FakeWorker first("first"), second("second");
  Start({&first, &second});
  AwaitReady();
  std::atomic<int> next{0}, cancelled{0}, late{0}, whole{0}, other{0};
  const auto call = [&](std::mt19937_64& rng) {
    v1::GenerateRequest request = Request(1 + static_cast<int>(rng() % 40), rng());
    for (uint64_t i = rng() % 60; i > 0; --i)
      request.mutable_token_ids()->add_ids(20 + static_cast<int32_t>(rng() % 2));
    request.mutable_sampling()->set_n(1 + static_cast<int>(rng() % 2));
    grpc::ClientContext context;
    const uint64_t how = rng() % 4;
    if (how == 0) context.set_deadline(std::chrono::system_clock::now() + std::chrono::microseconds(rng() % 4'000));
    const auto reader = stub_->Generate(&context, request);
    int reads = how == 1 ? 0 : how == 2 ? 1 + static_cast<int>(rng() % 10) : INT32_MAX;
    v1::GenerateResponse message;
    while (reads-- > 0 && reader->Read(&message)) {
    }
    if (how == 1 || how == 2) context.TryCancel();
    switch (reader->Finish().error_code()) {
      case grpc::StatusCode::OK:
        ++whole;
        break;
      case grpc::StatusCode::CANCELLED:
        ++cancelled;
        break;
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        ++late;
        break;
      default:
        ++other;
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 rng(seed + thread);
      while (next++ < num_calls) call(rng);
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitIdle();
  std::printf("%d cancelled, %d past their deadlines, %d whole\n", cancelled.load(), late.load(), whole.load());
  EXPECT_EQ(other, 0);
  EXPECT_GT(cancelled, num_calls / 8);
  EXPECT_GT(late, 0);
  EXPECT_GT(whole, num_calls / 8);
  const v1::GetStatusResponse status = Status();
  for (const auto& worker : status.workers()) {
    EXPECT_EQ(worker.free_blocks() + worker.cached_blocks(), worker.num_blocks()) << worker.worker_id();
    EXPECT_EQ(worker.last_error(), "");
  }
  EXPECT_EQ(first.num_hellos() + second.num_hellos(), 2) << "a stream was lost";
}

}  // namespace
}  // namespace millrace
