/* Shard cache: round trips, damage of every kind, disks that refuse, eviction, several processes. */
#include "node/shard_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "node/shard_eviction.h"
#include "tests/harness.h"
#include "tests/support/temp_folder.h"

enum { PIECE_SIZE = SHARD_CHUNK_SIZE * 2 + 1000, HEADER_SIZE = 128, DATA_AT = 4096 };

static const uint64_t budget_default = UINT64_C(1) << 30;

struct fixture {
    struct temp_folder temp;
    char folder[TEMP_PATH_MAX];
    struct shard_cache *cache;
    unsigned char identity[FL_IDENTITY_SIZE];
    struct fl_piece piece;
};

static unsigned char *buffer; /* [PIECE_SIZE], what the piece holds */
static unsigned char *chunk;  /* [SHARD_CHUNK_SIZE] */

static struct fl_piece make_piece(uint32_t layer)
{
    struct fl_piece piece = {.kind = FL_PIECE_FFN, .layer = layer, .tensor_count = 2};
    piece.tensors[0] = (struct fl_tensor_ref){
        .role = FL_ROLE_FFN_NORM, .rows = 1, .columns = 250, .offset = 64, .size = 1000};
    piece.tensors[1] = (struct fl_tensor_ref){.role = FL_ROLE_FFN_UP,
                                              .rows = 2048,
                                              .columns = 256,
                                              .offset = 4096,
                                              .size = SHARD_CHUNK_SIZE * 2};
    return piece;
}

static void open_cache(struct fixture *f, uint64_t budget)
{
    const struct shard_cache_config config = {.folder = f->folder, .budget = budget};
    CHECK_EQ(shard_cache_open(&config, &f->cache), FL_OK);
}

static void begin(struct fixture *f)
{
    *f = (struct fixture){.piece = make_piece(3)};
    temp_folder_make(&f->temp);
    temp_folder_path(&f->temp, "deep/shards", f->folder);
    for (size_t i = 0; i < FL_IDENTITY_SIZE; i++) {
        f->identity[i] = (unsigned char)(i * 17);
    }
    buffer = realloc(buffer, PIECE_SIZE);
    chunk = realloc(chunk, SHARD_CHUNK_SIZE);
    for (size_t i = 0; i < PIECE_SIZE; i++) {
        buffer[i] = (unsigned char)(i * 2654435761u >> 13);
    }
    open_cache(f, budget_default);
}

static void end(struct fixture *f)
{
    shard_cache_close(f->cache);
    temp_folder_remove(&f->temp);
}

static bool write_piece(struct fixture *f, const struct fl_piece *piece)
{
    struct shard_writer *writer = shard_writer_open(f->cache, f->identity, piece);
    if (writer == NULL) {
        return false;
    }
    for (size_t at = 0; at < PIECE_SIZE; at += SHARD_CHUNK_SIZE) {
        const size_t left = PIECE_SIZE - at;
        shard_writer_put(writer, buffer + at, left < SHARD_CHUNK_SIZE ? left : SHARD_CHUNK_SIZE);
    }
    shard_writer_close(writer);
    return shard_cache_commit(f->cache);
}

/* FL_OK when every chunk is what was written. */
static fl_status read_piece(struct fixture *f, const struct fl_piece *piece)
{
    struct shard_entry *entry;
    FL_TRY(shard_cache_find(f->cache, f->identity, piece, &entry));
    fl_status status = FL_OK;
    for (uint32_t i = 0; status == FL_OK && i < 3; i++) {
        const size_t size = i < 2 ? SHARD_CHUNK_SIZE : PIECE_SIZE - 2 * SHARD_CHUNK_SIZE;
        status = shard_entry_read(entry, i, chunk);
        if (status == FL_OK && memcmp(chunk, buffer + i * SHARD_CHUNK_SIZE, size) != 0) {
            status = FL_INTERNAL;
        }
    }
    shard_entry_close(entry);
    return status;
}

