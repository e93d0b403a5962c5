# aft_add_onnxruntime_cuda(NAME KERNELS...): the custom-op library for the CUDA execution provider, over targets that
# have the kernels of plugins/cuda.
set(AFT_ONNXRUNTIME_DIR ${CMAKE_CURRENT_LIST_DIR})

function(aft_add_onnxruntime_cuda name)
  set(sources onnxruntime/checks.cc onnxruntime/cuda_backend.cc onnxruntime/ops.cc onnxruntime/register.cc
      onnxruntime/runtime.cc operators/cuda_calls.cc operators/operators.cc)
  list(TRANSFORM sources PREPEND ${AFT_ONNXRUNTIME_DIR}/../)
  add_library(${name} MODULE ${sources})
  target_include_directories(${name} PRIVATE ${AFT_ONNXRUNTIME_DIR}/..)
  target_link_libraries(${name} PRIVATE ${ARGN})
  # The CUDA runtime linked into it stays its own, whichever the process has loaded.
  target_link_options(${name} PRIVATE LINKER:--no-undefined LINKER:--exclude-libs,ALL
      LINKER:--version-script=${AFT_ONNXRUNTIME_DIR}/exports.map)
  set_target_properties(${name} PROPERTIES PREFIX lib CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
      LINK_DEPENDS ${AFT_ONNXRUNTIME_DIR}/exports.map)
endfunction()
