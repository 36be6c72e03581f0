# `cmake --install`, and what find_package(dtensor) reads.
include(CMakePackageConfigHelpers)
set(DTENSOR_CONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/dtensor)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/dtensor DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*_impl.h" EXCLUDE)
install(EXPORT dtensorTargets NAMESPACE dtensor:: DESTINATION ${DTENSOR_CONFIG_DIR})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dtensorConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/dtensorConfig.cmake INSTALL_DESTINATION ${DTENSOR_CONFIG_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dtensorConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dtensorConfig.cmake ${PROJECT_BINARY_DIR}/dtensorConfigVersion.cmake
        DESTINATION ${DTENSOR_CONFIG_DIR})
