#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/memory_file.h"
#include "service/once_a_minute.h"
#include "service/probe_server.h"
#include "service/tokens.h"
#include "service/watched_files.h"
#include "tests/health_client.h"

namespace millrace {
namespace {

using testing::HasSubstr;
using testing::Not;

class TokensTest : public testing::Test {
 protected:
  ~TokensTest() override { std::filesystem::remove(path_); }

  absl::StatusOr<std::unique_ptr<Tokens>> Open(const std::string& text) {
    std::ofstream(path_) << text;
    return Tokens::Open(path_);
  }
  std::string Refusal(const std::string& text) { return std::string(Open(text).status().message()); }

  const std::string path_ = absl::StrCat(testing::TempDir(), "/tokens-", getpid());
};

const std::string kToken = "0123456789abcdef", kOther = "ABCDEF0123456789-._~+/=";

TEST_F(TokensTest, KnowsItsTokensAndTheirTenants) {
  const auto tokens = *Open(absl::StrCat("# comment\n\n", kToken, "\n  ", kOther, "\tthe-tenant \r\n"));
  EXPECT_EQ(tokens->Find(kToken), "");
  EXPECT_EQ(tokens->Find(kOther), "the-tenant");
}

TEST_F(TokensTest, TakesNothingThatIsOnlyLikeAToken) {
  const auto tokens = *Open(kToken + "\n");
  for (const std::string& given :
       {std::string(), kToken.substr(1), kToken.substr(0, 15), kToken + "0", kToken + kToken, std::string("the-tenant"),
        std::string("0123456789abcdeg"), kToken + std::string(1, '\0'), std::string(1 << 20, 'a')}) {
    EXPECT_EQ(tokens->Find(given), std::nullopt) << given.substr(0, 40);
  }
}

TEST_F(TokensTest, RefusesAFileWithoutShowingIt) {
  const std::string secret(15, 's');
  EXPECT_THAT(Refusal(secret), testing::AllOf(HasSubstr("line 1"), HasSubstr("15 bytes"), Not(HasSubstr(secret))));
  EXPECT_THAT(Refusal("\n" + kToken + "\n" + kToken), HasSubstr("line 3"));
  EXPECT_THAT(Refusal(kToken + " a b"), HasSubstr("3 words"));
  EXPECT_THAT(Refusal(kToken + "\x01"), HasSubstr("other than letters"));
  EXPECT_THAT(Refusal(kToken + " " + std::string(129, 't')), HasSubstr("the limit is 128"));
  EXPECT_THAT(Refusal("# nothing\n"), HasSubstr("there is no token"));
  EXPECT_THAT(Refusal(std::string((1 << 20) + 1, '#')), HasSubstr("1048576"));
}

TEST(BearerToken, IsTakenFromOneWellFormedEntryAlone) {
  using Metadata = std::multimap<grpc::string_ref, grpc::string_ref>;
  EXPECT_EQ(BearerToken(Metadata{{"authorization", "Bearer abc"}}), "abc");
  EXPECT_EQ(BearerToken(Metadata{{"authorization", "bearer  abc "}}), "abc");
  EXPECT_EQ(BearerToken(Metadata{}), std::nullopt);
  EXPECT_EQ(BearerToken(Metadata{{"authorization", "Basic abc"}}), std::nullopt);
  EXPECT_EQ(BearerToken(Metadata{{"authorization", "Bearerabc"}}), std::nullopt);
  EXPECT_EQ(BearerToken(Metadata{{"authorization", "Bearer a"}, {"authorization", "Bearer b"}}), std::nullopt);
}

TEST(WatchedFiles, TellsOfAReplacedFile) {
  const std::string path = absl::StrCat(testing::TempDir(), "/watched-", getpid());
  std::ofstream(path) << "old";
  absl::Mutex mutex;
  std::string seen;
  {
    const WatchedFiles watch({path}, WatchedFiles::Read({path}), [&](const WatchedFiles::Contents& contents) {
      const absl::MutexLock lock(&mutex);
      seen = contents->front();
    });
    std::ofstream(path + ".new") << "new";
    std::filesystem::rename(path + ".new", path);
    const absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(
        +[](std::string* text) { return !text->empty(); }, &seen));
  }
  EXPECT_EQ(seen, "new");
  std::filesystem::remove(path);
}

TEST(MemoryFile, IsReplacedWholeUnderItsPath) {
  MemoryFile file;
  ASSERT_TRUE(file.Replace("old").ok());
  const std::string path = file.path();
  const std::string large(100'000, 'x');
  ASSERT_TRUE(file.Replace(large).ok());
  EXPECT_EQ(WatchedFiles::Read({path})->front(), large);
  ASSERT_TRUE(file.Replace("").ok());
  EXPECT_EQ(file.path(), path);
  EXPECT_EQ(WatchedFiles::Read({path})->front(), "");
}

TEST(OnceAMinute, SaysOneOfAKeyAndHowManyItKeptBack) {
  OnceAMinute said;
  const absl::Time now = absl::FromUnixSeconds(1'000'000);
  EXPECT_EQ(said.Say("a", now), 0);
  EXPECT_EQ(said.Say("a", now + absl::Seconds(59)), std::nullopt);
  EXPECT_EQ(said.Say("b", now), 0);
  EXPECT_EQ(said.Say("a", now + absl::Seconds(60)), 1);
  EXPECT_EQ(said.Say("a", now + absl::Seconds(120)), 0);
}

TEST(OnceAMinute, ForgetsToStayWithinItsBound) {
  OnceAMinute said;
  const absl::Time now = absl::FromUnixSeconds(1'000'000);
  for (size_t i = 0; i < OnceAMinute::kMaxKeys; ++i) EXPECT_EQ(said.Say(absl::StrCat(i), now), 0);
  EXPECT_EQ(said.Say("one more", now), std::nullopt);
  EXPECT_EQ(said.Say("one more", now + absl::Minutes(1)), 0);
}

TEST(ProbeServer, SaysWhatHealthSays) {
  HealthService health;
  health.SetServing("service", false);
  const auto probe = *ProbeServer::Start("127.0.0.1:0", &health);
  HealthClient client(probe->address());
  EXPECT_EQ(client.Check(""), HealthCheckResponse::SERVING);
  EXPECT_EQ(client.Check("service"), HealthCheckResponse::NOT_SERVING);
  health.SetServing("service", true);
  EXPECT_EQ(client.Check("service"), HealthCheckResponse::SERVING);
}

// Takes a thread of gRPC's for each call until it is released.
class Blocking final : public grpc::health::v1::Health::CallbackService {
 public:
  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const HealthCheckRequest*,
                                  HealthCheckResponse*) override {
    begun_.DecrementCount();
    released_.WaitForNotification();
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  // As many as gRPC has threads for handlers.
  const int threads_ = std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 2, 16);
  absl::BlockingCounter begun_{threads_};
  absl::Notification released_;
};

TEST(ProbeServer, AnswersWhileAllOtherThreadsAreTaken) {
  Blocking blocking;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&blocking);
  const auto server = builder.BuildAndStart();
  HealthService health;
  const auto probe = *ProbeServer::Start("127.0.0.1:0", &health);
  std::vector<std::thread> callers;
  for (int i = 0; i < blocking.threads_; ++i) {
    callers.emplace_back([&] { HealthClient(absl::StrCat("127.0.0.1:", port)).Check(""); });
  }
  blocking.begun_.Wait();
  EXPECT_EQ(HealthClient(probe->address()).Check(""), HealthCheckResponse::SERVING);
  blocking.released_.Notify();
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace millrace
