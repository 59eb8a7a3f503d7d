#include "proto/base/log_throttle.h"

#include <inttypes.h>

#include "proto/base/clock.h"

#define QUIET_NS (10 * FL_NS_PER_S)

bool fl_log_throttle_pass(struct fl_log_throttle *throttle, uint64_t now_ns)
{
    if (throttle->hidden > 0 || now_ns < throttle->quiet_until_ns) {
        throttle->hidden += throttle->hidden < UINT32_MAX;
        return false;
    }
    throttle->quiet_until_ns = now_ns + QUIET_NS;
    return true;
}

uint64_t fl_log_throttle_poll(struct fl_log_throttle *throttle, uint64_t now_ns,
                              enum fl_log_level level, const char *what)
{
    if (throttle->hidden == 0) {
        return UINT64_MAX;
    }
    if (now_ns >= throttle->quiet_until_ns) {
        fl_log(level, "%s: %" PRIu32 " more in 10 s", what, throttle->hidden);
        throttle->hidden = 0;
        throttle->quiet_until_ns = now_ns + QUIET_NS;
        return UINT64_MAX;
    }
    return throttle->quiet_until_ns;
}
