/* The table of the sandboxes that there are: finding one and forgetting it. */
#include <stddef.h>
#include <sys/mman.h>

#include "spawn_table.h"

struct table *table;

int table_prepare(void)
{
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return table == MAP_FAILED ? -1 : madvise(table, sizeof *table, MADV_DONTFORK);
}

uint32_t table_find(uint32_t id)
{
    uint32_t i = 0;
    while (i < table->count && table->ids[i] != id)
        i++;
    return i;
}

uint32_t table_find_pid(pid_t pid)
{
    uint32_t i = 0;
    while (i < table->count && table->pids[i] != pid)
        i++;
    return i;
}

void table_forget(uint32_t i)
{
    uint32_t last = --table->count;
    table->ids[i] = table->ids[last];
    table->pids[i] = table->pids[last];
    table->boxes[i] = table->boxes[last];
}
