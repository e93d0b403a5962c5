# aft_add_tensorrt_plugins(NAME KERNELS...): the plugin library over targets that have the kernels.
# TensorRT's headers are used where TENSORRT_ROOT or the system has them (version 10 or later), else our
# declaration of what is needed of them.
set(AFT_TENSORRT_DIR ${CMAKE_CURRENT_LIST_DIR})
set(AFT_TENSORRT_SOURCES fields.cc log.cc ops.cc plugin.cc register.cc)
list(TRANSFORM AFT_TENSORRT_SOURCES PREPEND ${AFT_TENSORRT_DIR}/)

find_path(AFT_NVINFER_INCLUDE NvInferRuntime.h HINTS ${TENSORRT_ROOT}/include $ENV{TENSORRT_ROOT}/include)
find_path(AFT_CUDA_RUNTIME_INCLUDE cuda_runtime_api.h
    HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} /usr/local/cuda/include)
set(AFT_NVINFER_USABLE OFF)
if(AFT_NVINFER_INCLUDE AND AFT_CUDA_RUNTIME_INCLUDE)
  file(STRINGS ${AFT_NVINFER_INCLUDE}/NvInferRuntime.h AFT_NVINFER_USABLE REGEX "class IPluginV3OneBuild" LIMIT_COUNT 1)
endif()

function(aft_add_tensorrt_plugins name)
  add_library(${name} MODULE ${AFT_TENSORRT_SOURCES})
  target_include_directories(${name} PRIVATE ${AFT_TENSORRT_DIR} ${AFT_CUDA_INCLUDE})
  target_link_libraries(${name} PRIVATE ${ARGN})
  # A runtime that loads the library sees its two functions, and none of the CUDA runtime inside.
  target_link_options(${name} PRIVATE LINKER:--exclude-libs,ALL)
  set_target_properties(${name} PROPERTIES PREFIX lib CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON)
endfunction()

function(aft_use_nvinfer_headers name)
  target_compile_definitions(${name} PRIVATE AFT_NVINFER_HEADERS)
  target_include_directories(${name} SYSTEM PRIVATE ${AFT_NVINFER_INCLUDE} ${AFT_CUDA_RUNTIME_INCLUDE})
endfunction()
