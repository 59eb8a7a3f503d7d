#include "proto/client/progress_bar.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/client/plain_text.h"

enum { BAR_WIDTH = 24, REDRAW_MS = 50, COLUMNS_DEFAULT = 80, LINE_SIZE = 512, CAUSE_SIZE = 160 };

static uint64_t now_ns(void)
{
    const struct fl_clock clock = fl_clock_monotonic();
    return fl_clock_now(&clock);
}

const char *size_text(uint64_t bytes, char *out)
{
    fl_size_text_format(bytes, out);
    return out;
}

void progress_bar_init(struct progress_bar *bar, bool wanted)
{
    *bar = (struct progress_bar){.enabled = wanted && isatty(STDERR_FILENO)};
}

/* A line longer than the terminal would wrap, and could not be taken away again. */
static void put_line(const char *text)
{
    struct winsize window;
    int columns = COLUMNS_DEFAULT;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 1) {
        columns = window.ws_col;
    }
    /* Bytes, not characters: a cut line is at worst a little short. */
    fprintf(stderr, "\r\033[K%.*s", columns - 1, text);
    fflush(stderr);
}

void progress_bar_draw(struct progress_bar *bar, const char *phase, const char *cause,
                       uint64_t bytes_done, uint64_t bytes_total)
{
    if (!bar->enabled) {
        return;
    }
    const uint64_t now = now_ns();
    if (bar->begun_ns == 0) {
        bar->begun_ns = now;
        bar->bytes_at_begin = bytes_done;
    } else if (now - bar->drawn_ns < REDRAW_MS * FL_NS_PER_MS && bytes_done < bytes_total) {
        return;
    }
    bar->drawn_ns = now;
    bar->drawn = true;

    char line[LINE_SIZE];
    char plain[CAUSE_SIZE];
    if (cause[0] != '\0') {
        snprintf(line, sizeof(line), "waiting: %s", plain_text(cause, plain, sizeof(plain)));
        put_line(line);
        return;
    }
    plain_text(strcmp(phase, "load") == 0 ? "loading" : phase, plain, sizeof(plain));
    if (bytes_total == 0) {
        put_line(plain);
        return;
    }
    const double share = (double)bytes_done / (double)bytes_total;
    const int full = (int)(share * BAR_WIDTH);
    const double seconds = (double)(now - bar->begun_ns) / 1e9;
    char done[SIZE_TEXT_MAX];
    char total[SIZE_TEXT_MAX];
    char rate[SIZE_TEXT_MAX + 8] = "";
    if (seconds > 0.2 && bytes_done >= bar->bytes_at_begin) {
        char text[SIZE_TEXT_MAX];
        const double speed = (double)(bytes_done - bar->bytes_at_begin) / seconds;
        snprintf(rate, sizeof(rate), "  %s/s", size_text((uint64_t)speed, text));
    }
    snprintf(line, sizeof(line), "%s [%.*s%.*s] %3.0f %%  %s of %s%s", plain, full,
             "########################", BAR_WIDTH - full, "........................", 100 * share,
             size_text(bytes_done, done), size_text(bytes_total, total), rate);
    put_line(line);
}

void progress_bar_clear(struct progress_bar *bar)
{
    if (bar->drawn) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        bar->drawn = false;
    }
}
