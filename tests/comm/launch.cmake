# The tests of the launcher and of secrets; no libtorch in them.
add_executable(launch_main launch_main.cpp ${PROJECT_SOURCE_DIR}/tools/run_command.cpp)
target_link_libraries(launch_main PRIVATE dtensor::launch)
dtensor_strict(launch_main)

add_executable(test_comm_launch launch_test.cpp)
target_link_libraries(test_comm_launch PRIVATE dtensor::launch GTest::gtest_main)
target_compile_definitions(test_comm_launch PRIVATE DTENSOR_LAUNCH_MAIN="$<TARGET_FILE:launch_main>")
add_dependencies(test_comm_launch launch_main)
dtensor_strict(test_comm_launch)
gtest_discover_tests(test_comm_launch TEST_PREFIX comm. DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 120 LABELS comm)

add_executable(test_comm_secret secret_test.cpp)
target_link_libraries(test_comm_secret PRIVATE dtensor::secret GTest::gtest_main)
dtensor_strict(test_comm_secret)
gtest_discover_tests(test_comm_secret TEST_PREFIX comm. DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 60 LABELS comm)
