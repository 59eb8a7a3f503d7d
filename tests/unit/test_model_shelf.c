/* The names under which files of a folder are models. */
#include "coordinator/model_shelf.h"

#include <stdio.h>
#include <unistd.h>

#include "tests/harness.h"
#include "tests/support/temp_folder.h"

static struct temp_folder folder;
static struct model_shelf *shelf;

static void begin(void)
{
    temp_folder_make(&folder);
    CHECK_EQ(model_shelf_open(folder.path, &shelf), FL_OK);
}

static void end(void)
{
    model_shelf_close(shelf);
    temp_folder_remove(&folder);
}

/* The folder holds `size` bytes of that name. */
static void put(const char *name, size_t size)
{
    static const char bytes[64];
    temp_folder_put(&folder, name, bytes, size);
}

static bool is_there(const char *name)
{
    const struct model_file *file;
    return model_shelf_find(shelf, name, &file) == FL_OK;
}

static struct model_file found(const char *name)
{
    const struct model_file *file = NULL;
    CHECK_EQ(model_shelf_find(shelf, name, &file), FL_OK);
    return *file;
}

static void test_a_file_has_its_name_without_suffix(void)
{
    begin();
    put("small.gguf", 10);
    put("big one.Q4_0.gguf", 20);
    put("notes.txt", 5);
    put(".gguf", 5);
    put("small.gguf.part", 5);
    CHECK_EQ(model_shelf_scan(shelf), FL_OK);
    CHECK_EQ(model_shelf_count(shelf), 2);
    CHECK(strcmp(model_shelf_at(shelf, 0)->name, "big one.Q4_0") == 0);
    CHECK(strcmp(model_shelf_at(shelf, 1)->name, "small") == 0);
    CHECK_EQ(model_shelf_at(shelf, 1)->size, 10);
    end();
}

static void test_a_split_model_is_one_with_the_size_of_its_parts(void)
{
    begin();
    put("big-00001-of-00003.gguf", 10);
    put("big-00002-of-00003.gguf", 20);
    put("big-00003-of-00003.gguf", 30);
    CHECK_EQ(model_shelf_scan(shelf), FL_OK);
    CHECK_EQ(model_shelf_count(shelf), 1);
    const struct model_file big = found("big");
    CHECK_EQ(big.size, 60);
    CHECK(strstr(big.path, "big-00001-of-00003.gguf") != NULL);
    CHECK(!is_there("big-00002-of-00003"));
    end();
}

static void test_what_only_resembles_a_part_is_a_model_of_its_own(void)
{
    static const char *const names[] = {"a-00002-of-three",  "b-00002_of_00003", "c-+0002-of-00003",
                                        "d-    2-of-    3",  "e-0002-of-00003",  "f-00002-of-0003x",
                                        "-00002-of-00003.x", "00002-of-00003"};
    enum { COUNT = sizeof(names) / sizeof(names[0]) };
    begin();
    for (size_t i = 0; i < COUNT; i++) {
        char file[64];
        snprintf(file, sizeof(file), "%s.gguf", names[i]);
        put(file, i);
    }
    CHECK_EQ(model_shelf_scan(shelf), FL_OK);
    CHECK_EQ(model_shelf_count(shelf), COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_EQ(found(names[i]).size, i);
    }
    end();
}

static void test_a_name_that_is_not_there_is_refused_with_those_that_are(void)
{
    const struct model_file *file = NULL;
    begin();
    put("small.gguf", 10);
    CHECK_EQ(model_shelf_find(shelf, "smal", &file), FL_NOT_FOUND);
    CHECK(strstr(fl_last_error(), "'smal'") != NULL);
    CHECK(strstr(fl_last_error(), "there is: small") != NULL);
    CHECK(file == NULL);
    end();
}

static void test_a_folder_may_come_and_go(void)
{
    begin();
    CHECK_EQ(model_shelf_scan(shelf), FL_OK);
    CHECK_EQ(model_shelf_count(shelf), 0);
    put("small.gguf", 10);
    CHECK(is_there("small"));
    temp_folder_remove(&folder);
    CHECK_EQ(model_shelf_scan(shelf), FL_NOT_FOUND);
    CHECK(strstr(fl_last_error(), folder.path) != NULL);
    model_shelf_close(shelf);
}

static const struct test_case cases[] = {
    {"model_shelf: a file has its name without suffix", test_a_file_has_its_name_without_suffix},
    {"model_shelf: a split model is one with the size of its parts",
     test_a_split_model_is_one_with_the_size_of_its_parts},
    {"model_shelf: what only resembles a part is a model of its own",
     test_what_only_resembles_a_part_is_a_model_of_its_own},
    {"model_shelf: a name that is not there is refused with those that are",
     test_a_name_that_is_not_there_is_refused_with_those_that_are},
    {"model_shelf: a folder may come and go", test_a_folder_may_come_and_go},
};

TEST_MAIN(cases)
