# millrace_test(NAME sources… LINK targets… [ENV name=value…]): one GoogleTest binary, one ctest entry.
find_library(GTEST_A libgtest.a REQUIRED)
find_library(GMOCK_A libgmock.a REQUIRED)
function(millrace_test name)
  cmake_parse_arguments(arg "" "" "LINK;ENV" ${ARGN})
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS} ${PROJECT_SOURCE_DIR}/tests/test_main.cc)
  target_link_libraries(${name} PRIVATE millrace_options ${arg_LINK} ${GMOCK_A} ${GTEST_A} Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 ENVIRONMENT "MILLRACE_SOURCE_DIR=${PROJECT_SOURCE_DIR};${arg_ENV}")
endfunction()

# millrace_bench(NAME sources… LINK targets…): a Google Benchmark main; built with everything, run by hand.
function(millrace_bench name)
  cmake_parse_arguments(arg "" "" "LINK" ${ARGN})
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE millrace_options ${arg_LINK} benchmark::benchmark benchmark::benchmark_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
endfunction()
