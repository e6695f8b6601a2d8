// The commands driven whole against a router of the test's own.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>

#include "cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/cli_fake_router.h"
#include "tests/fixtures.h"

namespace millrace {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Outcome {
  int code;
  std::string out, err;
  std::vector<json> lines() const {
    std::vector<json> list;
    std::istringstream stream(out);
    for (std::string line; std::getline(stream, line);) list.push_back(json::parse(line));
    return list;
  }
};

Outcome Drive(int (*command)(Words, Terminal), std::vector<std::string> words, const std::string& in = "") {
  std::istringstream input(in);
  std::ostringstream out, err;
  const int code = command(words, {input, out, err});
  return {code, out.str(), err.str()};
}

TEST(Complete, AnswersEveryLineWithWhatTheRouterSaid) {
  FakeRouter router;
  const Outcome outcome =
      Drive(RunComplete, {"--router", router.address(), "--jsonl"},
            R"({"prompt": "hello", "max_tokens": 3, "seed": 7, "logprobs": 1, "prompt_logprobs": 0})");
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  const json line = outcome.lines().at(0);
  EXPECT_EQ(line["token_ids"], json({0, 1, 2}));
  EXPECT_EQ(line["text"], "hello!");
  EXPECT_EQ(line["finish_reason"], "length");
  EXPECT_EQ(line["cached_tokens"], 16);
  EXPECT_EQ(line["seed"], 7);
  EXPECT_EQ(line["worker"], "worker-0");
  EXPECT_EQ(line["logprobs"].size(), 3u);
  EXPECT_EQ(line["logprobs"][0]["logprob"], -0.5);
  EXPECT_EQ(line["prompt_logprobs"][0]["token_id"], 4);
}

TEST(Complete, KeepsTheOrderOfLinesUnderConcurrency) {
  FakeRouter router;
  router.others = 3;
  std::string in = R"({"prompt": "0", "request_id": "last"})";
  for (int i = 1; i < 20; ++i) in += "\n{\"prompt\": \"" + std::to_string(i) + "\"}";
  const auto lines = Drive(RunComplete, {"--router=" + router.address(), "--jsonl", "--concurrency", "4"}, in).lines();
  ASSERT_EQ(lines.size(), 20u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(lines[i]["text"], std::to_string(i) + "!");
}

TEST(Complete, TurnsFailuresIntoLinesAndGoesOn) {
  FakeRouter router;
  const auto lines = Drive(RunComplete, {"--router", router.address(), "--jsonl"},
                           "{broken\n"
                           "\n"
                           "{\"prompt\": \"a\", \"what\": 1}\n"
                           "{\"prompt\": \"a\", \"model\": \"missing\"}\n"
                           "{\"prompt\": \"a\"}\n")
                         .lines();
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0]["error"], "INVALID_ARGUMENT");
  EXPECT_EQ(lines[1]["error"], "INVALID_ARGUMENT");
  EXPECT_THAT(lines[1]["message"].get<std::string>(), HasSubstr("what"));
  EXPECT_EQ(lines[2], json({{"error", "NOT_FOUND"}, {"message", "no model 'missing'"}}));
  EXPECT_EQ(lines[3]["finish_reason"], "stop");
}

TEST(Complete, WritesAsciiLinesWhateverTheText) {
  FakeRouter router;
  const Outcome outcome = Drive(RunComplete, {"--router", router.address(), "--jsonl"}, "{\"prompt\": \"é\u2028\"}");
  EXPECT_THAT(outcome.out, HasSubstr("\"\\u00e9\\u2028!\""));
}

TEST(Complete, ListsChoicesWhereSeveralAreAsked) {
  FakeRouter router;
  const json line =
      Drive(RunComplete, {"--router", router.address(), "--jsonl"}, R"({"token_ids": [3], "n": 3, "seed": 5})")
          .lines()
          .at(0);
  ASSERT_EQ(line["choices"].size(), 3u);
  EXPECT_EQ(line["choices"][2]["token_ids"], json({20, 21, 22}));
  EXPECT_EQ(line["choices"][2]["seed"], 7);
}

