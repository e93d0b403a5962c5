# aft_add_tensorrt_plugins(NAME KERNELS...): the plugin library over targets that have the kernels.
# aft_use_nvinfer_headers(NAME FOLDER): TensorRT's own headers for a target, in place of our declaration.
set(AFT_TENSORRT_DIR ${CMAKE_CURRENT_LIST_DIR})
set(AFT_TENSORRT_SOURCES
    fields.cc log.cc plugin.cc register.cc ../operators/cuda_calls.cc ../operators/operators.cc)
list(TRANSFORM AFT_TENSORRT_SOURCES PREPEND ${AFT_TENSORRT_DIR}/)

# The folders of TensorRT's headers that TENSORRT_ROOT (one or several, as in PATH) or the system have, as far as
# they are of version 10 or later, when plugins became what ours are, and have CUDA's header, which they include.
# A folder of TENSORRT_ROOT holds include/, or one folder with include/ for each of several versions.
string(REPLACE ":" ";" AFT_TENSORRT_ROOTS "${TENSORRT_ROOT}:$ENV{TENSORRT_ROOT}")
find_path(AFT_CUDA_RUNTIME_INCLUDE cuda_runtime_api.h
    HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} /usr/local/cuda/include)
set(AFT_NVINFER_INCLUDES)
set(headers)
foreach(root ${AFT_TENSORRT_ROOTS})
  file(GLOB sets ${root}/include/NvInferRuntime.h ${root}/*/include/NvInferRuntime.h)
  list(APPEND headers ${sets})
endforeach()
foreach(header ${headers} /usr/include/NvInferRuntime.h /usr/local/include/NvInferRuntime.h)
  if(EXISTS ${header} AND AFT_CUDA_RUNTIME_INCLUDE)
    file(STRINGS ${header} usable REGEX "class IPluginV3OneBuild" LIMIT_COUNT 1)
    if(usable)
      get_filename_component(folder ${header} DIRECTORY)
      list(APPEND AFT_NVINFER_INCLUDES ${folder})
    endif()
  endif()
endforeach()

function(aft_add_tensorrt_plugins name)
  add_library(${name} MODULE ${AFT_TENSORRT_SOURCES})
  target_include_directories(${name} PRIVATE ${AFT_TENSORRT_DIR} ${AFT_TENSORRT_DIR}/.. ${AFT_CUDA_INCLUDE})
  target_link_libraries(${name} PRIVATE ${ARGN})
  target_link_options(${name} PRIVATE LINKER:--version-script=${AFT_TENSORRT_DIR}/exports.map)
  set_target_properties(${name} PROPERTIES LINK_DEPENDS ${AFT_TENSORRT_DIR}/exports.map)
  set_target_properties(${name} PROPERTIES PREFIX lib CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON)
endfunction()

function(aft_use_nvinfer_headers name folder)
  target_compile_definitions(${name} PRIVATE AFT_NVINFER_HEADERS)
  target_include_directories(${name} SYSTEM PRIVATE ${folder} ${AFT_CUDA_RUNTIME_INCLUDE})
endfunction()
