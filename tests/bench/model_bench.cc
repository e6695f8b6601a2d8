// model_bench --model DIR [--threads N] [--json]: tokens per second of a model on this machine, medians of several
// runs, and the bytes and floating-point operations of a token, so that shares of the machine's bandwidth and
// arithmetic peak can be stated.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "worker/model/model_runner.h"

namespace millrace {
namespace {

constexpr int kContext = 128;  // tokens in the cache where decoding begins
constexpr int kDecodeSteps = 8;
constexpr int kRuns = 5;
constexpr int kPrefillTokens = 512;
constexpr int kMaxBatch = 16;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

class Bench {
 public:
  explicit Bench(ModelRunner& runner) : runner_(runner) {}

  // Tokens per second of `batch` sequences of kContext tokens.
  double Decode(int batch) {
    for (int i = 0; i < batch; ++i) Step(1, kContext, 0, i);
    std::vector<double> rates;
    for (int run = -1; run < kRuns; ++run) {  // the first warms up
      const double begin = Now();
      for (int step = 0; step < kDecodeSteps; ++step) Step(batch, 1, kContext + step, 0);
      if (run >= 0) rates.push_back(batch * kDecodeSteps / (Now() - begin));
    }
    return Median(rates);
  }

  double Prefill() {
    std::vector<double> rates;
    for (int run = -1; run < kRuns; ++run) {
      const double begin = Now();
      Step(1, kPrefillTokens, 0, 0);
      if (run >= 0) rates.push_back(kPrefillTokens / (Now() - begin));
    }
    return Median(rates);
  }

 private:
  // One step: `count` tokens from `position` of each of `batch` sequences, the first of them `first_sequence`.
  void Step(int batch, int count, int position, int first_sequence) {
    constexpr int kBlocksEach = kPrefillTokens / kBlockTokens;
    input_.Clear();
    input_.query_start = {0};
    input_.block_table_width = kBlocksEach;
    for (int sequence = first_sequence; sequence < first_sequence + batch; ++sequence) {
      for (int p = position; p < position + count; ++p) {
        input_.tokens.push_back((p * 7919 + sequence * 31) % runner_.config().vocab_size);
        input_.positions.push_back(p);
        input_.kv_slots.push_back(sequence * kPrefillTokens + p);
      }
      for (int block = 0; block < kBlocksEach; ++block) input_.block_table.push_back(sequence * kBlocksEach + block);
      input_.query_start.push_back(static_cast<int32_t>(input_.num_rows()));
      input_.context_len.push_back(position + count);
      input_.logit_rows.push_back(static_cast<int32_t>(input_.num_rows() - 1));
      input_.sampling.emplace_back();
      input_.target.push_back(-1);
      input_.slots.push_back(-1);
      input_.num_logprobs.push_back(-1);
      input_.is_guess.push_back(false);
    }
    runner_.Run(input_, output_);
  }

  ModelRunner& runner_;
  StepInput input_;
  StepOutput output_;
};

// Weights that multiply every token.
double NumWeights(const ModelConfig& config, bool with_lm_head) {
  const double hidden = config.hidden_size, q = config.num_heads * config.head_dim,
               kv = config.num_kv_heads * config.head_dim;
  const double layer = hidden * (q + 2 * kv) + q * hidden + 3.0 * hidden * config.intermediate_size;
  return config.num_layers * layer + (with_lm_head ? hidden * config.vocab_size : 0);
}

double AttentionFlops(const ModelConfig& config, double context) {
  return 4.0 * config.num_layers * config.num_heads * config.head_dim * context;
}

int Main(int argc, char** argv) {
  std::string model;
  int threads = 1;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--model" && i + 1 < argc) {
      model = argv[++i];
    } else if (flag == "--threads" && i + 1 < argc) {
      threads = std::atoi(argv[++i]);
    } else if (flag == "--json") {
      json = true;
    } else {
      model.clear();
      break;
    }
  }
  if (model.empty() || threads < 1 || threads > 1024) {
    std::fprintf(stderr, "usage: model_bench --model DIR [--threads 1..1024] [--json]\n");
    return 2;
  }
  const double begin = Now();
  const auto config = ModelConfig::Load(model);
  if (!config.ok()) {
    std::fprintf(stderr, "%s\n", std::string(config.status().message()).c_str());
    return 1;
  }
  const int64_t kv_tokens = int64_t{kMaxBatch} * kPrefillTokens;
  const int64_t token_bytes =
      int64_t{2} * config->num_layers * config->num_kv_heads * config->head_dim * int64_t{sizeof(float)};
  auto runner = ModelRunner::Load({.model_dir = model,
                                   .kv_bytes = kv_tokens * token_bytes,
                                   .max_rows = kPrefillTokens,
                                   .max_logit_rows = kMaxBatch},
                                  Stream::OpenCpu(threads));
  if (!runner.ok()) {
    std::fprintf(stderr, "%s\n", std::string(runner.status().message()).c_str());
    return 1;
  }
  const double load_seconds = Now() - begin;
  Bench bench(**runner);
  const double batch1 = bench.Decode(1), batch16 = bench.Decode(kMaxBatch), prefill = bench.Prefill();

  // A decode step reads every weight once and the k and v of each sequence's context.
  const double weight_bytes = 2 * NumWeights(*config, true);
  const double kv_bytes = (kContext + kDecodeSteps / 2.0) * static_cast<double>(token_bytes);
  const double decode_flops = 2 * NumWeights(*config, true) + AttentionFlops(*config, kContext + kDecodeSteps / 2.0);
  const double lm_head = NumWeights(*config, true) - NumWeights(*config, false);  // for the prompt's last token alone
  const double prefill_flops =
      2 * NumWeights(*config, false) + 2 * lm_head / kPrefillTokens + AttentionFlops(*config, kPrefillTokens / 2.0);
  if (json) {
    std::printf(
        "{\"decode_tok_s_batch1\": %.2f, \"decode_tok_s_batch16\": %.2f, \"prefill_tok_s_512\": %.2f, \"threads\": %d, "
        "\"load_seconds\": %.3f, \"bytes_per_token_batch1\": %.0f, \"bytes_per_token_batch16\": %.0f, "
        "\"flop_per_token_decode\": %.0f, \"flop_per_token_prefill\": %.0f}\n",
        batch1, batch16, prefill, threads, load_seconds, weight_bytes + kv_bytes, weight_bytes / kMaxBatch + kv_bytes,
        decode_flops, prefill_flops);
    return 0;
  }
  const double giga = 1e-9;
  std::printf("%s, %d threads, loaded in %.2f s\n", model.c_str(), threads, load_seconds);
  std::printf("decode,  batch  1, context %d: %8.1f tok/s %7.2f GB/s %7.2f GFLOP/s\n", kContext, batch1,
              batch1 * (weight_bytes + kv_bytes) * giga, batch1 * decode_flops * giga);
  std::printf("decode,  batch %d, context %d: %8.1f tok/s %7.2f GB/s %7.2f GFLOP/s\n", kMaxBatch, kContext, batch16,
              batch16 * (weight_bytes / kMaxBatch + kv_bytes) * giga, batch16 * decode_flops * giga);
  std::printf("prefill, %d tokens:           %8.1f tok/s              %7.2f GFLOP/s\n", kPrefillTokens, prefill,
              prefill * prefill_flops * giga);
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) { return millrace::Main(argc, argv); }
