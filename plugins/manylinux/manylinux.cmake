# aft_link_for_manylinux(NAME): with AFT_MANYLINUX, a library that loads where glibc is 2.28 or later, whatever glibc
# this machine has. Compiler and options stay the same, so the kernels are the same instructions.
#
# Three things tie a library to the glibc and the compiler of the machine that built it:
#   libstdc++                is linked into the library, hidden, and only as far as the library uses it
#   __libc_single_threaded   GCC's headers read this variable of glibc 2.32; the library gets its own
#   threads, dl and rt       glibc 2.34 moved them into libc.so.6 under a new version. The linker sees libraries with
#                            the old names and versions first; every later glibc keeps those. See glibc_stubs.cmake.
option(AFT_MANYLINUX "Link libraries that load on any Linux distribution with glibc 2.28 or later" OFF)
set(AFT_MANYLINUX_DIR ${CMAKE_CURRENT_LIST_DIR})
include(${AFT_MANYLINUX_DIR}/glibc_stubs.cmake)

function(aft_link_for_manylinux name)
  if(NOT AFT_MANYLINUX)
    return()
  endif()
  target_sources(${name} PRIVATE ${AFT_MANYLINUX_DIR}/single_threaded.cc)
  target_link_options(${name} PRIVATE -static-libstdc++ LINKER:--gc-sections LINKER:--exclude-libs,ALL)
  if(CMAKE_CUDA_COMPILER)
    aft_link_old_glibc(${name})
  endif()
endfunction()
