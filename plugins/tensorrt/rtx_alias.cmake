# libtensorrt_rtx.so beside the plugins: an empty library that needs libtensorrt_rtx.so.1. The parser of TensorRT-RTX
# looks plugins up through a library of the first name, its wheel has only the second, and where there is none
# the process ends. Loaded after the wheel and before the parser meets a plugin, it is found.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/empty.cc "")
add_library(rtx_placeholder SHARED ${CMAKE_CURRENT_BINARY_DIR}/empty.cc)  # for the wheel's, while linking
set_target_properties(rtx_placeholder PROPERTIES OUTPUT_NAME tensorrt_rtx SOVERSION 1
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/placeholder)
add_library(rtx_alias SHARED ${CMAKE_CURRENT_BINARY_DIR}/empty.cc)
set_target_properties(rtx_alias PROPERTIES OUTPUT_NAME tensorrt_rtx BUILD_WITH_INSTALL_RPATH ON)
target_link_options(rtx_alias PRIVATE LINKER:--no-as-needed)
target_link_libraries(rtx_alias PRIVATE rtx_placeholder)
