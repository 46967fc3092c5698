/* Which code has run, for the fuzzer: gcc and clang call this at each basic block. The cells are a file that the fuzzer has mapped too. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define CELLS 65536u /* tests/fuzz/agents.py has it too */

#if defined(__clang__)
#define UNCOUNTED __attribute__((no_sanitize("coverage", "address", "undefined")))
#else
#define UNCOUNTED __attribute__((no_sanitize_coverage, no_sanitize("address", "undefined")))
#endif

static uint8_t nowhere[CELLS];
static uint8_t *cells = nowhere;

void coverage_open(const char *path);
void __sanitizer_cov_trace_pc(void);

UNCOUNTED void coverage_open(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *found = fd < 0 ? MAP_FAILED : mmap(NULL, CELLS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found == MAP_FAILED)
        abort();
    close(fd);
    cells = found;
}

UNCOUNTED void __sanitizer_cov_trace_pc(void)
{
    uint64_t mixed = (uint64_t)(uintptr_t)__builtin_return_address(0) * 0x9E3779B97F4A7C15u;
    cells[mixed >> 48] = 1;
}
