// The main of every test binary. Skipped tests are counted out loud on the last line.
#include <cstdio>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const auto& unit = *testing::UnitTest::GetInstance();
  std::printf("%s: %d passed, %d failed, %d skipped\n", argv[0], unit.successful_test_count(), unit.failed_test_count(),
              unit.skipped_test_count());
  return result;
}
