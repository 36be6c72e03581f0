# The Python that the chosen libtorch belongs to, as DTENSOR_PYTHON_EXECUTABLE; not set where it belongs to none, or where
# that Python's headers are missing (Debian: python3-dev).
find_library(DTENSOR_TORCH_PYTHON torch_python PATHS ${DTENSOR_TORCH_ROOT}/../../../lib NO_DEFAULT_PATH)
if(DTENSOR_TORCH_PYTHON)
  string(REGEX REPLACE "/lib/python3[^/]*/.*" "/bin/python3" Python_EXECUTABLE ${DTENSOR_TORCH_ROOT})
  find_package(Python COMPONENTS Interpreter Development.Module)
  if(Python_Development.Module_FOUND)
    set(DTENSOR_PYTHON_EXECUTABLE ${Python_EXECUTABLE})
    add_subdirectory(bindings/python)
  else()
    message(STATUS "The Python package is not built: ${Python_EXECUTABLE} has no headers")
  endif()
endif()
