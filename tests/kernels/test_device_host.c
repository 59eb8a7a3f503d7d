/* Memory of the host device: as much as asked for, resident only where it must be. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/device.h"
#include "tests/harness.h"

enum { MIB = 1 << 20 };

static const size_t sizes[] = {0, 1, 64, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 4097, 9 * MIB};
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static struct device *open_device(void)
{
    struct device *device = NULL;
    const struct device_host_config config = {.threads = 1};
    CHECK_EQ(device_host_open(&config, &device), FL_OK);
    return device;
}

/* Resident pages of this process, as bytes. */
static size_t resident(void)
{
    char text[128] = "";
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL);
    const bool got = fgets(text, sizeof(text), file) != NULL;
    fclose(file);
    const char *second = strchr(text, ' ');
    CHECK(got && second != NULL);
    return strtoul(second, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
}

static void test_every_byte_is_there_and_aligned(void)
{
    struct device *device = open_device();
    for (int use = DEVICE_MEMORY_WEIGHTS; use <= DEVICE_MEMORY_BUFFER; use++) {
        uint8_t *memory[SIZES];
        for (int i = 0; i < SIZES; i++) {
            memory[i] = device->ops->alloc(device, (enum device_memory)use, sizes[i]);
            CHECK(memory[i] != NULL && (uintptr_t)memory[i] % 64 == 0);
            memset(memory[i], i + 1, sizes[i]);
        }
        for (int i = 0; i < SIZES; i++) {
            CHECK(sizes[i] == 0 || (memory[i][0] == i + 1 && memory[i][sizes[i] - 1] == i + 1));
            device->ops->free(device, memory[i], sizes[i]);
        }
    }
    device->ops->close(device);
}

static void test_weights_begin_a_large_page(void)
{
    struct device *device = open_device();
    for (int i = 0; i < SIZES; i++) {
        void *memory = device->ops->alloc(device, DEVICE_MEMORY_WEIGHTS, sizes[i]);
        CHECK(memory != NULL && (sizes[i] < MIB || (uintptr_t)memory % (2 * MIB) == 0));
        device->ops->free(device, memory, sizes[i]);
    }
    device->ops->close(device);
}

static void test_untouched_buffers_cost_nothing_and_freed_weights_are_gone(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    TEST_SKIP("a sanitizer's shadow memory is resident too");
#endif
    struct device *device = open_device();
    const size_t size = (size_t)65 * MIB;
    const size_t before = resident();
    uint8_t *buffer = device->ops->alloc(device, DEVICE_MEMORY_BUFFER, size);
    CHECK(buffer != NULL);
    for (size_t at = 0; at < size; at += 4 * MIB) {
        buffer[at] = 1;
    }
    CHECK(resident() < before + 2 * MIB);
    uint8_t *weights = device->ops->alloc(device, DEVICE_MEMORY_WEIGHTS, size);
    CHECK(weights != NULL);
    memset(weights, 1, size);
    CHECK(resident() >= before + size && resident() < before + size + 3 * MIB);
    device->ops->free(device, weights, size);
    device->ops->free(device, buffer, size);
    CHECK(resident() < before + 2 * MIB);
    device->ops->close(device);
}

static void test_more_than_there_can_be_is_no_memory(void)
{
    struct device *device = open_device();
    static const size_t beyond[] = {SIZE_MAX, SIZE_MAX - 63, SIZE_MAX / 2 + 1, (size_t)1 << 60};
    for (int i = 0; i < 4; i++) {
        CHECK(device->ops->alloc(device, DEVICE_MEMORY_WEIGHTS, beyond[i]) == NULL);
        CHECK(device->ops->alloc(device, DEVICE_MEMORY_BUFFER, beyond[i]) == NULL);
    }
    device->ops->close(device);
}

static const struct test_case cases[] = {
    {"device: every byte is there and aligned", test_every_byte_is_there_and_aligned},
    {"device: weights begin a large page", test_weights_begin_a_large_page},
    {"device: untouched buffers cost nothing and freed weights are gone",
     test_untouched_buffers_cost_nothing_and_freed_weights_are_gone},
    {"device: more than there can be is no memory", test_more_than_there_can_be_is_no_memory},
};

TEST_MAIN(cases)