TEST(Complete, PrintsTheTextOfOnePrompt) {
  FakeRouter router;
  EXPECT_EQ(Drive(RunComplete, {"--router", router.address(), "say it"}).out, "say it!\n");
  EXPECT_EQ(Drive(RunComplete, {"--router", router.address(), "--prompt", "-", "--max_tokens=4"}, "from\nstdin").out,
            "from\nstdin!\n");
  EXPECT_EQ(router.requests().at(1).sampling().max_tokens(), 4);
  const Outcome failed = Drive(RunComplete, {"--router", router.address(), "--model", "missing", "x"});
  EXPECT_EQ(failed.code, kExitFailed);
  EXPECT_THAT(failed.err, HasSubstr("NOT_FOUND: no model 'missing'"));
}

TEST(Complete, RefusesWrongUsageBeforeItConnects) {
  for (const std::vector<std::string>& words : {std::vector<std::string>{},
                                                {"--jsonl", "text"},
                                                {"--router", "nowhere", "x"},
                                                {"x", "--concurrency", "2"},
                                                {"--max_token", "1"}}) {
    EXPECT_EQ(Drive(RunComplete, words).code, kExitUsage) << (words.empty() ? "" : words[0]);
  }
}

TEST(Connect, SaysWhomItCannotReach) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);  // bound, never listening: connections are refused
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string where = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  for (const auto command : {RunComplete, RunStatus, RunBench, RunChat}) {
    std::vector<std::string> words = {"--router", where};
    if (command == RunComplete) words.push_back("x");
    const Outcome outcome = Drive(command, words);
    EXPECT_EQ(outcome.code, kExitFailed);
    EXPECT_THAT(outcome.err, HasSubstr("cannot reach " + where + ": "));
  }
  close(fd);
}

TEST(Chat, RemembersTheConversationAndItsSystemMessage) {
  FakeRouter router;
  const Outcome outcome =
      Drive(RunChat, {"--router", router.address()}, "/system be short\none\ntwo\n/reset\nthree\n/quit\nfour\n");
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_EQ(outcome.out, "one!\ntwo!\nthree!\n");
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("tok/s"), HasSubstr("prompt 20"), HasSubstr("cached 16")));
  const auto requests = router.requests();
  ASSERT_EQ(requests.size(), 3u);
  ASSERT_EQ(requests[1].chat().messages_size(), 4);
  EXPECT_EQ(requests[1].chat().messages(0).content(), "be short");
  EXPECT_EQ(requests[1].chat().messages(2).role(), "assistant");
  EXPECT_EQ(requests[1].chat().messages(2).content(), "one!");
  EXPECT_EQ(requests[2].chat().messages_size(), 2);
}

TEST(Status, ShowsATableOrJson) {
  FakeRouter router;
  EXPECT_THAT(Drive(RunStatus, {"--router", router.address()}).out,
              AllOf(HasSubstr("fake-router"), HasSubstr("READY"), HasSubstr("0/8")));
  EXPECT_EQ(Drive(RunStatus, {"--router", router.address(), "--json"}).lines().at(0)["workers"][0]["num_slots"], 8);
}

TEST(Bench, MeasuresBothLoops) {
  FakeRouter router;
  for (const std::vector<std::string>& loop : {std::vector<std::string>{"--concurrency=5"}, {"--rate=2000"}}) {
    const Outcome outcome = Drive(RunBench, {"--router", router.address(), "--max_requests=40", "--input_tokens=9",
                                             "--output_tokens=3", "--json=-", "--ttft_slo_ms=60000", loop[0]});
    ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
    const json summary = outcome.lines().at(0);
    EXPECT_EQ(summary["completed"], 40);
    EXPECT_EQ(summary["output_tokens"], 120);
    EXPECT_EQ(summary["hit_rate"], 0.8);
    EXPECT_EQ(summary["within_slo"], 1);
    EXPECT_GT(summary["ttft_ms"]["p99"], 0);
    EXPECT_GE(summary["end_to_end_ms"]["p50"], summary["ttft_ms"]["p50"]);
  }
  const auto requests = router.requests();
  ASSERT_EQ(requests.size(), 80u);
  EXPECT_EQ(requests[0].token_ids().ids_size(), 9);
  EXPECT_TRUE(requests[0].sampling().ignore_eos());
}

