/* Key files: written, read back, and refused when they are wrong or readable by others. */
#include "proto/pool_key.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/log.h"
#include "tests/harness.h"

static char path[] = "/tmp/firstlight-key-test-XXXXXX";
static char file[64];

static void put_file(const char *text, size_t size, mode_t mode)
{
    unlink(file);
    FILE *out = fopen(file, "wb");
    CHECK(out != NULL);
    CHECK_EQ(fwrite(text, 1, size, out), size);
    CHECK_EQ(fclose(out), 0);
    CHECK_EQ(chmod(file, mode), 0);
}

static fl_status read_text(const char *text)
{
    struct fl_pool_key key;
    put_file(text, strlen(text), 0600);
    return fl_pool_key_read(file, &key);
}

static void test_round_trip(void)
{
    struct fl_pool_key key, again;
    struct stat status;
    unlink(file);
    fl_pool_key_make(&key);
    CHECK_EQ(fl_pool_key_write(file, &key), FL_OK);
    CHECK_EQ(stat(file, &status), 0);
    CHECK_EQ(status.st_mode & 0777, 0600);
    CHECK_EQ(fl_pool_key_read(file, &again), FL_OK);
    CHECK_EQ(memcmp(&key, &again, sizeof(key)), 0);
    CHECK_EQ(fl_pool_key_write(file, &key), FL_INVALID); /* never overwritten */
    CHECK(strstr(fl_last_error(), "exists") != NULL);
}

static void test_text(void)
{
    struct fl_pool_key key;
    char text[FL_KEY_TEXT_SIZE];
    memset(&key, 0xa5, sizeof(key));
    fl_pool_key_text(&key, text);
    CHECK_EQ(strlen(text), 17 + 64 + 1);
    CHECK_EQ(strncmp(text, "firstlight-key-1 a5a5", 21), 0);
    CHECK_EQ(text[81], '\n');
    CHECK_EQ(read_text(text), FL_OK);
    text[81] = '\0'; /* an editor may have eaten the end of the line */
    CHECK_EQ(read_text(text), FL_OK);
}

static void test_malformed(void)
{
    char text[FL_KEY_TEXT_SIZE];
    struct fl_pool_key key;
    fl_pool_key_make(&key);
    CHECK_EQ(read_text(""), FL_MALFORMED);
    CHECK_EQ(read_text("firstlight-key-1 \n"), FL_MALFORMED);
    CHECK_EQ(read_text("hello\n"), FL_MALFORMED);
    fl_pool_key_text(&key, text);
    text[20] = 'g';
    CHECK_EQ(read_text(text), FL_MALFORMED);
    fl_pool_key_text(&key, text);
    text[15] = '2';
    CHECK_EQ(read_text(text), FL_MALFORMED);
    fl_pool_key_text(&key, text);
    text[80] = '\0';
    CHECK_EQ(read_text(text), FL_MALFORMED);
    char twice[2 * FL_KEY_TEXT_SIZE];
    fl_pool_key_text(&key, text);
    snprintf(twice, sizeof(twice), "%s%s", text, text);
    CHECK_EQ(read_text(twice), FL_MALFORMED);
    static char large[100000];
    memset(large, '0', sizeof(large) - 1);
    CHECK_EQ(read_text(large), FL_MALFORMED);
}

static void test_permissions(void)
{
    char text[FL_KEY_TEXT_SIZE];
    struct fl_pool_key key;
    fl_pool_key_make(&key);
    fl_pool_key_text(&key, text);
    static const mode_t open_modes[] = {0640, 0604, 0660, 0644, 0610};
    for (size_t i = 0; i < sizeof(open_modes) / sizeof(open_modes[0]); i++) {
        put_file(text, strlen(text), open_modes[i]);
        CHECK_EQ(fl_pool_key_read(file, &key), FL_DENIED);
        CHECK(strstr(fl_last_error(), "chmod 600") != NULL);
    }
    put_file(text, strlen(text), 0400);
    CHECK_EQ(fl_pool_key_read(file, &key), FL_OK);
}

static void test_no_file(void)
{
    struct fl_pool_key key;
    unlink(file);
    CHECK_EQ(fl_pool_key_read(file, &key), FL_NOT_FOUND);
    CHECK(fl_pool_key_read(path, &key) == FL_MALFORMED); /* a folder */
    CHECK_EQ(mkfifo(file, 0600), 0);
    CHECK_EQ(fl_pool_key_read(file, &key), FL_MALFORMED); /* and does not hang */
    unlink(file);
    fl_pool_key_make(&key);
    CHECK_EQ(fl_pool_key_write("/nonexistent/key", &key), FL_IO);
}

static void test_proof(void)
{
    struct fl_pool_key a, b;
    unsigned char proof[FL_PROOF_SIZE];
    fl_pool_key_make(&a);
    fl_pool_key_make(&b);
    CHECK(memcmp(&a, &b, sizeof(a)) != 0);
    fl_pool_key_prove(&a, "message", 7, proof);
    CHECK(fl_pool_key_check(&a, "message", 7, proof));
    CHECK(!fl_pool_key_check(&a, "massage", 7, proof));
    CHECK(!fl_pool_key_check(&a, "message", 6, proof));
    CHECK(!fl_pool_key_check(&b, "message", 7, proof));
    proof[0] ^= 1;
    CHECK(!fl_pool_key_check(&a, "message", 7, proof));
}

static const struct test_case cases[] = {
    {"pool_key: a key is read as it was written, and not overwritten", test_round_trip},
    {"pool_key: the text has its prefix and 64 digits", test_text},
    {"pool_key: anything but one right line is refused", test_malformed},
    {"pool_key: a file that others may read is refused", test_permissions},
    {"pool_key: missing files, folders and fifos are told apart", test_no_file},
    {"pool_key: a proof holds for its key and message only", test_proof},
};

int main(int argc, char **argv)
{
    fl_log_init("", (enum fl_log_level) - 1);
    if (mkdtemp(path) == NULL) {
        return 1;
    }
    snprintf(file, sizeof(file), "%s/key", path);
    const int result = test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
    unlink(file);
    rmdir(path);
    return result;
}
