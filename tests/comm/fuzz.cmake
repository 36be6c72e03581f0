# The rendezvous needs no libtorch.
add_executable(fuzz_rendezvous
  ${CMAKE_CURRENT_LIST_DIR}/fuzz_rendezvous.cpp
  ${PROJECT_SOURCE_DIR}/dtensor/comm/rendezvous_server.cpp
  ${PROJECT_SOURCE_DIR}/dtensor/comm/rendezvous_wire.cpp)
target_link_libraries(fuzz_rendezvous PRIVATE dtensor::core dtensor::secret)
target_link_options(fuzz_rendezvous PRIVATE -fsanitize=fuzzer)
dtensor_strict(fuzz_rendezvous)
