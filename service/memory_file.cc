#include "service/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace millrace {

MemoryFile::~MemoryFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status MemoryFile::Replace(absl::string_view content) {
  const int fresh = memfd_create("millrace", MFD_CLOEXEC);
  if (fresh < 0) return absl::ErrnoToStatus(errno, "memfd_create");
  while (!content.empty()) {
    const ssize_t written = write(fresh, content.data(), content.size());
    if (written < 0) {
      const absl::Status status = absl::ErrnoToStatus(errno, "a file in memory cannot be written");
      close(fresh);
      return status;
    }
    content.remove_prefix(static_cast<size_t>(written));
  }
  if (fd_ < 0) {
    fd_ = fresh;
    return absl::OkStatus();
  }
  const bool replaced = dup3(fresh, fd_, O_CLOEXEC) >= 0;  // who opens the path gets the old one or the new one
  const int error = errno;
  close(fresh);
  return replaced ? absl::OkStatus() : absl::ErrnoToStatus(error, "dup3");
}

std::string MemoryFile::path() const { return absl::StrCat("/proc/self/fd/", fd_); }

}  // namespace millrace
