#include "proto/base/stop_signal.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>

static void set_of_signals(sigset_t *out)
{
    sigemptyset(out);
    sigaddset(out, SIGINT);
    sigaddset(out, SIGTERM);
}

void fl_stop_signal_block(void)
{
    sigset_t set;
    set_of_signals(&set);
    /* It cannot fail: the set and the way to apply it are valid. */
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
    (void)signal(SIGPIPE, SIG_IGN);
}

fl_status fl_stop_signal_open(int *out)
{
    sigset_t set;
    set_of_signals(&set);
    const int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) {
        return FL_FAIL(FL_NO_MEMORY, "no descriptor for signals: %s", strerror(errno));
    }
    *out = fd;
    return FL_OK;
}
