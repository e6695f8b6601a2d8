// The plumbing both services share.
#include "gtest/gtest.h"
#include "service/address.h"

namespace millrace {
namespace {

TEST(Address, ReadsHostsAndPorts) {
  for (const char* text : {"127.0.0.1:50051", "localhost:0", "[::1]:65535", "worker-0.pods:1"}) {
    const auto address = ParseAddress(text);
    ASSERT_TRUE(address.ok()) << text;
    EXPECT_EQ(address->ToString(), text);
  }
  EXPECT_TRUE(ParseAddress("127.8.9.1:1")->IsLoopback());
  EXPECT_TRUE(ParseAddress("[::1]:1")->IsLoopback());
  EXPECT_FALSE(ParseAddress("0.0.0.0:1")->IsLoopback());
  EXPECT_FALSE(ParseAddress("127.evil.example:1")->IsLoopback());
}

TEST(Address, RefusesWhatIsNotOne) {
  for (const char* text : {"", ":", "host", "host:", ":1", "host:65536", "host:-1", "host:+1", "host: 1", "::1:80",
                           "[x]:1", "unix:/tmp/x", "a b:1", "host:1x", "host:000001"}) {
    EXPECT_FALSE(ParseAddress(text).ok()) << text;
  }
}

}  // namespace
}  // namespace millrace
