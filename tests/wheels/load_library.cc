// load_library LIBRARY SYMBOL: exits with 0 if the library loads with all its symbols and exports SYMBOL.
#include <dlfcn.h>

#include <cstdio>

int main(int count, char** words) {
  void* library = count == 3 ? dlopen(words[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (library && dlsym(library, words[2])) return 0;
  const char* message = dlerror();
  std::fprintf(stderr, "%s\n", message ? message : "expected LIBRARY SYMBOL");
  return 1;
}
