/* How the sanitizers end a program in which they found something. Compiled in, since the spawner's environment is not its starter's. */
const char *__asan_default_options(void);
const char *__ubsan_default_options(void);

const char *__asan_default_options(void) { return "exitcode=99:detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=8"; }
const char *__ubsan_default_options(void) { return "exitcode=99:print_stacktrace=1"; }
