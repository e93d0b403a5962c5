// GCC's headers skip atomic instructions in a process of one thread. Since glibc 2.32 they ask this variable, which an
// older glibc lacks. 0 means that there may be several threads, which is always safe.
extern "C" {
__attribute__((visibility("hidden"))) extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
