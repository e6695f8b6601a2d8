#include "service/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace millrace {
namespace {

// Seconds since 1970 at which the machine started; /proc counts from there.
double BootTime() {
  std::ifstream stat("/proc/stat");
  for (std::string line; std::getline(stat, line);) {
    if (line.rfind("btime ", 0) == 0) return std::strtod(line.c_str() + 6, nullptr);
  }
  return 0;
}

void AddStat(MetricPage* page) {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return;
  std::istringstream fields(text.substr(name_end + 1));
  double value[22] = {};  // from field 3 of proc(5) on; the first is a letter
  std::string state;
  fields >> state;
  for (int i = 1; i < 22; ++i) fields >> value[i];
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const double page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));
  static const double boot_time = BootTime();
  page->AddCounter("process_cpu_seconds_total", "CPU time of the process", (value[11] + value[12]) / ticks);
  page->AddGauge("process_start_time_seconds", "start of the process, unix time", boot_time + value[19] / ticks);
  page->AddGauge("process_virtual_memory_bytes", "address space", value[20]);
  page->AddGauge("process_resident_memory_bytes", "memory in use", value[21] * page_bytes);
}

void AddFiles(MetricPage* page) {
  double open = 0;
  if (DIR* const folder = opendir("/proc/self/fd"); folder != nullptr) {
    while (const dirent* const entry = readdir(folder)) open += entry->d_name[0] != '.';
    closedir(folder);
    --open;  // the folder's own
  }
  page->AddGauge("process_open_fds", "open file descriptors", open);
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  page->AddGauge(
      "process_max_fds", "limit of open file descriptors",
      limit.rlim_cur == RLIM_INFINITY ? std::numeric_limits<double>::infinity() : static_cast<double>(limit.rlim_cur));
}

}  // namespace

void AddProcessMetrics(MetricPage* page) {
  AddStat(page);
  AddFiles(page);
}

}  // namespace millrace
