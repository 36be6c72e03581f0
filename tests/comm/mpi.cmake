# The tests of the backend mpi; DTENSOR_HAS_MPI comes from dtensor/comm/mpi.cmake.
add_executable(test_comm_mpi_missing mpi_missing_test.cpp ${PROJECT_SOURCE_DIR}/dtensor/comm/no_mpi.cpp)
target_include_directories(test_comm_mpi_missing PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(test_comm_mpi_missing PRIVATE dtensor::core dtensor::torch GTest::gtest_main)
dtensor_strict(test_comm_mpi_missing)
gtest_discover_tests(test_comm_mpi_missing TEST_PREFIX comm. DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 60 LABELS comm)

if(DTENSOR_HAS_MPI)
  add_executable(mpi_ranks mpi_ranks.cpp)
  target_link_libraries(mpi_ranks PRIVATE dtensor::comm comm_contract MPI::MPI_CXX)
  dtensor_strict(mpi_ranks)

  comm_test(mpi PROCESSES SOURCES mpi_test.cpp TIMEOUT 180)
  add_dependencies(test_comm_mpi mpi_ranks)
  target_compile_definitions(test_comm_mpi PRIVATE DTENSOR_MPIRUN="${MPIEXEC_EXECUTABLE}"
                                                   DTENSOR_MPI_RANKS="$<TARGET_FILE:mpi_ranks>")
  comm_test(mpi_schedule SHARDS 1 SOURCES mpi_schedule_test.cpp)
endif()