TEST(Bench, CountsFromTheIntendedStart) {
  FakeRouter router;
  router.others = 0;
  const json summary =
      Drive(RunBench, {"--router", router.address(), "--max_requests=200", "--rate=1000000", "--json=-"}).lines().at(0);
  // All are due within a millisecond or so; the last are sent late, and that delay is part of their latency.
  EXPECT_GE(summary["ttft_ms"]["max"], summary["late_ms"]["p50"]);
  EXPECT_GT(summary["late_ms"]["max"], 0);
}

TEST(Bench, RefusesOptionsThatDoNotFit) {
  for (const std::vector<std::string>& words : {std::vector<std::string>{"--rate=1", "--concurrency=2"},
                                                {"--workload=trace"},
                                                {"--workload=other"},
                                                {"--groups=3"},
                                                {"--trace=/nonexistent"}}) {
    EXPECT_EQ(Drive(RunBench, words).code, kExitUsage) << words[0];
  }
}

TEST(Tokenize, GoesBothWaysAndRendersChats) {
  const std::string model = Fixture("qwen3-tiny-untied").string();
  const auto lines = Drive(RunTokenize, {"--model", model, "--jsonl"},
                           "{\"text\": \"ab<|im_end|>\"}\n"
                           "{\"text\": \"ab<|im_end|>\", \"special_as_text\": true}\n"
                           "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n"
                           "{\"text\": \"a\", \"oops\": 1}\n"
                           "nonsense\n")
                         .lines();
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_LT(lines[0]["token_ids"].size(), lines[1]["token_ids"].size());
  EXPECT_THAT(lines[2]["prompt"].get<std::string>(), HasSubstr("<|im_start|>user\nhi<|im_end|>"));
  EXPECT_EQ(lines[3]["error"], "INVALID_ARGUMENT");
  EXPECT_THAT(lines[3]["message"].get<std::string>(), HasSubstr("oops"));
  EXPECT_EQ(lines[4]["error"], "INVALID_ARGUMENT");
  for (const bool skip : {false, true}) {
    json request = {{"token_ids", lines[0]["token_ids"]}, {"skip_special_tokens", skip}};
    const json text = Drive(RunTokenize, {"--model", model, "--jsonl"}, request.dump()).lines().at(0);
    EXPECT_EQ(text["text"], skip ? "ab" : "ab<|im_end|>");
  }
}

TEST(Up, ChecksEverythingBeforeItStartsAnything) {
  const std::string model = Fixture("qwen3-tiny-untied").string();
  for (const std::vector<std::string>& words : {std::vector<std::string>{},
                                                {"--model", "/nonexistent"},
                                                {"--model", model, "--workers", "0"},
                                                {"--model", model, "--port", "65536"},
                                                {"--model", model, "--kv_memory", "much"},
                                                {"--model", model, "--host", "no such host"},
                                                {"--model", model, "--host", "0.0.0.0"}}) {
    const Outcome outcome = Drive(RunUp, words);
    EXPECT_EQ(outcome.code, kExitUsage) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }
}

TEST(Up, SaysWhichPortIsTaken) {
  FakeRouter other;
  const std::string port = other.address().substr(other.address().find(':') + 1);
  const Outcome outcome = Drive(RunUp, {"--model", Fixture("qwen3-tiny-untied").string(), "--port", port});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.err, HasSubstr("port " + port + " of 127.0.0.1 is taken"));
}

}  // namespace
}  // namespace millrace
