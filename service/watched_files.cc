#include "service/watched_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr size_t kMaxBytes = 1 << 20;

absl::StatusOr<std::string> ReadOne(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  std::string text;
  char buffer[4096];
  ssize_t got;
  while ((got = read(fd, buffer, sizeof buffer)) > 0 && text.size() <= kMaxBytes) {
    text.append(buffer, static_cast<size_t>(got));
  }
  const int error = errno;
  close(fd);
  if (got < 0) return absl::ErrnoToStatus(error, absl::StrCat("cannot read ", path));
  if (text.size() > kMaxBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(path, " has more than ", kMaxBytes, " bytes, the limit"));
  }
  return text;
}

bool Same(const WatchedFiles::Contents& a, const WatchedFiles::Contents& b) {
  return a.ok() && b.ok() ? *a == *b : a.status() == b.status();
}

}  // namespace

WatchedFiles::Contents WatchedFiles::Read(const std::vector<std::string>& paths) {
  std::vector<std::string> contents;
  for (const std::string& path : paths) {
    absl::StatusOr<std::string> text = ReadOne(path);
    if (!text.ok()) return text.status();
    contents.push_back(*std::move(text));
  }
  return contents;
}

WatchedFiles::WatchedFiles(std::vector<std::string> paths, Contents known, std::function<void(const Contents&)> changed)
    : paths_(std::move(paths)),
      changed_(std::move(changed)),
      thread_([this, known = std::move(known)]() mutable { Run(std::move(known)); }) {}

WatchedFiles::~WatchedFiles() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void WatchedFiles::Run(Contents known) {
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stop_), kPeriod)) return;
    }
    Contents now = Read(paths_);
    if (Same(known, now)) continue;
    changed_(now);
    known = std::move(now);
  }
}

}  // namespace millrace