/* The one file in the model's folder whose name ends so; its path, or false. */
static bool find_file(const struct fixture *f, const char *suffix, char out[TEMP_PATH_MAX * 2])
{
    char folder[TEMP_PATH_MAX + 64];
    snprintf(folder, sizeof(folder), "%s/00112233445566778899aabbccddeeff", f->folder);
    DIR *dir = opendir(folder);
    bool found = false;
    for (const struct dirent *file; dir != NULL && (file = readdir(dir)) != NULL;) {
        const size_t size = strlen(file->d_name);
        if (size >= strlen(suffix) && strcmp(file->d_name + size - strlen(suffix), suffix) == 0) {
            snprintf(out, TEMP_PATH_MAX * 2, "%s/%s", folder, file->d_name);
            found = true;
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return found;
}

static void what_is_written_is_read_again(void)
{
    struct fixture f;
    begin(&f);
    const fl_status before = read_piece(&f, &f.piece);
    const bool wrote = write_piece(&f, &f.piece);
    const fl_status here = read_piece(&f, &f.piece);
    shard_cache_close(f.cache);
    open_cache(&f, budget_default);
    const fl_status later = read_piece(&f, &f.piece);
    const struct fl_piece other = make_piece(4);
    const fl_status foreign = read_piece(&f, &other);
    end(&f);
    CHECK_EQ(before, FL_NOT_FOUND);
    CHECK(wrote);
    CHECK_EQ(here, FL_OK);
    CHECK_EQ(later, FL_OK);
    CHECK_EQ(foreign, FL_NOT_FOUND);
}

static void an_entry_is_invisible_until_it_is_committed(void)
{
    struct fixture f;
    begin(&f);
    struct shard_writer *writer = shard_writer_open(f.cache, f.identity, &f.piece);
    CHECK(writer != NULL);
    shard_writer_put(writer, buffer, SHARD_CHUNK_SIZE);
    shard_writer_close(writer); /* given up after one chunk of three */
    char path[TEMP_PATH_MAX * 2];
    const bool committed = shard_cache_commit(f.cache);
    const bool entry = find_file(&f, ".piece", path);
    end(&f);
    CHECK(!committed);
    CHECK(!entry);
}

static void damage(const char *path, off_t at, off_t cut)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    unsigned char byte = 0;
    CHECK(fd >= 0);
    if (cut > 0) {
        CHECK_EQ(ftruncate(fd, cut), 0);
    } else {
        CHECK_EQ(pread(fd, &byte, 1, at), 1);
        byte ^= 0x10;
        CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
}

static void check_damage(off_t at, off_t cut, fl_status want)
{
    struct fixture f;
    char path[TEMP_PATH_MAX * 2];
    begin(&f);
    CHECK(write_piece(&f, &f.piece));
    CHECK(find_file(&f, ".piece", path));
    damage(path, at, cut);
    const fl_status first = read_piece(&f, &f.piece);
    const bool gone = access(path, F_OK) != 0;
    const bool again = write_piece(&f, &f.piece);
    const fl_status second = read_piece(&f, &f.piece);
    end(&f);
    CHECK_EQ(first, want);
    CHECK(gone);
    CHECK(again);
    CHECK_EQ(second, FL_OK);
}

static void a_damaged_entry_is_deleted_and_never_used(void)
{
    check_damage(0, 0, FL_NOT_FOUND);                                  /* magic */
    check_damage(9, 0, FL_NOT_FOUND);                                  /* version */
    check_damage(20, 0, FL_NOT_FOUND);                                 /* identity */
    check_damage(HEADER_SIZE - 3, 0, FL_NOT_FOUND);                    /* the header's checksum */
    check_damage(HEADER_SIZE + 8, 0, FL_NOT_FOUND);                    /* a chunk's checksum */
    check_damage(DATA_AT + 17, 0, FL_CORRUPT);                         /* first chunk */
    check_damage(DATA_AT + 2 * SHARD_CHUNK_SIZE + 999, 0, FL_CORRUPT); /* last byte */
}

static void a_truncated_entry_is_deleted_and_never_used(void)
{
    check_damage(0, 1, FL_NOT_FOUND);
    check_damage(0, HEADER_SIZE, FL_NOT_FOUND);
    check_damage(0, DATA_AT + PIECE_SIZE - 1, FL_NOT_FOUND);
}

static void a_foreign_file_under_an_entrys_name_is_deleted(void)
{
    struct fixture f;
    char path[TEMP_PATH_MAX * 2];
    begin(&f);
    CHECK(write_piece(&f, &f.piece));
    CHECK(find_file(&f, ".piece", path));
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    fputs("hello", file);
    fclose(file);
    const fl_status status = read_piece(&f, &f.piece);
    end(&f);
    CHECK_EQ(status, FL_NOT_FOUND);
}

/* In a child, because limits and users are a process's own; its exit code is 0 when all was well. */
static int in_child(int (*run)(struct fixture *f), struct fixture *f)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        _exit(run(f));
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int write_over_limit(struct fixture *f)
{
    const struct rlimit limit = {.rlim_cur = SHARD_CHUNK_SIZE, .rlim_max = SHARD_CHUNK_SIZE};
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) {
        return 2;
    }
    /* The first is given up in the middle, the second is not even begun. */
    return !write_piece(f, &f->piece) && shard_writer_open(f->cache, f->identity, &f->piece) == NULL
               ? 0
               : 3;
}

static void a_full_disk_costs_a_warning_and_leaves_nothing_behind(void)
{
    struct fixture f;
    char path[TEMP_PATH_MAX * 2];
    begin(&f);
    const int code = in_child(write_over_limit, &f);
    const bool entry = find_file(&f, ".piece", path);
    shard_eviction_remove_stale(f.folder, 3600);
    const fl_status status = read_piece(&f, &f.piece);
    end(&f);
    CHECK_EQ(code, 0);
    CHECK(!entry);
    CHECK_EQ(status, FL_NOT_FOUND);
}

/* The disk has room again: nothing is written for the model under way, all of the next one. */
static int write_with_room_again(struct fixture *f)
{
    struct rlimit limit = {.rlim_cur = SHARD_CHUNK_SIZE};
    const int code = getrlimit(RLIMIT_FSIZE, &limit) == 0 ? 0 : 2;
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = SHARD_CHUNK_SIZE;
    signal(SIGXFSZ, SIG_IGN);
    struct shard_use *use = shard_cache_use(f->cache, f->identity);
    if (code != 0 || setrlimit(RLIMIT_FSIZE, &limit) != 0 || write_piece(f, &f->piece)) {
        return 3;
    }
    limit.rlim_cur = before;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0 || write_piece(f, &f->piece)) {
        return 4;
    }
    shard_cache_unuse(use);
    use = shard_cache_use(f->cache, f->identity);
    if (!write_piece(f, &f->piece) || read_piece(f, &f->piece) != FL_OK) {
        return 5;
    }
    shard_cache_unuse(use);
    return 0;
}

