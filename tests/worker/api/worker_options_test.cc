#include "worker/api/worker_options.h"

#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using ::testing::HasSubstr;

std::string Changed(const std::function<void(WorkerOptions&)>& change) {
  WorkerOptions options;
  options.model = "/";
  change(options);
  return std::string(options.Validate().message());
}

TEST(WorkerOptions, DefaultsAreValidOnceThereIsAModel) {
  EXPECT_EQ(Changed([](auto&) {}), "");
  EXPECT_THAT(std::string(WorkerOptions().Validate().message()), HasSubstr("--model is empty"));
}

TEST(WorkerOptions, NamesFlagValueAndLimit) {
  EXPECT_EQ(Changed([](auto& o) { o.max_slots = 0; }), "--max_slots is 0; the limits are 1 and 65535");
  EXPECT_EQ(Changed([](auto& o) { o.max_rows = 255; }), "--max_rows is 255; the limits are 256 and 131072");
  EXPECT_EQ(Changed([](auto& o) { o.threads = -1; }), "--threads is -1; the limits are 0 and 1024");
  EXPECT_THAT(Changed([](auto& o) { o.step_target_ms = 0; }), HasSubstr("--step_target_ms is 0"));
  EXPECT_THAT(Changed([](auto& o) { o.kv_memory = "1GB"; }), HasSubstr("--kv_memory is \"1GB\""));
  EXPECT_THAT(Changed([](auto& o) { o.kv_memory = "0"; }), HasSubstr("--kv_memory is 0"));
  EXPECT_THAT(Changed([](auto& o) { o.listen = "nowhere"; }), HasSubstr("--listen"));
  EXPECT_THAT(Changed([](auto& o) { o.worker_id = std::string(129, 'x'); }), HasSubstr("--worker_id has 129 bytes"));
  EXPECT_THAT(Changed([](auto& o) { o.model = "/no/such/folder"; }), HasSubstr("--model is \"/no/such/folder\""));
}

TEST(WorkerOptions, TakesADeviceAndItsDefaults) {
  WorkerOptions options;
  EXPECT_EQ(options.gpu(), -1);
  EXPECT_EQ(options.kv_bytes(), int64_t{1} << 30);
  EXPECT_EQ(options.step_rows(), 512);
  options.max_slots = 1000;
  EXPECT_EQ(options.step_rows(), 1000) << "a row for every slot";
  options.device = "cuda:3";
  EXPECT_EQ(options.gpu(), 3);
  EXPECT_EQ(options.kv_bytes(), 0) << "what the GPU has left";
  EXPECT_EQ(options.step_rows(), 8192);
  options.device = "cuda";
  EXPECT_EQ(options.gpu(), 0);
  for (const char* device : {"", "gpu", "cuda:", "cuda:-1", "cuda:1024", "cuda:x"}) {
    EXPECT_THAT(Changed([&](auto& o) { o.device = device; }), HasSubstr("--device is \""));
  }
  EXPECT_THAT(Changed([](auto& o) { o.gpu_memory_fraction = 1; }), HasSubstr("--gpu_memory_fraction is 1"));
}

TEST(WorkerOptions, LeavesLoopbackOnlyWhenTold) {
  EXPECT_THAT(Changed([](auto& o) { o.listen = "0.0.0.0:50061"; }), HasSubstr("--unencrypted"));
  EXPECT_EQ(Changed([](auto& o) { o.listen = "0.0.0.0:50061", o.unencrypted = true; }), "");
  EXPECT_EQ(Changed([](auto& o) { o.listen = "localhost:0"; }), "");
}

TEST(WorkerOptions, ReadsBytes) {
  EXPECT_EQ(*ParseBytes("77"), 77);
  EXPECT_EQ(*ParseBytes("512MiB"), 512 << 20);
  EXPECT_EQ(*ParseBytes("2GiB"), int64_t{2} << 30);
  for (const char* text : {"", "GiB", "-1", "1.5GiB", "1048576TiB", "9223372036854775807"})
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
}

TEST(WorkerOptions, NamesAModelByItsFolder) {
  WorkerOptions options;
  options.model = "/models/tiny/";
  EXPECT_EQ(options.name(), "tiny");
  options.model_name = "mine";
  EXPECT_EQ(options.name(), "mine");
}

}  // namespace
}  // namespace millrace
