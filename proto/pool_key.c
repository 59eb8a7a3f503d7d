#include "proto/pool_key.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sodium.h>

_Static_assert(crypto_auth_KEYBYTES == FL_POOL_KEY_SIZE, "a pool key is a crypto_auth key");
_Static_assert(crypto_auth_BYTES == FL_PROOF_SIZE, "a proof is a crypto_auth tag");

static const char key_prefix[] = "firstlight-key-1 ";

enum {
    KEY_PREFIX = sizeof(key_prefix) - 1,
    KEY_DIGITS = 2 * FL_POOL_KEY_SIZE,
    KEY_LINE = KEY_PREFIX + KEY_DIGITS,
};
_Static_assert(KEY_LINE + 2 <= FL_KEY_TEXT_SIZE, "a key line fits its text");

/* Safe to repeat and from any thread; fails only on a machine without a source of randomness. */
static void sodium_ready(void)
{
    FL_ASSERT(sodium_init() >= 0);
}

void fl_pool_key_make(struct fl_pool_key *out)
{
    fl_random_bytes(out->bytes, sizeof(out->bytes));
}

void fl_pool_key_text(const struct fl_pool_key *key, char out[FL_KEY_TEXT_SIZE])
{
    char digits[KEY_DIGITS + 1];
    sodium_bin2hex(digits, sizeof(digits), key->bytes, sizeof(key->bytes));
    snprintf(out, FL_KEY_TEXT_SIZE, "%s%s\n", key_prefix, digits);
    sodium_memzero(digits, sizeof(digits));
}

/* One line, with or without its end; nothing after it. */
static bool parse_line(const char *text, size_t size, struct fl_pool_key *out)
{
    while (size > 0 && (text[size - 1] == '\n' || text[size - 1] == '\r')) {
        size--;
    }
    size_t key_size = 0;
    const char *end = NULL;
    return size == KEY_LINE && memcmp(text, key_prefix, KEY_PREFIX) == 0 &&
           sodium_hex2bin(out->bytes, sizeof(out->bytes), text + KEY_PREFIX, KEY_DIGITS, NULL,
                          &key_size, &end) == 0 &&
           key_size == FL_POOL_KEY_SIZE && end == text + KEY_LINE;
}

static fl_status check_file(const char *path, int fd)
{
    struct stat status;
    if (fstat(fd, &status) != 0) {
        return FL_FAIL(FL_IO, "key file %s: %s", path, strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        return FL_FAIL(FL_MALFORMED, "key file %s is not a regular file", path);
    }
    if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
        return FL_FAIL(FL_DENIED, "key file %s may be read by others (mode %03o): chmod 600 %s",
                       path, (unsigned)(status.st_mode & 0777), path);
    }
    return FL_OK;
}

/* Up to `size` bytes from the front of a file. */
static ssize_t read_front(int fd, char *out, size_t size)
{
    size_t used = 0;
    while (used < size) {
        const ssize_t got = read(fd, out + used, size - used);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return -1;
        }
        if (got == 0) {
            break;
        }
        used += (size_t)got;
    }
    return (ssize_t)used;
}

fl_status fl_pool_key_read(const char *path, struct fl_pool_key *out)
{
    /* Not blocking: a fifo in place of a file must not hang the start. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return errno == ENOENT
                   ? FL_FAIL(FL_NOT_FOUND, "key file %s does not exist: make one with keygen", path)
                   : FL_FAIL(FL_IO, "key file %s: %s", path, strerror(errno));
    }
    char text[FL_KEY_TEXT_SIZE + 1];
    struct fl_pool_key key;
    fl_status status = check_file(path, fd);
    if (status == FL_OK) {
        const ssize_t size = read_front(fd, text, sizeof(text));
        if (size < 0) {
            status = FL_FAIL(FL_IO, "key file %s: %s", path, strerror(errno));
        } else if (!parse_line(text, (size_t)size, &key)) {
            status = FL_FAIL(FL_MALFORMED,
                             "key file %s is not one line of \"%s\" and %d hexadecimal digits",
                             path, key_prefix, KEY_DIGITS);
        }
    }
    if (status == FL_OK) {
        *out = key;
    }
    sodium_memzero(text, sizeof(text));
    sodium_memzero(&key, sizeof(key));
    close(fd);
    return status;
}

static bool write_all(int fd, const char *text, size_t size)
{
    size_t used = 0;
    while (used < size) {
        const ssize_t done = write(fd, text + used, size - used);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return false;
        }
        used += (size_t)done;
    }
    return fsync(fd) == 0;
}

fl_status fl_pool_key_write(const char *path, const struct fl_pool_key *key)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        return errno == EEXIST
                   ? FL_FAIL(FL_INVALID, "key file %s exists: remove it first to make a new key",
                             path)
                   : FL_FAIL(FL_IO, "key file %s: %s", path, strerror(errno));
    }
    char text[FL_KEY_TEXT_SIZE];
    fl_pool_key_text(key, text);
    const bool written = write_all(fd, text, strlen(text));
    const int error = errno;
    sodium_memzero(text, sizeof(text));
    close(fd);
    if (!written) {
        unlink(path);
        return FL_FAIL(FL_IO, "key file %s: %s", path, strerror(error));
    }
    return FL_OK;
}

void fl_pool_key_prove(const struct fl_pool_key *key, const void *message, size_t size,
                       unsigned char out[FL_PROOF_SIZE])
{
    sodium_ready();
    crypto_auth(out, message, size, key->bytes);
}

int fl_pool_key_check(const struct fl_pool_key *key, const void *message, size_t size,
                      const unsigned char proof[FL_PROOF_SIZE])
{
    sodium_ready();
    return crypto_auth_verify(proof, message, size, key->bytes) == 0;
}

void fl_random_bytes(void *out, size_t size)
{
    sodium_ready();
    randombytes_buf(out, size);
}
