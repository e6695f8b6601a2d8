// A profiler that any CUDA program loads at start-up, with CUDA_INJECTION64_PATH=libgpu_timeline.so. At the program's
// end it prints to stderr the time of each kernel, from when the one before it ended (kernels begin early and wait),
// and how long the GPU did nothing between one piece of work and the next. MILLRACE_TIMELINE=graphs takes a graph as
// one piece of work, which disturbs it least; MILLRACE_TIMELINE_LAST_MS looks at the end of the run alone.
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {
namespace {

constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr uint64_t kLongGap = 1'000'000;  // ns: the program had nothing to do

struct Work {
  uint64_t begin, end;  // ns
  const char* name;
};

struct Timeline {
  std::mutex mutex;
  std::vector<Work> works;
  std::map<std::string, std::string, std::less<>> names;  // by mangled name; nodes stay where they are
  size_t dropped = 0;
};

Timeline& TheTimeline() {
  static Timeline* const timeline = new Timeline;  // outlives whatever ends after it
  return *timeline;
}

void Check(CUptiResult result, const char* call) {
  if (result == CUPTI_SUCCESS) return;
  const char* text = "";
  cuptiGetResultString(result, &text);
  std::fprintf(stderr, "timeline: %s: %s\n", call, text);
  std::exit(1);
}

// Without arguments and namespaces, which fill lines.
std::string ShortName(const char* mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  for (const std::string_view space : {"millrace::", "cuda::", "(anonymous namespace)::", "void "}) {
    for (size_t at; (at = name.find(space)) != std::string::npos;) name.erase(at, space.size());
  }
  return name.substr(0, name.rfind('('));
}

void GiveBuffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = kBufferBytes;
  *max_records = 0;  // as many as fit
}

void TakeBuffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid) {
  Timeline& timeline = TheTimeline();
  const std::lock_guard lock(timeline.mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_GRAPH_TRACE) {
      const auto* graph = reinterpret_cast<const CUpti_ActivityGraphTrace2*>(record);
      timeline.works.push_back({graph->start, graph->end, "a graph"});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      auto name = timeline.names.find(kernel->name);
      if (name == timeline.names.end()) name = timeline.names.emplace(kernel->name, ShortName(kernel->name)).first;
      timeline.works.push_back({kernel->start, kernel->end, name->second.c_str()});
    }
  }
  size_t dropped = 0;
  cuptiActivityGetNumDroppedRecords(context, stream, &dropped);
  timeline.dropped += dropped;
  std::free(buffer);
}

void Print() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  Timeline& timeline = TheTimeline();
  const std::lock_guard lock(timeline.mutex);
  std::vector<Work>& works = timeline.works;
  if (works.empty()) return;
  std::ranges::sort(works, {}, &Work::begin);
  if (const char* last = std::getenv("MILLRACE_TIMELINE_LAST_MS"); last != nullptr) {
    const uint64_t end = std::ranges::max_element(works, {}, &Work::end)->end;
    const uint64_t ns = static_cast<uint64_t>(std::atof(last) * 1e6);
    std::erase_if(works, [&](const Work& work) { return work.begin + ns < end; });
  }
  std::map<std::string_view, std::pair<uint64_t, uint64_t>> sums;  // name: count, ns
  std::vector<uint64_t> gaps;
  uint64_t busy_until = works[0].begin, idle = 0;
  for (const Work& work : works) {
    auto& [count, ns] = sums[work.name];
    ++count;
    ns += work.end - std::clamp(busy_until, work.begin, work.end);
    const uint64_t gap = work.begin > busy_until ? work.begin - busy_until : 0;
    if (gap < kLongGap) gaps.push_back(gap), idle += gap;
    busy_until = std::max(busy_until, work.end);
  }
  std::vector<std::pair<uint64_t, std::string_view>> order;
  for (const auto& [name, sum] : sums) order.push_back({sum.second, name});
  std::ranges::sort(order, std::greater());
  std::fprintf(stderr, "timeline: %zu pieces of work, %zu dropped\n", works.size(), timeline.dropped);
  for (size_t i = 0; i < std::min<size_t>(order.size(), 30); ++i) {
    const auto& [count, ns] = sums[order[i].second];
    std::fprintf(stderr, "%12.1f us  %8llu x %9.2f us  %.*s\n", static_cast<double>(ns) * 1e-3,
                 static_cast<unsigned long long>(count), static_cast<double>(ns) * 1e-3 / static_cast<double>(count),
                 static_cast<int>(std::min<size_t>(order[i].second.size(), 100)), order[i].second.data());
  }
  std::ranges::sort(gaps);
  const auto at = [&](double share) {
    return static_cast<double>(gaps[static_cast<size_t>(share * static_cast<double>(gaps.size() - 1))]) * 1e-3;
  };
  std::fprintf(stderr, "idle between pieces, where below %llu us: p50 %.1f, p90 %.1f, p99 %.1f us, %.1f us in all\n",
               static_cast<unsigned long long>(kLongGap / 1000), at(0.5), at(0.9), at(0.99),
               static_cast<double>(idle) * 1e-3);
}

}  // namespace
}  // namespace millrace

// What the driver calls in a library that CUDA_INJECTION64_PATH names.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  using namespace millrace;
  const char* mode = std::getenv("MILLRACE_TIMELINE");
  Check(cuptiActivityRegisterCallbacks(GiveBuffer, TakeBuffer), "cuptiActivityRegisterCallbacks");
  if (mode != nullptr && std::string_view(mode) == "graphs") {
    Check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_GRAPH_TRACE), "cuptiActivityEnable");
  }
  Check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable");
  std::atexit(Print);
  return 1;
}