static void a_disk_with_room_again_is_written_for_the_next_model(void)
{
    struct fixture f;
    begin(&f);
    const int code = in_child(write_with_room_again, &f);
    end(&f);
    CHECK_EQ(code, 0);
}

static int use_read_only(struct fixture *f)
{
    /* Root writes everywhere: become nobody. */
    if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) {
        return 2;
    }
    shard_cache_close(f->cache);
    const struct shard_cache_config config = {.folder = f->folder, .budget = budget_default};
    if (shard_cache_open(&config, &f->cache) != FL_OK) {
        return 3;
    }
    struct shard_use *use = shard_cache_use(f->cache, f->identity);
    const struct fl_piece other = make_piece(9);
    if (write_piece(f, &other)) {
        return 4;
    }
    const fl_status status = read_piece(f, &f->piece);
    shard_cache_unuse(use);
    return status == FL_OK ? 0 : 5;
}

static void a_read_only_folder_is_still_read_from(void)
{
    struct fixture f;
    char path[TEMP_PATH_MAX * 2];
    begin(&f);
    CHECK(write_piece(&f, &f.piece));
    CHECK(find_file(&f, ".piece", path));
    CHECK_EQ(chmod(f.temp.path, 0755), 0); /* mkdtemp() makes 0700 */
    char *slash = strrchr(path, '/');
    *slash = '\0';
    CHECK_EQ(chmod(path, 0555), 0);
    CHECK_EQ(chmod(f.folder, 0555), 0);
    const int code = in_child(use_read_only, &f);
    (void)chmod(path, 0755);
    (void)chmod(f.folder, 0755);
    end(&f);
    CHECK_EQ(code, 0);
}

