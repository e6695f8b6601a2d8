# Debian's libraries as imported targets, gRPC and Abseil from their static archives, so that a binary needs a libc, libstdc++
# and prometheus-cpp only, of which Debian has no archive. A gRPC found through CMAKE_PREFIX_PATH wins over the archives.
#   millrace::grpc  gRPC, reflection, Protobuf and Abseil      millrace::protobuf  Protobuf's runtime alone
#   millrace::absl  Abseil alone                                millrace::pcre2  millrace::json  millrace::prometheus
find_package(Threads REQUIRED)
find_program(PROTOC protoc REQUIRED)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(GTest REQUIRED)
find_package(benchmark REQUIRED)

find_library(PROTOBUF_A libprotobuf.a REQUIRED)
find_library(PCRE2_A libpcre2-8.a REQUIRED)
find_library(UTF8PROC_A libutf8proc.a REQUIRED)
cmake_path(GET PROTOBUF_A PARENT_PATH archive_dir)
file(GLOB absl_archives ${archive_dir}/libabsl_*.a)
if(MILLRACE_SANITIZE STREQUAL "thread")
  # Debian's absl::Mutex carries no TSan hooks; this archive is the same source built with them.
  set(tsan_archive ${CMAKE_BINARY_DIR}/tsan-absl/libabsl_synchronization.a)
  if(NOT EXISTS ${tsan_archive})
    execute_process(COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/tsan_absl.sh ${CMAKE_BINARY_DIR}/tsan-absl COMMAND_ERROR_IS_FATAL ANY)
  endif()
  list(REMOVE_ITEM absl_archives ${archive_dir}/libabsl_synchronization.a)
  list(APPEND absl_archives ${tsan_archive})
endif()

add_library(millrace_absl INTERFACE)
target_link_libraries(millrace_absl INTERFACE -Wl,--start-group ${absl_archives} -Wl,--end-group Threads::Threads rt)
add_library(millrace::absl ALIAS millrace_absl)

add_library(millrace_protobuf INTERFACE)
target_link_libraries(millrace_protobuf INTERFACE ${PROTOBUF_A} z Threads::Threads)
add_library(millrace::protobuf ALIAS millrace_protobuf)

add_library(millrace_pcre2 INTERFACE)
target_compile_definitions(millrace_pcre2 INTERFACE PCRE2_CODE_UNIT_WIDTH=8 PCRE2_STATIC UTF8PROC_STATIC)
target_link_libraries(millrace_pcre2 INTERFACE ${PCRE2_A} ${UTF8PROC_A})
add_library(millrace::pcre2 ALIAS millrace_pcre2)

add_library(millrace_json INTERFACE)
target_link_libraries(millrace_json INTERFACE nlohmann_json::nlohmann_json)
add_library(millrace::json ALIAS millrace_json)

add_library(millrace_grpc INTERFACE)
if(CMAKE_PREFIX_PATH)
  find_package(gRPC CONFIG QUIET PATHS ${CMAKE_PREFIX_PATH} NO_DEFAULT_PATH)
endif()
if(gRPC_FOUND)
  target_link_libraries(millrace_grpc INTERFACE gRPC::grpc++ gRPC::grpc++_reflection)
else()
  foreach(name grpc++_reflection grpc++ grpc gpr address_sorting upb re2 cares protobuf ssl crypto z)
    find_library(${name}_A lib${name}.a REQUIRED)
    list(APPEND grpc_archives ${${name}_A})
  endforeach()
  target_link_libraries(millrace_grpc INTERFACE -Wl,--start-group ${grpc_archives} ${absl_archives} -Wl,--end-group
    Threads::Threads rt ${CMAKE_DL_LIBS})
endif()
add_library(millrace::grpc ALIAS millrace_grpc)

find_library(PROMETHEUS_PULL prometheus-cpp-pull REQUIRED)
find_library(PROMETHEUS_CORE prometheus-cpp-core REQUIRED)
add_library(millrace_prometheus INTERFACE)
target_link_libraries(millrace_prometheus INTERFACE ${PROMETHEUS_PULL} ${PROMETHEUS_CORE})
add_library(millrace::prometheus ALIAS millrace_prometheus)
