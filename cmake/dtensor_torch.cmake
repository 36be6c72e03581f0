# libtorch as dtensor::torch. TORCH_DIR or CMAKE_PREFIX_PATH say where it is; `make` finds it by itself.
if(TORCH_DIR AND NOT Torch_DIR)
  list(PREPEND CMAKE_PREFIX_PATH ${TORCH_DIR})
endif()
# Torch's own files look for their parts on the system first: where another libtorch is installed they would mix the two,
# unless the chosen one's root comes before all else.
if(Torch_DIR)
  get_filename_component(DTENSOR_TORCH_PREFIX "${Torch_DIR}/../../.." ABSOLUTE)
  list(PREPEND CMAKE_PREFIX_PATH ${DTENSOR_TORCH_PREFIX})
endif()
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(FATAL_ERROR "libtorch was not found; try `make test`, which finds or installs one, "
                      "or -DCMAKE_PREFIX_PATH=<libtorch>, or -DDTENSOR_TORCH=OFF for core alone")
endif()
get_filename_component(DTENSOR_TORCH_ROOT "${Torch_DIR}" ABSOLUTE)
message(STATUS "libtorch ${Torch_VERSION} (${DTENSOR_TORCH_ROOT})")

# Torch's headers take seconds per file unless each operator's header is included by itself.
add_library(dtensor_torch INTERFACE)
add_library(dtensor::torch ALIAS dtensor_torch)
set_target_properties(dtensor_torch PROPERTIES EXPORT_NAME torch)
target_link_libraries(dtensor_torch INTERFACE torch)
target_compile_definitions(dtensor_torch INTERFACE AT_PER_OPERATOR_HEADERS DTENSOR_HAS_TORCH)
install(TARGETS dtensor_torch EXPORT dtensorTargets)
