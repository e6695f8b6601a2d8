// Seven real chat templates against what transformers rendered.
#include <memory>
#include <string>

#include "router/text/chat_template.h"
#include "tests/router/text/golden_file.h"

namespace millrace {
namespace {

using nlohmann::ordered_json;

class GoldenChat : public testing::TestWithParam<const char*> {};

std::string TextOrEmpty(const ordered_json& value) { return value.is_string() ? value.get<std::string>() : ""; }

TEST_P(GoldenChat, RendersEveryConversation) {
  MILLRACE_NEEDS_GOLDEN("chat");
  const ordered_json golden = ReadJson(Golden("chat") / (std::string(GetParam()) + ".json"));
  const auto chat = ChatTemplate::FromSource(ReadText(Golden("chat") / golden["template"].get<std::string>()),
                                             TextOrEmpty(golden["bos_token"]), TextOrEmpty(golden["eos_token"]));
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_GE(golden["cases"].size(), 50u);
  for (const ordered_json& row : golden["cases"]) {
    SCOPED_TRACE(row["name"].get<std::string>());
    ordered_json kwargs = row.value("variables", ordered_json::object());
    if (row.contains("enable_thinking")) kwargs["enable_thinking"] = row["enable_thinking"];
    ChatTemplate::Input input;
    input.messages_json = row["messages"].dump();
    input.tools_json = row.contains("tools") ? row["tools"].dump() : "";
    input.add_generation_prompt = row["add_generation_prompt"];
    input.kwargs_json = kwargs.dump();
    const auto pieces = (*chat)->Render(input);
    if (row.contains("error")) {
      EXPECT_EQ(pieces.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(pieces.status().message(), "chat template: " + row["error"]["message"].get<std::string>());
      continue;
    }
    ASSERT_TRUE(pieces.ok()) << pieces.status();
    std::string text;
    for (const auto& piece : *pieces) text += piece.text;
    EXPECT_EQ(text, row["text"].get<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenChat,
                         testing::Values("chatml", "llama-3.1", "llama-3.2", "mistral-nemo", "qwen2.5", "qwen3",
                                         "smollm2"),
                         [](const auto& test) {
                           std::string name = test.param;
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

}  // namespace
}  // namespace millrace
