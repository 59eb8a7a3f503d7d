/* model_folder.h - model files in a folder of this machine.
 *
 * A model is NAME.gguf, or NAME-00001-of-0000N.gguf and its fellows.  It is
 * used when its files have the plan's sizes and identity; a file that shrinks or
 * changes while it is read fails the load with its name.
 *
 * Thread:  as model_storage.h says.
 * Memory:  `path` is borrowed for as long as the storage is used.
 */
#ifndef NODE_MODEL_FOLDER_H
#define NODE_MODEL_FOLDER_H

#include "node/model_storage.h"

struct model_folder {
    const char *path;
};

struct model_storage model_folder_storage(struct model_folder *folder);

#endif
