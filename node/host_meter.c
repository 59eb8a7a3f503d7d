#include "node/host_meter.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/clock.h"

enum {
    TEXT_MAX = 16384,
    CPU_MAX = 8,     /* asked for their frequency */
    STAT_START = 22, /* field of /proc/self/stat: start time in clock ticks since boot */
    STAT_NAME = 2,
};

/* What a small file holds, as text; false when it cannot be read. */
static bool read_text(const char *path, char *out, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    size_t done = 0;
    ssize_t got;
    while (done < size - 1 && (got = read(fd, out + done, size - 1 - done)) > 0) {
        done += (size_t)got;
    }
    close(fd);
    out[done] = '\0';
    return done > 0;
}

static uint64_t medium_bytes(void)
{
    char text[1024];
    const char *word = "\nread_bytes: ";
    const char *at = read_text("/proc/self/io", text, sizeof(text)) ? strstr(text, word) : NULL;
    return at == NULL ? 0 : strtoull(at + strlen(word), NULL, 10);
}

static uint32_t mhz(void)
{
    char path[96];
    char text[TEXT_MAX];
    double most = 0;
    for (int cpu = 0; cpu < CPU_MAX; cpu++) {
        snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/cpufreq/scaling_cur_freq", cpu);
        if (!read_text(path, text, sizeof(text))) {
            break;
        }
        const double here = strtod(text, NULL) / 1000;
        most = here > most ? here : most;
    }
    if (most == 0 && read_text("/proc/cpuinfo", text, sizeof(text))) {
        const char *at = strstr(text, "cpu MHz");
        at = at == NULL ? NULL : strchr(at, ':');
        most = at == NULL ? 0 : strtod(at + 1, NULL);
    }
    return most > 0 && most < 1e6 ? (uint32_t)most : 0;
}

struct host_meter host_meter_system(void)
{
    return (struct host_meter){.medium_bytes = medium_bytes, .mhz = mhz};
}

static uint64_t clock_ns(clockid_t id)
{
    struct timespec now = {0};
    (void)clock_gettime(id, &now);
    return (uint64_t)now.tv_sec * FL_NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t host_meter_exec_ns(void)
{
    char text[2048];
    const long ticks = sysconf(_SC_CLK_TCK);
    if (ticks <= 0 || !read_text("/proc/self/stat", text, sizeof(text))) {
        return 0;
    }
    /* The name is in brackets and may hold anything, brackets and blanks included. */
    const char *at = strrchr(text, ')');
    for (int field = STAT_NAME; at != NULL && field < STAT_START; field++) {
        at = strchr(at + 1, ' ');
    }
    if (at == NULL) {
        return 0;
    }
    const uint64_t since_boot_ns = strtoull(at, NULL, 10) * (FL_NS_PER_S / (uint64_t)ticks);
    /* Boot time goes on during suspend, monotonic time does not. */
    const uint64_t age_ns = clock_ns(CLOCK_BOOTTIME) - since_boot_ns;
    const uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    return age_ns < now_ns ? now_ns - age_ns : 0;
}
