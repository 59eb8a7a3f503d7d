/* guard.h - memory between two inaccessible pages.
 *
 * A guarded block begins right after one or ends right before the other, so that
 * a read or write one byte too far is a fault, whatever the file was compiled
 * with: the kernels with wide registers are not instrumented.
 *
 * Thread:  one.
 * Memory:  guard_free_all() gives back everything since the last one.
 */
#ifndef TESTS_KERNELS_GUARD_H
#define TESTS_KERNELS_GUARD_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GUARD_PAGE = 4096, GUARD_BLOCKS_MAX = 32, GUARD_TEXT_MAX = 160 };

/* Which inaccessible page the block lies against. */
enum guard_side { GUARD_AFTER, GUARD_BEFORE, GUARD_SIDES };

struct guard {
    struct {
        void *memory;
        size_t size;
    } blocks[GUARD_BLOCKS_MAX];
    int count;
    enum guard_side side;
};

static inline void *guard_alloc(struct guard *guard, size_t size)
{
    const size_t inside = (size + GUARD_PAGE - 1) / GUARD_PAGE * GUARD_PAGE;
    const size_t all = inside + 2 * (size_t)GUARD_PAGE;
    uint8_t *memory = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (guard->count == GUARD_BLOCKS_MAX || memory == MAP_FAILED ||
        (inside > 0 && mprotect(memory + GUARD_PAGE, inside, PROT_READ | PROT_WRITE) != 0)) {
        abort();
    }
    guard->blocks[guard->count].memory = memory;
    guard->blocks[guard->count++].size = all;
    return memory + GUARD_PAGE + (guard->side == GUARD_AFTER ? inside - size : 0);
}

/* A guarded copy of `size` bytes. */
static inline void *guard_copy(struct guard *guard, const void *from, size_t size)
{
    return memcpy(guard_alloc(guard, size), from, size);
}

static inline void guard_free_all(struct guard *guard)
{
    for (int i = 0; i < guard->count; i++) {
        munmap(guard->blocks[i].memory, guard->blocks[i].size);
    }
    guard->count = 0;
}

/* What runs now, for the line that a fault prints. */
static char guard_running[GUARD_TEXT_MAX];

static inline void guard_fault(int signal_number)
{
    static const char text[] = "  out of bounds: ";
    (void)signal_number;
    ssize_t written = write(STDOUT_FILENO, text, sizeof(text) - 1);
    written += write(STDOUT_FILENO, guard_running, strlen(guard_running));
    written += write(STDOUT_FILENO, "\n", 1);
    _exit(written > 0 ? 1 : 2);
}

/* From here on a fault ends the program with that line. */
static inline void guard_faults(void)
{
    const struct sigaction action = {.sa_handler = guard_fault};
    if (sigaction(SIGSEGV, &action, NULL) != 0 || sigaction(SIGBUS, &action, NULL) != 0) {
        abort();
    }
}

#endif
