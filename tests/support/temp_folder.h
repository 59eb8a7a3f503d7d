/* temp_folder.h - a folder of its own for a test that writes files.
 *
 * Made below $TMPDIR or /tmp; remove() takes all that is in it along.
 */
#ifndef TESTS_SUPPORT_TEMP_FOLDER_H
#define TESTS_SUPPORT_TEMP_FOLDER_H

#include <stddef.h>

enum { TEMP_PATH_MAX = 512 };

struct temp_folder {
    char path[TEMP_PATH_MAX];
};

void temp_folder_make(struct temp_folder *folder);
void temp_folder_remove(struct temp_folder *folder);

/* FOLDER/NAME. */
void temp_folder_path(const struct temp_folder *folder, const char *name, char out[TEMP_PATH_MAX]);

/* Write a file of these bytes. */
void temp_folder_put(const struct temp_folder *folder, const char *name, const void *bytes,
                     size_t size);

/* A real model that the scripts fetch: its path, or 0 when it is not here. */
int real_model_path(const char *name, char out[TEMP_PATH_MAX]);

#endif
