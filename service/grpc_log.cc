#include "service/grpc_log.h"

#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "grpc/support/log.h"
#include "service/log.h"
#include "service/once_a_minute.h"

namespace millrace {
namespace {

void Take(gpr_log_func_args* args) {
  // A client may ask for any name; it is the one who decides whether the certificate is good for it.
  const bool harmless = absl::StartsWith(args->message, "No match found for server name");
  const LogLevel level = args->severity == GPR_LOG_SEVERITY_ERROR && !harmless ? LogLevel::kWarning : LogLevel::kDebug;
  if (!WouldLog(level)) return;
  static OnceAMinute& said = *new OnceAMinute;  // gRPC's threads may outlive main
  absl::string_view file = args->file;
  if (const size_t slash = file.rfind('/'); slash != absl::string_view::npos) file.remove_prefix(slash + 1);
  const std::string source = absl::StrCat(file, ":", args->line);
  const std::optional<uint64_t> kept_back = said.Say(absl::StrCat(source, args->message), absl::Now());
  if (!kept_back.has_value()) return;
  Log(level, "grpc", {{"source", source}, {"message", args->message}, {"kept_back", *kept_back}});
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(Take); }

}  // namespace millrace
