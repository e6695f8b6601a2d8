// Requests that no honest client sends.
#include <random>

#include "grpcpp/generic/generic_stub.h"
#include "tests/router/api/router_fixture.h"

namespace millrace {
namespace {

using testing::HasSubstr;

class HostileTest : public RouterTest {
 protected:
  HostileTest() : worker_("w") {
    Start({&worker_});
    AwaitReady();
  }
  grpc::Status Send(const std::string& method, const std::string& bytes) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, nullptr);
    void* tag;
    bool ok;
    queue.Next(&tag, &ok);
    return status;
  }
  static constexpr char kGenerate[] = "/millrace.v1.InferenceService/Generate";

  FakeWorker worker_;
};

// A length-delimited field.
std::string Field(int number, const std::string& bytes) {
  std::string out(1, static_cast<char>(number << 3 | 2));
  for (size_t size = bytes.size();; size >>= 7) {
    if (size < 128) {
      out += static_cast<char>(size);
      break;
    }
    out += static_cast<char>((size & 127) | 128);
  }
  return out + bytes;
}

TEST_F(HostileTest, NamesTheFieldThatIsNotUtf8) {
  const struct {
    std::string method, bytes, message;
  } cases[] = {
      {kGenerate, Field(3, "ab\xff"), "millrace.v1.GenerateRequest: text is not UTF-8 at byte 2 of 3"},
      {kGenerate, Field(1, "\xc3"), "request_id is not UTF-8"},
      {kGenerate, Field(5, Field(1, Field(1, "user") + Field(2, "\xed\xa0\x80"))),
       "chat.messages.content is not UTF-8 at byte 0 of 3"},
      {kGenerate, Field(6, Field(10, "\xf8")), "sampling.stop is not UTF-8"},
      {"/millrace.v1.InferenceService/Tokenize", Field(2, "\xfe"), "millrace.v1.TokenizeRequest: text is not UTF-8"},
      {"/millrace.v1.AdminService/CancelRequest", Field(1, "\xfe"), "request_id is not UTF-8"},
  };
  for (const auto& it : cases) {
    const grpc::Status status = Send(it.method, it.bytes);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << it.message;
    EXPECT_THAT(status.error_message(), HasSubstr(it.message));
  }
}

TEST_F(HostileTest, SurvivesJunk) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::string bytes(random() % 64, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    bytes.insert(0, 1, '\x0f');  // a group end that no group begins
    const grpc::Status status = Send(kGenerate, bytes);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("are not a millrace.v1.GenerateRequest"));
  }
  EXPECT_TRUE(Generate(Request(5)).status.ok());
}

TEST_F(HostileTest, RefusesLargePromptsByName) {
  v1::GenerateRequest request = Request(5);
  request.set_text(std::string(10 << 20, 'x'));
  Output output = Generate(request);
  EXPECT_EQ(output.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(output.status.error_message(), HasSubstr("text has 10485760 bytes; the limit is 0 to 4194304"));
  request.set_text(std::string(17 << 20, 'x'));
  output = Generate(request);
  EXPECT_EQ(output.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Generate(Request(5)).status.ok());
}

TEST_F(HostileTest, RefusesTokensOutsideTheVocabulary) {
  v1::GenerateRequest request = Request(5);
  request.mutable_token_ids()->add_ids(337);
  const Output output = Generate(request);
  EXPECT_EQ(output.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(output.status.error_message(), HasSubstr("token_ids.ids[5] is 337; the limit is 0 to 336"));
}

TEST_F(HostileTest, RefusesJsonThatIsNone) {
  v1::GenerateRequest request;
  v1::ChatMessage& message = *request.mutable_chat()->add_messages();
  message.set_role("user");
  for (const std::string& json :
       {std::string("{"), std::string("[]"), std::string(60'000, '['), std::string("{\"a\": 1e999}")}) {
    message.set_extra_json(json);
    EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << json.substr(0, 20);
  }
}

}  // namespace
}  // namespace millrace
