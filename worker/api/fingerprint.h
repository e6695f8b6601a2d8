// A name for what a model folder computes: equal folders have equal fingerprints. Start-up only.
#pragma once

#include <filesystem>
#include <string>

#include "absl/status/statusor.h"

namespace millrace {

// "cpu-" and 32 hexadecimal digits of a SHA-256 over config.json and every *.safetensors file, in order of name. The
// prefix is the kind of device, as equal weights give equal tokens on one kind of device only. Time: one read of the
// weights.
absl::StatusOr<std::string> ModelFingerprint(const std::filesystem::path& model_dir);

}  // namespace millrace
