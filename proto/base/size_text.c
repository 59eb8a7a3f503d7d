#include "proto/base/size_text.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { FRACTION_DIGITS = 6 };

static const uint64_t size_max = UINT64_C(1) << 62;

static const struct {
    const char *name;
    uint64_t bytes;
} units[] = {
    {"", 1},
    {"B", 1},
    {"K", UINT64_C(1) << 10},
    {"M", UINT64_C(1) << 20},
    {"G", UINT64_C(1) << 30},
    {"T", UINT64_C(1) << 40},
    {"KiB", UINT64_C(1) << 10},
    {"MiB", UINT64_C(1) << 20},
    {"GiB", UINT64_C(1) << 30},
    {"TiB", UINT64_C(1) << 40},
    {"kB", 1000},
    {"KB", 1000},
    {"MB", UINT64_C(1000000)},
    {"GB", UINT64_C(1000000000)},
    {"TB", UINT64_C(1000000000000)},
};

static bool find_unit(const char *text, uint64_t *out)
{
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(text, units[i].name) == 0) {
            *out = units[i].bytes;
            return true;
        }
    }
    return false;
}

bool fl_size_text_value(const char *text, uint64_t *out)
{
    const char *at = text;
    uint64_t whole = 0;
    uint64_t fraction = 0; /* in millionths */
    uint64_t weight = 100000;
    uint64_t unit = 0;
    bool good = *at >= '0' && *at <= '9';
    for (; *at >= '0' && *at <= '9'; at++) {
        good = good && whole <= size_max / 10;
        whole = good ? whole * 10 + (uint64_t)(*at - '0') : 0;
    }
    if (*at == '.') {
        at++;
        good = good && *at >= '0' && *at <= '9';
        for (int digit = 0; *at >= '0' && *at <= '9'; at++, digit++) {
            fraction += digit < FRACTION_DIGITS ? (uint64_t)(*at - '0') * weight : 0;
            weight /= 10;
        }
    }
    while (*at == ' ') {
        at++;
    }
    if (!good || !find_unit(at, &unit) || whole > (size_max - unit) / unit) {
        return false;
    }
    /* unit is at most 2^40 and the fraction under 2^20: no overflow. */
    *out = whole * unit + fraction * unit / 1000000;
    return true;
}

fl_status fl_size_text_parse(const char *text, uint64_t *out)
{
    if (!fl_size_text_value(text, out)) {
        return FL_FAIL(FL_INVALID, "\"%.40s\" is not a size; write 512MiB, 2GiB or plain bytes",
                       text);
    }
    return FL_OK;
}

void fl_size_text_format(uint64_t size, char *out)
{
    static const char *const names[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (size < 1024) {
        snprintf(out, FL_SIZE_TEXT_MAX, "%" PRIu64 " B", size);
        return;
    }
    double scaled = (double)size / 1024;
    size_t name = 0;
    while (scaled >= 1024 && name + 1 < sizeof(names) / sizeof(names[0])) {
        scaled /= 1024;
        name++;
    }
    snprintf(out, FL_SIZE_TEXT_MAX, "%.1f %s", scaled, names[name]);
}
