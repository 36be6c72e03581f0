# The job's secret, and the launcher that makes one: standard C++ and POSIX, without libtorch.
dtensor_library(secret SOURCES ${CMAKE_CURRENT_LIST_DIR}/secret.cpp LINK dtensor_core)
dtensor_library(launch SOURCES ${CMAKE_CURRENT_LIST_DIR}/launch.cpp ${CMAKE_CURRENT_LIST_DIR}/launch_run.cpp
                LINK dtensor_core dtensor_secret)
