# aft_link_old_glibc(NAME): lets the linker find the threads, dl and rt of x86-64's glibc 2.28 before those of this
# machine's libc.so.6. The listed symbols are those that CUDA's static runtime uses; one that is missing here shows as a
# GLIBC_2.34 in auditwheel's report.
set(AFT_GLIBC_PTHREAD
    pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create
    pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
    pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
    pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
    pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy
    pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy pthread_spin_init
    pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait
    sem_wait)
set(AFT_GLIBC_DL dlclose dlerror dlopen dlsym dlvsym dlmopen@GLIBC_2.3.4)
set(AFT_GLIBC_RT shm_open shm_unlink)

# A library of empty functions, only for the linker. A symbol without a version has that of x86-64's first glibc.
function(aft_add_glibc_stub stem soversion)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/glibc_${stem}.cc)
  set(map ${CMAKE_CURRENT_BINARY_DIR}/glibc_${stem}.map)
  set(functions "")
  set(GLIBC_2.2.5 "")
  set(GLIBC_2.3.4 "")
  foreach(symbol ${ARGN})
    string(REPLACE "@" ";" symbol "${symbol};GLIBC_2.2.5")
    list(GET symbol 0 function)
    list(GET symbol 1 version)
    string(APPEND functions "extern \"C\" void ${function}() {}\n")
    string(APPEND ${version} "${function}; ")
  endforeach()
  set(versions "GLIBC_2.2.5 { global: ${GLIBC_2.2.5}local: *; };\n")
  if(GLIBC_2.3.4)
    string(APPEND versions "GLIBC_2.3.4 { global: ${GLIBC_2.3.4}};\n")
  endif()
  file(GENERATE OUTPUT ${source} CONTENT "${functions}")
  file(GENERATE OUTPUT ${map} CONTENT "${versions}")
  add_library(glibc_${stem} SHARED ${source})
  set_target_properties(glibc_${stem} PROPERTIES OUTPUT_NAME ${stem} SOVERSION ${soversion} LINK_DEPENDS ${map}
      CXX_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/glibc)
  target_link_options(glibc_${stem} PRIVATE -nostdlib LINKER:--version-script=${map})
endfunction()

function(aft_link_old_glibc name)
  if(NOT TARGET glibc_pthread)
    aft_add_glibc_stub(pthread 0 ${AFT_GLIBC_PTHREAD})
    aft_add_glibc_stub(dl 2 ${AFT_GLIBC_DL})
    aft_add_glibc_stub(rt 1 ${AFT_GLIBC_RT})
  endif()
  target_link_options(${name} PRIVATE LINKER:--no-as-needed)  # CUDA's runtime, the first to need them, comes later
  target_link_libraries(${name} PRIVATE glibc_pthread glibc_dl glibc_rt)
  set_target_properties(${name} PROPERTIES BUILD_WITH_INSTALL_RPATH ON)  # the empty functions are never loaded
endfunction()
