#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cpu_pool.h"
#include "kernels/device.h"

enum {
    MAPPED_SIZE_MIN = 1 << 20, /* from here on memory is mapped: it goes back when freed */
    MEMORY_ALIGNMENT = 64,
    LARGE_PAGE = 2 << 20, /* of x86-64 */
};

static size_t round_up(size_t size)
{
    return (size + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
}

static void *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Memory that begins with a large page.  What does not fill one at its end stays in small pages, so
 * that no more becomes resident than was asked for. */
static void *map_large(size_t size)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t whole =
        (size + page - 1) / page * page; /* munmap() in host_free() rounds the same */
    uint8_t *memory = map(whole + LARGE_PAGE);
    if (memory == NULL) {
        return NULL;
    }
    const size_t before = (LARGE_PAGE - (uintptr_t)memory % LARGE_PAGE) % LARGE_PAGE;
    if (before > 0) {
        FL_ASSERT(munmap(memory, before) == 0);
    }
    FL_ASSERT(munmap(memory + before + whole, LARGE_PAGE - before) == 0);
    (void)madvise(memory + before, whole, MADV_HUGEPAGE); /* a wish: small pages are only slower */
    return memory + before;
}

static void *host_alloc(struct device *device, enum device_memory use, size_t size)
{
    (void)device;
    if (size > SIZE_MAX / 2) {
        return NULL;
    }
    if (size < MAPPED_SIZE_MIN) {
        return aligned_alloc(MEMORY_ALIGNMENT, round_up(size == 0 ? 1 : size));
    }
    if (use == DEVICE_MEMORY_WEIGHTS) {
        return map_large(size);
    }
    void *memory = map(size);
    if (memory != NULL) {
        /* Where large pages are the rule, one touched byte would make two mebibytes resident. */
        (void)madvise(memory, size, MADV_NOHUGEPAGE);
    }
    return memory;
}

static void host_free(struct device *device, void *memory, size_t size)
{
    (void)device;
    if (memory == NULL) {
        return;
    }
    if (size < MAPPED_SIZE_MIN) {
        free(memory);
    } else {
        FL_ASSERT(munmap(memory, size) == 0);
    }
}

static void host_copy(struct device *device, void *to, const void *from, size_t size)
{
    (void)device;
    memcpy(to, from, size);
}

static fl_status host_poll(struct device *device)
{
    (void)device;
    return FL_OK; /* kernels are done when they return */
}

static void host_close(struct device *device)
{
    if (device != NULL) {
        cpu_pool_close(device->stream);
        free(device);
    }
}

static const struct device_ops host_ops = {
    .name = "host",
    .alloc = host_alloc,
    .free = host_free,
    .copy_in = host_copy,
    .copy_out = host_copy,
    .poll = host_poll,
    .close = host_close,
};

fl_status device_host_open(const struct device_host_config *config, struct device **out)
{
    const struct kernel_ops *kernels;
    FL_TRY(kernel_ops_select(config->isa, &kernels));
    struct device *device = malloc(sizeof(*device));
    if (device == NULL) {
        return FL_FAIL(FL_NO_MEMORY, "no memory for a device: %zu bytes", sizeof(*device));
    }
    struct cpu_pool *pool;
    const fl_status status = cpu_pool_open(config->threads, &pool);
    if (status != FL_OK) {
        free(device);
        return status;
    }
    if (config->affinity != NULL) {
        cpu_pool_bind(pool, config->affinity);
    }
    *device = (struct device){
        .ops = &host_ops,
        .kernels = kernels,
        .stream = pool,
        .threads = cpu_pool_threads(pool),
    };
    *out = device;
    return FL_OK;
}
