#include "tests/bench/random_model.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/dtype.h"
#include "nlohmann/json.hpp"

namespace millrace {
namespace {

using nlohmann::json;

struct Shape {
  const char* type;
  const char* architecture;
  int layers, hidden, ffn, heads, kv_heads, head_dim, vocab;
  bool tied;
};

const std::map<std::string, Shape>& Shapes() {
  static const std::map<std::string, Shape> shapes = {
      {"qwen3-0.6b", {"qwen3", "Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 128, 151'936, true}},
      {"qwen3-1.7b", {"qwen3", "Qwen3ForCausalLM", 28, 2048, 6144, 16, 8, 128, 151'936, true}},
      {"qwen3-8b", {"qwen3", "Qwen3ForCausalLM", 36, 4096, 12'288, 32, 8, 128, 151'936, false}},
      {"qwen3-14b", {"qwen3", "Qwen3ForCausalLM", 40, 5120, 17'408, 40, 8, 128, 151'936, false}},
      {"llama-3.1-8b", {"llama", "LlamaForCausalLM", 32, 4096, 14'336, 32, 8, 128, 128'256, false}},
      {"qwen2-0.5b", {"qwen2", "Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 64, 151'936, true}},
  };
  return shapes;
}

struct Entry {
  std::string name;
  std::vector<int64_t> shape;
};

std::vector<Entry> Tensors(const Shape& s) {
  const int64_t q = int64_t{s.heads} * s.head_dim, kv = int64_t{s.kv_heads} * s.head_dim, hidden = s.hidden;
  std::vector<Entry> all = {{"model.embed_tokens.weight", {s.vocab, hidden}}, {"model.norm.weight", {hidden}}};
  if (!s.tied) all.push_back({"lm_head.weight", {s.vocab, hidden}});
  for (int i = 0; i < s.layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".", attention = layer + "self_attn.";
    all.push_back({layer + "input_layernorm.weight", {hidden}});
    all.push_back({layer + "post_attention_layernorm.weight", {hidden}});
    all.push_back({attention + "q_proj.weight", {q, hidden}});
    all.push_back({attention + "k_proj.weight", {kv, hidden}});
    all.push_back({attention + "v_proj.weight", {kv, hidden}});
    all.push_back({attention + "o_proj.weight", {hidden, q}});
    all.push_back({layer + "mlp.gate_proj.weight", {s.ffn, hidden}});
    all.push_back({layer + "mlp.up_proj.weight", {s.ffn, hidden}});
    all.push_back({layer + "mlp.down_proj.weight", {hidden, s.ffn}});
    if (std::string(s.type) == "qwen2") {
      all.push_back({attention + "q_proj.bias", {q}});
      all.push_back({attention + "k_proj.bias", {kv}});
      all.push_back({attention + "v_proj.bias", {kv}});
    }
    if (std::string(s.type) == "qwen3") {
      all.push_back({attention + "q_norm.weight", {s.head_dim}});
      all.push_back({attention + "k_norm.weight", {s.head_dim}});
    }
  }
  return all;
}

// Normal numbers whose products keep their size from layer to layer.
std::vector<bf16> Numbers(size_t count, float scale) {
  std::vector<bf16> numbers(count);
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, scale);
  for (bf16& number : numbers) number = static_cast<bf16>(normal(random));
  return numbers;
}

void Write(int fd, const void* data, size_t bytes, int64_t at) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = pwrite(fd, static_cast<const char*>(data) + done, bytes - done, at + static_cast<int64_t>(done));
    if (n <= 0) {
      std::perror("random model");
      std::exit(1);
    }
    done += static_cast<size_t>(n);
  }
}

}  // namespace

RandomModel::RandomModel(const std::string& name, const std::filesystem::path& parent)
    : folder_(parent / ("millrace-" + name + "-" + std::to_string(getpid()))) {
  const auto found = Shapes().find(name);
  if (found == Shapes().end()) {
    std::fprintf(stderr, "no shape is called %s\n", name.c_str());
    std::exit(1);
  }
  const Shape& s = found->second;
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "config.json") << json{{"architectures", {s.architecture}},
                                                 {"model_type", s.type},
                                                 {"num_hidden_layers", s.layers},
                                                 {"hidden_size", s.hidden},
                                                 {"intermediate_size", s.ffn},
                                                 {"num_attention_heads", s.heads},
                                                 {"num_key_value_heads", s.kv_heads},
                                                 {"head_dim", s.head_dim},
                                                 {"vocab_size", s.vocab},
                                                 {"max_position_embeddings", 40'960},
                                                 {"rms_norm_eps", 1e-6},
                                                 {"rope_theta", 1e6},
                                                 {"hidden_act", "silu"},
                                                 {"tie_word_embeddings", s.tied},
                                                 {"torch_dtype", "bfloat16"},
                                                 {"eos_token_id", 151'645 % s.vocab}};
  json header = json::object();
  int64_t bytes = 0;
  std::vector<std::pair<Entry, int64_t>> placed;
  for (const Entry& entry : Tensors(s)) {
    int64_t size = 2;
    for (const int64_t n : entry.shape) size *= n;
    header[entry.name] = {{"dtype", "BF16"}, {"shape", entry.shape}, {"data_offsets", {bytes, bytes + size}}};
    placed.push_back({entry, bytes});
    bytes += size;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  const int fd = open((folder_ / "model.safetensors").c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  Write(fd, &length, sizeof length, 0);
  Write(fd, text.data(), text.size(), sizeof length);
  const auto data = static_cast<int64_t>(sizeof length + text.size());

  const std::vector<bf16> matrix = Numbers(size_t{4} << 20, 1 / std::sqrt(static_cast<float>(s.hidden)));
  std::vector<bf16> vector(static_cast<size_t>(std::max({s.hidden, s.heads * s.head_dim})), static_cast<bf16>(1.0f));
  std::vector<std::thread> threads;
  const size_t count = std::clamp(std::thread::hardware_concurrency(), 1u, 16u);
  for (size_t thread = 0; thread < count; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t i = thread; i < placed.size(); i += count) {
        const auto& [entry, offset] = placed[i];
        const std::vector<bf16>& from = entry.shape.size() == 1 ? vector : matrix;
        int64_t left = 2;
        for (const int64_t n : entry.shape) left *= n;
        for (int64_t at = data + offset; left > 0;) {
          const int64_t n = std::min(left, static_cast<int64_t>(from.size() * sizeof(bf16)));
          Write(fd, from.data(), static_cast<size_t>(n), at);
          at += n;
          left -= n;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  close(fd);
}

RandomModel::~RandomModel() {
  if (!kept_) std::filesystem::remove_all(folder_);
}

}  // namespace millrace
