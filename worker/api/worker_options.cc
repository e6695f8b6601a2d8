#include "worker/api/worker_options.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "service/address.h"

namespace millrace {
namespace {

absl::Status Range(absl::string_view flag, double value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, "; the limits are ", min, " and ", max));
}

// The GPU's number, or -1 for the CPU.
absl::StatusOr<int> ParseDevice(absl::string_view device) {
  if (device == "cpu") return -1;
  if (device == "cuda") return 0;
  int number = 0;
  absl::string_view digits = device;
  if (absl::ConsumePrefix(&digits, "cuda:") && absl::SimpleAtoi(digits, &number) && number >= 0 && number < 1024) {
    return number;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--device is \"", device, "\"; the limits are cpu, cuda and cuda:0 … cuda:1023"));
}

absl::Status ValidateListen(absl::string_view flag, const std::string& listen, bool allowed) {
  const auto address = ParseAddress(listen);
  if (!address.ok()) return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", address.status().message()));
  if (address->IsLoopback() || allowed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " is \"", listen, "\"; the limit without ",
      flag == "listen" ? "TLS or --unencrypted is a loopback address, as the stream is then neither encrypted nor "
                         "authenticated: whoever reaches the port can read prompts and command the worker"
      : flag == "otlp_endpoint" ? "--unencrypted_spans is a loopback address"
                                : "--unencrypted_metrics is a loopback address"));
}

absl::Status CheckDraft(const WorkerOptions& options) {
  if (options.draft_model.empty()) return Range("draft_layers", options.draft_layers, 0, 1 << 16);
  std::error_code error;
  if (!std::filesystem::is_directory(options.draft_model, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--draft_model is \"", options.draft_model, "\"; the limit is a folder that exists"));
  }
  if (options.draft_layers == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--draft_layers is ", options.draft_layers, " and --draft_model is \"",
                                                 options.draft_model, "\"; the limit is one of the two"));
}

}  // namespace

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  struct Suffix {
    absl::string_view name;
    int shift;
  };
  constexpr std::array<Suffix, 4> kSuffixes = {{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}};
  absl::string_view digits = text;
  int shift = 0;
  for (const auto& [name, bits] : kSuffixes) {
    if (absl::ConsumeSuffix(&digits, name)) {
      shift = bits;
      break;
    }
  }
  int64_t count = 0;
  if (!absl::SimpleAtoi(digits, &count) || count < 0 || count >= (int64_t{1} << (60 - shift))) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\"; the limit is a number below 2^60 with an optional KiB, MiB, GiB or TiB"));
  }
  return count << shift;
}

absl::Status WorkerOptions::ValidateAccess() const {
  absl::Status status = ValidateListen("listen", listen, unencrypted || !tls.empty());
  if (!metrics_listen.empty()) {
    status.Update(ValidateListen("metrics_listen", metrics_listen, unencrypted || unencrypted_metrics));
  }
  if (!otlp_endpoint.empty()) {
    status.Update(ValidateListen("otlp_endpoint", otlp_endpoint, unencrypted || unencrypted_spans));
  }
  if (!probe_listen.empty()) status.Update(ValidateListen("probe_listen", probe_listen, true));
  if (!tls.empty() && (tls.certificate.empty() || tls.key.empty() || tls.ca.empty())) {
    status.Update(absl::InvalidArgumentError(
        "--tls_certificate, --tls_key and --tls_ca: the limit is all of them or none, as routers must be known, too"));
  }
  status.Update(Range("router_identity: number of names", static_cast<double>(router_identity.size()), 1, 64));
  return status;
}

absl::Status WorkerOptions::Validate() const {
  if (model.empty()) return absl::InvalidArgumentError("--model is empty; the limit is a folder with a model");
  std::error_code error;
  if (!std::filesystem::is_directory(model, error)) {
    return absl::InvalidArgumentError(absl::StrCat("--model is \"", model, "\"; the limit is a folder that exists"));
  }
  if (auto access = ValidateAccess(); !access.ok()) return access;
  if (worker_id.size() > 128) {
    return absl::InvalidArgumentError(absl::StrCat("--worker_id has ", worker_id.size(), " bytes; the limit is 128"));
  }
  const auto gpu = ParseDevice(device);
  if (!gpu.ok()) return gpu.status();
  const auto bytes = ParseBytes(kv_memory.empty() ? "1" : kv_memory);
  if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat("--kv_memory is ", bytes.status().message()));
  absl::Status status = Range("kv_memory", static_cast<double>(*bytes), 1, 0x1p60);
  status.Update(Range("gpu_memory_fraction", gpu_memory_fraction, 0.05, 0.98));
  status.Update(Range("threads", threads, 0, 1024));
  status.Update(Range("max_slots", max_slots, 1, (1 << 16) - 1));
  if (max_rows != 0) status.Update(Range("max_rows", max_rows, max_slots, 1 << 17));
  status.Update(CheckDraft(*this));
  status.Update(Range("step_target_ms", step_target_ms, 0.1, 10'000));
  status.Update(Range("drain_ms", static_cast<double>(drain_ms), 0, 3'600'000));
  return status;
}

int64_t WorkerOptions::kv_bytes() const {
  if (!kv_memory.empty()) return *ParseBytes(kv_memory);
  return gpu() < 0 ? int64_t{1} << 30 : 0;
}

int WorkerOptions::gpu() const { return *ParseDevice(device); }

int WorkerOptions::step_rows() const { return max_rows != 0 ? max_rows : std::max(max_slots, gpu() < 0 ? 512 : 8192); }

int WorkerOptions::num_threads() const {
  return threads > 0 ? threads : std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 1024);
}

std::string WorkerOptions::name() const {
  if (!model_name.empty()) return model_name;
  const auto path = std::filesystem::absolute(model).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

}  // namespace millrace
