# The CUDA kernels, one file per mechanism: for the GPU build beside this file and for the emulated build of
# the tests.
file(GLOB_RECURSE AFT_CUDA_KERNELS CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)
set(AFT_CUDA_ERROR_TEXT ${CMAKE_CURRENT_LIST_DIR}/error_text.cc)  # on a GPU; the emulator has its own
set(AFT_CUDA_INCLUDE ${CMAKE_CURRENT_LIST_DIR} ${CMAKE_CURRENT_LIST_DIR}/..)  # the latter for cpu/kernels.h
