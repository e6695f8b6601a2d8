#include "router/fleet/resolver.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using testing::Contains;
using testing::ElementsAre;

TEST(Resolver, AsksAgainAndKeepsQuietAboutFailures) {
  absl::Mutex mutex;
  std::vector<std::vector<std::string>> found;
  int questions = 0;
  {
    Resolver resolver(
        {{"workers", 5}}, absl::Milliseconds(1),
        [&](const Address& service) -> absl::StatusOr<std::vector<std::string>> {
          EXPECT_EQ(service.ToString(), "workers:5");
          absl::MutexLock lock(&mutex);
          if (++questions == 2) return absl::UnavailableError("no name server");
          return std::vector<std::string>{"b:5", "a:5", "b:5"};
        },
        [&](const Address& service, std::vector<std::string> addresses) {
          EXPECT_EQ(service.host, "workers");
          absl::MutexLock lock(&mutex);
          found.push_back(std::move(addresses));
        });
    absl::MutexLock lock(&mutex);
    const auto twice = [&] { return found.size() >= 2; };
    mutex.Await(absl::Condition(&twice));
    EXPECT_GE(questions, 3);
  }
  for (const auto& addresses : found) EXPECT_THAT(addresses, ElementsAre("a:5", "b:5"));
}

TEST(Resolver, TheSystemKnowsThisMachine) {
  const auto addresses = LookUpHost({"127.0.0.1", 81});
  ASSERT_TRUE(addresses.ok()) << addresses.status();
  EXPECT_THAT(*addresses, Contains("127.0.0.1:81"));
}

}  // namespace
}  // namespace millrace
