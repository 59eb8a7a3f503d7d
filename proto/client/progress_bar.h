/* progress_bar.h - how far a load is, on one line of a terminal.
 *
 * Draws nothing when stderr is no terminal.
 *
 * Thread:  owner.
 */
#ifndef PROTO_CLIENT_PROGRESS_BAR_H
#define PROTO_CLIENT_PROGRESS_BAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/size_text.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SIZE_TEXT_MAX = FL_SIZE_TEXT_MAX };

struct progress_bar {
    bool enabled;
    bool drawn;
    uint64_t begun_ns;
    uint64_t drawn_ns;
    uint64_t bytes_at_begin;
};

void progress_bar_init(struct progress_bar *bar, bool wanted);

/* `cause`: why the request waits, "" when it does not. */
void progress_bar_draw(struct progress_bar *bar, const char *phase, const char *cause,
                       uint64_t bytes_done, uint64_t bytes_total);

/* Take the line away, so that other text can stand there. */
void progress_bar_clear(struct progress_bar *bar);

/* fl_size_text_format(), as an argument of printf(). */
const char *size_text(uint64_t bytes, char *out);

#ifdef __cplusplus
}
#endif
#endif
