/* What is in the page cache, of files that were just written and of some that were dropped. */
#include "node/residency.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/harness.h"
#include "tests/support/temp_folder.h"

enum { SIZE = 1 << 20, PAGE = 4096, ODD = 1000 };

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

/* Out of the page cache; false where the file system keeps its files nowhere else. */
static bool drop(int fd)
{
    uint64_t bytes = 0;
    CHECK_EQ(fsync(fd), 0);
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    return residency_measure(fd, 0, SIZE, &bytes) && bytes < SIZE;
}

static void what_was_just_written_is_there(void)
{
    const int fd = make_file(SIZE + ODD);
    uint64_t bytes = 0;
    CHECK(residency_measure(fd, 0, SIZE + ODD, &bytes));
    CHECK_EQ(bytes, SIZE + ODD);
    CHECK(residency_measure(fd, ODD, PAGE, &bytes)); /* parts of two pages */
    CHECK_EQ(bytes, PAGE);
    CHECK(residency_measure(fd, ODD, 1, &bytes));
    CHECK_EQ(bytes, 1);
    CHECK(residency_measure(fd, SIZE, ODD, &bytes));
    CHECK_EQ(bytes, ODD);
    CHECK(residency_measure(fd, 0, 0, &bytes));
    CHECK_EQ(bytes, 0);
    end(fd);
}

static void what_was_dropped_is_not_and_asking_brings_nothing_in(void)
{
    const int fd = make_file(SIZE);
    if (!drop(fd)) {
        end(fd);
        TEST_SKIP("files here are in memory only");
    }
    uint64_t bytes = 1;
    for (int i = 0; i < 2; i++) {
        CHECK(residency_measure(fd, 0, SIZE, &bytes));
        CHECK_EQ(bytes, 0);
    }
    /* One page, and nothing around it. */
    char byte;
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM), 0);
    CHECK_EQ(pread(fd, &byte, 1, SIZE / 2), 1);
    CHECK(residency_measure(fd, 0, SIZE, &bytes));
    CHECK_EQ(bytes, PAGE);
    CHECK(residency_measure(fd, SIZE / 2 + 100, PAGE, &bytes));
    CHECK_EQ(bytes, PAGE - 100);
    end(fd);
}

static void an_older_kernel_gives_an_estimate(void)
{
    uint64_t bytes = 0;
    int fd = make_file(SIZE);
    CHECK(residency_estimate(fd, ODD, SIZE - ODD, &bytes)); /* small ranges are exact */
    CHECK_EQ(bytes, SIZE - ODD);
    end(fd);
    fd = make_file(8 * SIZE + ODD);
    CHECK(residency_estimate(fd, 0, 8 * SIZE + ODD, &bytes));
    CHECK_EQ(bytes, 8 * SIZE + ODD);
    CHECK(residency_estimate(fd, ODD, 8 * SIZE, &bytes));
    CHECK_EQ(bytes, 8 * SIZE);
    CHECK(residency_estimate(fd, 0, 0, &bytes));
    CHECK_EQ(bytes, 0);
    if (!drop(fd)) {
        end(fd);
        TEST_SKIP("files here are in memory only");
    }
    CHECK(residency_estimate(fd, 0, 8 * SIZE + ODD, &bytes));
    CHECK_EQ(bytes, 0);
    /* Half of it is read: the estimate is about that. */
    static char half[4 * SIZE];
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM), 0);
    CHECK_EQ(pread(fd, half, sizeof(half), 0), sizeof(half));
    CHECK(residency_estimate(fd, 0, 8 * SIZE + ODD, &bytes));
    CHECK(bytes > 3 * SIZE && bytes < 5 * SIZE);
    end(fd);
}

static void a_large_file_of_two_pages_is_added_up(void)
{
    enum { FAR = 200 << 20 };
    const int fd = make_file(PAGE);
    uint64_t bytes = 0;
    CHECK_EQ(ftruncate(fd, FAR + PAGE), 0); /* a hole, but for its ends */
    CHECK_EQ(pwrite(fd, "end", 3, FAR), 3);
    CHECK(residency_measure(fd, 0, FAR + PAGE, &bytes));
    CHECK_EQ(bytes, 2 * PAGE);
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