static void a_folder_that_cannot_be_made_only_turns_the_cache_off(void)
{
    struct fixture f;
    begin(&f);
    temp_folder_put(&f.temp, "file", "x", 1);
    shard_cache_close(f.cache);
    temp_folder_path(&f.temp, "file/shards", f.folder);
    open_cache(&f, budget_default);
    const bool wrote = write_piece(&f, &f.piece);
    const fl_status status = read_piece(&f, &f.piece);
    /* A disk that is there later. */
    char path[TEMP_PATH_MAX];
    temp_folder_path(&f.temp, "file", path);
    CHECK_EQ(unlink(path), 0);
    shard_cache_unuse(shard_cache_use(f.cache, f.identity));
    const bool wrote_later = write_piece(&f, &f.piece);
    end(&f);
    CHECK(!wrote);
    CHECK_EQ(status, FL_NOT_FOUND);
    CHECK(wrote_later);
}

static void set_age(struct fixture *f, time_t age_s)
{
    char path[TEMP_PATH_MAX * 2];
    char folder[TEMP_PATH_MAX + 64];
    snprintf(folder, sizeof(folder), "%s/", f->folder);
    size_t used = strlen(folder);
    for (size_t i = 0; i < FL_IDENTITY_SIZE; i++) {
        used += (size_t)snprintf(folder + used, sizeof(folder) - used, "%02x", f->identity[i]);
    }
    const struct timespec times[2] = {{.tv_sec = time(NULL) - age_s},
                                      {.tv_sec = time(NULL) - age_s}};
    DIR *dir = opendir(folder);
    CHECK(dir != NULL);
    for (const struct dirent *file; (file = readdir(dir)) != NULL;) {
        snprintf(path, sizeof(path), "%s/%s", folder, file->d_name);
        if (strstr(file->d_name, ".piece") != NULL) {
            CHECK_EQ(utimensat(AT_FDCWD, path, times, 0), 0);
        }
    }
    closedir(dir);
}

static void the_longest_unused_model_is_evicted_and_one_in_use_is_not(void)
{
    struct fixture f;
    begin(&f);
    shard_cache_close(f.cache);
    open_cache(&f, 3 * (PIECE_SIZE + 2 * DATA_AT)); /* room for three pieces */
    for (unsigned char model = 1; model <= 3; model++) {
        f.identity[0] = model;
        CHECK(write_piece(&f, &f.piece));
        set_age(&f, 1000 - 100 * model); /* 1 is the oldest, but in use */
    }
    f.identity[0] = 1;
    struct shard_use *use = shard_cache_use(f.cache, f.identity);
    set_age(&f, 5000);
    f.identity[0] = 4;
    const bool fourth = write_piece(&f, &f.piece);
    fl_status status[5];
    for (unsigned char model = 1; model <= 4; model++) {
        f.identity[0] = model;
        status[model] = read_piece(&f, &f.piece);
    }
    shard_cache_unuse(use);
    end(&f);
    CHECK(fourth);
    CHECK_EQ(status[1], FL_OK);
    CHECK_EQ(status[2], FL_NOT_FOUND);
    CHECK_EQ(status[3], FL_OK);
    CHECK_EQ(status[4], FL_OK);
}

static void a_budget_that_models_in_use_fill_stops_the_caching(void)
{
    struct fixture f;
    begin(&f);
    shard_cache_close(f.cache);
    open_cache(&f, PIECE_SIZE + 2 * DATA_AT);
    struct shard_use *use = shard_cache_use(f.cache, f.identity);
    CHECK(write_piece(&f, &f.piece));
    const struct fl_piece other = make_piece(4);
    const bool wrote = write_piece(&f, &other);
    const fl_status status = read_piece(&f, &f.piece);
    shard_cache_unuse(use);
    end(&f);
    CHECK(!wrote);
    CHECK_EQ(status, FL_OK);
}

