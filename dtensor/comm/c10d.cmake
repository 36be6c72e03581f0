# The c10d backend: adds its files to dtensor_comm.
target_sources(dtensor_comm PRIVATE
  ${CMAKE_CURRENT_LIST_DIR}/c10d.cpp
  ${CMAKE_CURRENT_LIST_DIR}/c10d_agent.cpp
  ${CMAKE_CURRENT_LIST_DIR}/c10d_exchange.cpp
  ${CMAKE_CURRENT_LIST_DIR}/c10d_gloo.cpp
  ${CMAKE_CURRENT_LIST_DIR}/c10d_group.cpp
  ${CMAKE_CURRENT_LIST_DIR}/c10d_queue.cpp
  ${CMAKE_CURRENT_LIST_DIR}/c10d_store.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rendezvous_client.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rendezvous_server.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rendezvous_wire.cpp)

# libtorch has ProcessGroupGloo.hpp, but not the headers of Gloo that it includes: ours stand in for them, and come
# first so that another Gloo on this machine cannot be mixed in.
set(DTENSOR_GLOO_HEADERS ${CMAKE_CURRENT_BINARY_DIR}/gloo_headers)
foreach(header algorithm context common/error rendezvous/store transport/device)
  file(CONFIGURE OUTPUT ${DTENSOR_GLOO_HEADERS}/gloo/${header}.h CONTENT "#include \"dtensor/comm/gloo_impl.h\"\n")
endforeach()
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/c10d_gloo.cpp ${CMAKE_CURRENT_LIST_DIR}/c10d_group.cpp
  PROPERTIES INCLUDE_DIRECTORIES ${DTENSOR_GLOO_HEADERS})

# NCCL where libtorch was built with CUDA: its header needs those of CUDA and NCCL.
find_path(DTENSOR_NCCL_INCLUDE nccl.h
          PATHS ${TORCH_INSTALL_PREFIX}/../nvidia/nccl/include ${CUDA_INCLUDE_DIRS} ${CUDAToolkit_INCLUDE_DIRS})
if(TORCH_CUDA_LIBRARIES AND DTENSOR_NCCL_INCLUDE)
  target_sources(dtensor_comm PRIVATE ${CMAKE_CURRENT_LIST_DIR}/c10d_nccl.cpp)
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/c10d_nccl.cpp PROPERTIES
    INCLUDE_DIRECTORIES "${DTENSOR_GLOO_HEADERS};${DTENSOR_NCCL_INCLUDE}" COMPILE_DEFINITIONS USE_C10D_NCCL)
else()
  target_sources(dtensor_comm PRIVATE ${CMAKE_CURRENT_LIST_DIR}/c10d_no_nccl.cpp)
endif()
