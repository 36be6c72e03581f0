# The launcher: standard C++ and POSIX, without libtorch.
dtensor_library(launch SOURCES ${CMAKE_CURRENT_LIST_DIR}/launch.cpp ${CMAKE_CURRENT_LIST_DIR}/launch_run.cpp
                LINK dtensor_core)
