# How everything in this project is compiled.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths below the project are remembered relative to the build folder: another clone finds what this one compiled.
  set(DTENSOR_CCACHE_SETTINGS CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1)
  if(DTENSOR_QUICK_TESTS)  # what ccache asks for, to remember files that take a precompiled header
    list(APPEND DTENSOR_CCACHE_SETTINGS CCACHE_SLOPPINESS=pch_defines,time_macros)
  endif()
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env ${DTENSOR_CCACHE_SETTINGS} ${CCACHE})
endif()

find_package(Threads REQUIRED)

if(DTENSOR_SANITIZE)
  add_compile_options(-fsanitize=${DTENSOR_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${DTENSOR_SANITIZE})
endif()

if(DTENSOR_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)  # what libFuzzer looks at to find new paths
endif()

# Warnings in our own code, never in what we include; errors where we build (CI, the presets), not at a user's, whose
# compiler may know warnings that ours does not.
function(dtensor_strict target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor)
  if(DTENSOR_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Wrong alarms: "a" + string (GCC bug 105651), and sorting a short list in an inline buffer (GCC 13).
    target_compile_options(${target} PRIVATE -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow)
  endif()
endfunction()

# For the folders of tests and examples, with DTENSOR_QUICK_TESTS. What is tested is compiled as ever.
macro(dtensor_quick_folder)
  if(DTENSOR_QUICK_TESTS)
    add_compile_options(-O0)
    set(CMAKE_POSITION_INDEPENDENT_CODE OFF)  # the compiler's default, the same for libraries and programs
  endif()
endmacro()

# dtensor_takes_torch(target…): these include all of torch; with DTENSOR_QUICK_TESTS they take it precompiled.
function(dtensor_takes_torch)
  if(NOT DTENSOR_QUICK_TESTS OR NOT DTENSOR_TORCH)
    return()
  endif()
  if(NOT TARGET dtensor_precompiled)
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/precompiled.cpp CONTENT "// Nothing but the headers.\n")
    add_library(dtensor_precompiled OBJECT ${PROJECT_BINARY_DIR}/precompiled.cpp)
    target_link_libraries(dtensor_precompiled PRIVATE dtensor::dtensor)
    dtensor_strict(dtensor_precompiled)
    target_precompile_headers(dtensor_precompiled PRIVATE <torch/torch.h>)
  endif()
  foreach(target ${ARGN})
    target_precompile_headers(${target} REUSE_FROM dtensor_precompiled)
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endforeach()
endfunction()

# dtensor_library(core SOURCES a.cpp b.cpp LINK dtensor::x): the target dtensor_core, known as dtensor::core, installed
# with its headers.
function(dtensor_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(dtensor_${name} ${ARG_SOURCES})
  add_library(dtensor::${name} ALIAS dtensor_${name})
  set_target_properties(dtensor_${name} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(dtensor_${name} PUBLIC cxx_std_20)
  target_include_directories(dtensor_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                                    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(dtensor_${name} PUBLIC ${ARG_LINK})
  dtensor_strict(dtensor_${name})
  install(TARGETS dtensor_${name} EXPORT dtensorTargets)
endfunction()
