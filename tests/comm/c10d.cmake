# Helper processes and the tests that start them.
add_executable(c10d_rank c10d_rank.cpp c10d_adopt.cpp on_cuda.cpp)
target_link_libraries(c10d_rank PRIVATE dtensor::comm comm_contract)
dtensor_strict(c10d_rank)
get_target_property(DTENSOR_COMM_BINARY_DIR dtensor_comm BINARY_DIR)
set_source_files_properties(c10d_adopt.cpp PROPERTIES INCLUDE_DIRECTORIES ${DTENSOR_COMM_BINARY_DIR}/gloo_headers)

comm_test(c10d PROCESSES SOURCES c10d_test.cpp c10d_processes.cpp)
target_compile_definitions(test_comm_c10d PRIVATE C10D_RANK="$<TARGET_FILE:c10d_rank>")
add_dependencies(test_comm_c10d c10d_rank)

comm_test(rendezvous SOURCES c10d_rendezvous_test.cpp)
comm_test(join SOURCES join_test.cpp LINK dtensor::secret)