static int die_while_writing(struct fixture *f)
{
    struct shard_writer *writer = shard_writer_open(f->cache, f->identity, &f->piece);
    if (writer == NULL) {
        return 2;
    }
    shard_writer_put(writer, buffer, SHARD_CHUNK_SIZE);
    return 0; /* no close */
}

static bool find_part(const struct fixture *f)
{
    char folder[TEMP_PATH_MAX + 64];
    snprintf(folder, sizeof(folder), "%s/00112233445566778899aabbccddeeff", f->folder);
    DIR *dir = opendir(folder);
    bool found = false;
    for (const struct dirent *file; dir != NULL && (file = readdir(dir)) != NULL;) {
        found = found || strncmp(file->d_name, ".part-", 6) == 0;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return found;
}

static void parts_of_the_dead_are_removed_and_those_of_the_living_are_not(void)
{
    struct fixture f;
    begin(&f);
    CHECK_EQ(in_child(die_while_writing, &f), 0);
    const bool left = find_part(&f);
    struct shard_cache *second;
    const struct shard_cache_config config = {.folder = f.folder, .budget = budget_default};
    CHECK_EQ(shard_cache_open(&config, &second), FL_OK);
    const bool after = find_part(&f);
    struct shard_writer *writer = shard_writer_open(f.cache, f.identity, &f.piece);
    shard_cache_close(second);
    CHECK_EQ(shard_cache_open(&config, &second), FL_OK);
    const bool living = find_part(&f);
    shard_writer_close(writer);
    shard_cache_close(second);
    end(&f);
    CHECK(left);
    CHECK(!after);
    CHECK(living);
}

static int write_many(struct fixture *f)
{
    for (int round = 0; round < 5; round++) {
        for (uint32_t layer = 0; layer < 4; layer++) {
            const struct fl_piece piece = make_piece(layer);
            if (read_piece(f, &piece) == FL_INTERNAL || !write_piece(f, &piece) ||
                read_piece(f, &piece) != FL_OK) {
                return 2;
            }
        }
    }
    return 0;
}

static void two_processes_share_a_folder(void)
{
    struct fixture f;
    begin(&f);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        _exit(write_many(&f));
    }
    const int mine = write_many(&f);
    int status = -1;
    const bool waited = waitpid(child, &status, 0) == child;
    end(&f);
    CHECK_EQ(mine, 0);
    CHECK(waited && WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

static const struct test_case cases[] = {
    {"shard cache: what is written is read again, by this process and the next",
     what_is_written_is_read_again},
    {"shard cache: an entry is invisible until it is whole",
     an_entry_is_invisible_until_it_is_committed},
    {"shard cache: a damaged entry is deleted and never used",
     a_damaged_entry_is_deleted_and_never_used},
    {"shard cache: a truncated entry is deleted and never used",
     a_truncated_entry_is_deleted_and_never_used},
    {"shard cache: a foreign file under an entry's name is deleted",
     a_foreign_file_under_an_entrys_name_is_deleted},
    {"shard cache: a full disk costs a warning and leaves nothing behind",
     a_full_disk_costs_a_warning_and_leaves_nothing_behind},
    {"shard cache: a disk with room again is written for the next model",
     a_disk_with_room_again_is_written_for_the_next_model},
    {"shard cache: a read-only folder is still read from", a_read_only_folder_is_still_read_from},
    {"shard cache: a folder that cannot be made only turns the cache off",
     a_folder_that_cannot_be_made_only_turns_the_cache_off},
    {"shard cache: the longest unused model is evicted, one in use is not",
     the_longest_unused_model_is_evicted_and_one_in_use_is_not},
    {"shard cache: a budget that models in use fill stops the caching",
     a_budget_that_models_in_use_fill_stops_the_caching},
    {"shard cache: parts of the dead are removed, those of the living are not",
     parts_of_the_dead_are_removed_and_those_of_the_living_are_not},
    {"shard cache: two processes share a folder", two_processes_share_a_folder},
};

int main(int argc, char **argv)
{
    const int code = test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
    free(buffer);
    free(chunk);
    return code;
}
