/* What is in the page cache, of files that were just written and of some that were dropped. */
#include "node/residency.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/harness.h"
#include "tests/support/page_cache.h"
#include "tests/support/temp_folder.h"

enum { SIZE = 1 << 20, LARGE = 8 << 20, PAGE = 4096, ODD = 1000 };

static struct temp_folder folder;

static int make_file(size_t size)
{
    char path[TEMP_PATH_MAX];
    unsigned char *bytes = malloc(size);
    CHECK(bytes != NULL);
    memset(bytes, 7, size);
    temp_folder_make(&folder);
    temp_folder_path(&folder, "file", path);
    temp_folder_put(&folder, "file", bytes, size);
    free(bytes);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static void end(int fd)
{
    close(fd);
    temp_folder_remove(&folder);
}

typedef bool measure_fn(int fd, uint64_t offset, uint64_t size, uint64_t *out);

/* Asked again when some is missing: a page that the kernel moves at the moment does not count. */
static void check_bytes(measure_fn *measure, int fd, uint64_t offset, uint64_t size, uint64_t want)
{
    uint64_t bytes = 0;
    for (int attempt = 0; attempt < 10; attempt++) {
        CHECK(measure(fd, offset, size, &bytes));
        if (bytes >= want) {
            break;
        }
        usleep(1000);
    }
    CHECK_EQ(bytes, want);
}

static void what_was_just_written_is_there(void)
{
    const int fd = make_file(SIZE + ODD);
    check_bytes(residency_measure, fd, 0, SIZE + ODD, SIZE + ODD);
    check_bytes(residency_measure, fd, ODD, PAGE, PAGE); /* parts of two pages */
    check_bytes(residency_measure, fd, ODD, 1, 1);
    check_bytes(residency_measure, fd, SIZE, ODD, ODD);
    check_bytes(residency_measure, fd, 0, 0, 0);
    end(fd);
}

static void what_was_dropped_is_not_and_asking_brings_nothing_in(void)
{
    const int fd = make_file(SIZE);
    if (!page_cache_drop(fd)) {
        end(fd);
        TEST_SKIP("files here are in memory only");
    }
    check_bytes(residency_measure, fd, 0, SIZE, 0);
    check_bytes(residency_measure, fd, 0, SIZE, 0);
    /* One page, and nothing around it. */
    char byte;
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM), 0);
    CHECK_EQ(pread(fd, &byte, 1, SIZE / 2), 1);
    check_bytes(residency_measure, fd, 0, SIZE, PAGE);
    check_bytes(residency_measure, fd, SIZE / 2 + 100, PAGE, PAGE - 100);
    end(fd);
}

static void an_older_kernel_gives_an_estimate(void)
{
    uint64_t bytes = 0;
    int fd = make_file(SIZE);
    check_bytes(residency_estimate, fd, ODD, SIZE - ODD, SIZE - ODD); /* small ranges are exact */
    end(fd);
    fd = make_file(LARGE + ODD);
    check_bytes(residency_estimate, fd, 0, LARGE + ODD, LARGE + ODD);
    check_bytes(residency_estimate, fd, ODD, LARGE, LARGE);
    check_bytes(residency_estimate, fd, 0, 0, 0);
    if (!page_cache_drop(fd)) {
        end(fd);
        TEST_SKIP("files here are in memory only");
    }
    check_bytes(residency_estimate, fd, 0, LARGE + ODD, 0);
    /* Half of it is read: the estimate is about that. */
    static char half[4 * SIZE];
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM), 0);
    CHECK_EQ(pread(fd, half, sizeof(half), 0), sizeof(half));
    CHECK(residency_estimate(fd, 0, LARGE + ODD, &bytes));
    CHECK(bytes > 3 * SIZE && bytes < 5 * SIZE);
    end(fd);
}

static void a_large_file_of_two_pages_is_added_up(void)
{
    enum { FAR = 200 << 20 };
    const int fd = make_file(PAGE);
    CHECK_EQ(ftruncate(fd, FAR + PAGE), 0); /* a hole, but for its ends */
    CHECK_EQ(pwrite(fd, "end", 3, FAR), 3);
    check_bytes(residency_measure, fd, 0, FAR + PAGE, 2 * PAGE);
    end(fd);
}

static void nobody_knows_of_foreign_files(void)
{
    uint64_t bytes = 0;
    int ends[2];
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    CHECK(!residency_measure(ends[0], 0, PAGE, &bytes));
    CHECK(!residency_measure(-1, 0, PAGE, &bytes));
    close(ends[0]);
    close(ends[1]);
    const int fd = make_file(PAGE);
    CHECK(!residency_measure(fd, UINT64_MAX - 10, 100, &bytes));
    if (geteuid() == 0) {
        /* Another's file, looked at by nobody in particular. */
        CHECK_EQ(fchown(fd, 1, 1), 0);
        CHECK_EQ(fchmod(fd, 0644), 0);
        CHECK_EQ(seteuid(65534), 0);
        const bool known = residency_measure(fd, 0, PAGE, &bytes);
        CHECK_EQ(seteuid(0), 0);
        CHECK(!known);
    }
    end(fd);
}

static const struct test_case cases[] = {
    {"residency: what was just written is there, to the byte", what_was_just_written_is_there},
    {"residency: what was dropped is not, and asking brings nothing in",
     what_was_dropped_is_not_and_asking_brings_nothing_in},
    {"residency: an older kernel gives an estimate", an_older_kernel_gives_an_estimate},
    {"residency: a large file of two pages is added up", a_large_file_of_two_pages_is_added_up},
    {"residency: of foreign files and of pipes nothing is known", nobody_knows_of_foreign_files},
};

TEST_MAIN(cases)
