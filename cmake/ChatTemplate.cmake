# millrace_jinja: llama.cpp's template engine (common/jinja, MIT), taken at configure time from the source distribution of
# llama-cpp-python and checked by hash. The archive is kept in .cache/, so that later configures need no network. A few
# lines are changed on the way (cmake/patch_jinja.py): the engine itself has no bound on time, memory or recursion.
set(jinja_version 0.3.36)
set(jinja_sha256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)
set(jinja_archive ${PROJECT_SOURCE_DIR}/.cache/llama_cpp_python-${jinja_version}.tar.gz)
set(jinja_dir ${CMAKE_BINARY_DIR}/jinja)
set(jinja_common ${jinja_dir}/llama_cpp_python-${jinja_version}/vendor/llama.cpp/common)
find_package(Python3 REQUIRED COMPONENTS Interpreter)

if(NOT EXISTS ${jinja_archive})
  message(STATUS "Fetching llama-cpp-python ${jinja_version} (77 MB, once)")
  file(MAKE_DIRECTORY ${PROJECT_SOURCE_DIR}/.cache)
  execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/fetch_sdist.py llama-cpp-python ${jinja_version}
    ${jinja_archive} COMMAND_ERROR_IS_FATAL ANY)
endif()

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/patch_jinja.py)
file(SHA256 ${PROJECT_SOURCE_DIR}/cmake/patch_jinja.py patch_hash)
set(jinja_stamp ${jinja_dir}/patched-${patch_hash})
if(NOT EXISTS ${jinja_stamp})
  file(SHA256 ${jinja_archive} archive_hash)
  if(NOT archive_hash STREQUAL jinja_sha256)
    message(FATAL_ERROR "${jinja_archive} has SHA-256 ${archive_hash}, expected ${jinja_sha256}; remove it and configure again")
  endif()
  file(REMOVE_RECURSE ${jinja_dir})
  file(ARCHIVE_EXTRACT INPUT ${jinja_archive} DESTINATION ${jinja_dir} PATTERNS
    "*/vendor/llama.cpp/common/jinja/*" "*/vendor/llama.cpp/common/json.*" "*/vendor/llama.cpp/common/unicode.*"
    "*/vendor/llama.cpp/LICENSE")
  execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/patch_jinja.py ${jinja_common}
    COMMAND_ERROR_IS_FATAL ANY)
  # The one thing that the engine wants of ggml.
  file(WRITE ${jinja_dir}/stub/ggml.h "#pragma once\n#include <cassert>\n#define GGML_ASSERT(x) assert(x)\n")
  file(TOUCH ${jinja_stamp})
endif()

# NDEBUG: its assertions test the template, and a bad template must not end the process.
add_library(millrace_jinja STATIC
  ${jinja_common}/jinja/lexer.cpp ${jinja_common}/jinja/parser.cpp ${jinja_common}/jinja/runtime.cpp
  ${jinja_common}/jinja/string.cpp ${jinja_common}/jinja/value.cpp ${jinja_common}/json.cpp ${jinja_common}/unicode.cpp
  ${PROJECT_SOURCE_DIR}/router/text/jinja_budget.cc ${PROJECT_SOURCE_DIR}/router/text/jinja_builtins.cc
  ${PROJECT_SOURCE_DIR}/router/text/python_float.cc)
target_include_directories(millrace_jinja SYSTEM PRIVATE ${jinja_common} ${jinja_dir}/stub)
target_include_directories(millrace_jinja PRIVATE ${PROJECT_SOURCE_DIR})
# For the two source files of ours that include the engine; its headers must be compiled alike on both sides.
set(millrace_jinja_flags -isystem ${jinja_common} -isystem ${jinja_dir}/stub -DNDEBUG)
target_compile_definitions(millrace_jinja PRIVATE NDEBUG)
target_compile_options(millrace_jinja PRIVATE -w)
target_link_libraries(millrace_jinja PUBLIC millrace::json PRIVATE millrace_unicode)
if(MILLRACE_SANITIZE)
  target_compile_options(millrace_jinja PRIVATE -fsanitize=${MILLRACE_SANITIZE} -fno-omit-frame-pointer)
endif()
