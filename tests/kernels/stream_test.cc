#include "kernels/stream.h"

#include <atomic>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/buffer.h"
#include "kernels/cpu/threads.h"

namespace millrace {
namespace {

TEST(ThreadPool, RunsEveryItemOnceInEachOfManyRegions) {
  for (const int threads : {1, 2, 3, 7}) {
    cpu::ThreadPool pool(threads);
    for (int64_t region = 0; region < 2000; ++region) {
      const int64_t count = region % 23;
      std::vector<int> seen(static_cast<size_t>(count));
      pool.ParallelFor(count, 1 + region % 3, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      for (const int times : seen) ASSERT_EQ(times, 1);
    }
  }
}

TEST(ThreadPool, GivesNoWorkToMoreThreadsThanTheGrainAllows) {
  cpu::ThreadPool pool(4);
  std::atomic<int> parts{0};
  pool.ParallelFor(10, 5, [&](int64_t begin, int64_t end, int) { parts += begin < end; });
  EXPECT_EQ(parts, 2);
}

TEST(Stream, MovesWithItsThreadsAndWorkspace) {
  Stream a = Stream::OpenCpu(3);
  a.ReserveWorkspace(1000);
  std::byte* const workspace = a.workspace();
  Stream b = std::move(a);
  EXPECT_EQ(b.workspace(), workspace);
  EXPECT_EQ(b.num_threads(), 3);
  b.ReserveWorkspace(10);
  EXPECT_EQ(b.workspace_bytes(), 1000u);
  b = Stream::OpenCpu(1);
  EXPECT_EQ(b.workspace_bytes(), 0u);
  b.Synchronize();
}

TEST(DeviceBuffer, IsAlignedZeroAndMovable) {
  Stream stream = Stream::OpenCpu(1);
  DeviceBuffer a(4096 + 5, stream);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
  for (size_t i = 0; i < a.bytes(); ++i) ASSERT_EQ(a.data()[i], std::byte{0});
  std::byte* const data = a.data();
  DeviceBuffer b = std::move(a);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): the promise of a move
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.At<float>(4, 1024), reinterpret_cast<float*>(data + 4));
  EXPECT_EQ(DeviceBuffer(0, stream).data(), nullptr);
}

TEST(DeviceBuffer, ThatDoesNotFitIsNull) {
  Stream stream = Stream::OpenCpu(1);
  const DeviceBuffer buffer(size_t{1} << 60, stream);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.bytes(), 0u);
}

TEST(DeviceBufferDeathTest, RefusesAViewBeyondItsEnd) {
  Stream stream = Stream::OpenCpu(1);
  const DeviceBuffer buffer(64, stream);
  EXPECT_DEATH(buffer.At<float>(4, 16), "a view lies within its buffer .* 4 64 64");
  EXPECT_DEATH(buffer.At<float>(~size_t{0}, 16), "a view lies within its buffer");
}

}  // namespace
}  // namespace millrace
