#include "proto/client/interrupt.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static volatile sig_atomic_t seen; /* a signal handler has no other place to write to */

static void on_signal(int signal_number)
{
    (void)signal_number;
    if (seen != 0) {
        _exit(EXIT_INTERRUPTED);
    }
    seen = 1;
}

void interrupt_watch(void)
{
    struct sigaction action = {.sa_handler = on_signal};
    sigemptyset(&action.sa_mask); /* no SA_RESTART: a read at the prompt comes back */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool interrupt_seen(void)
{
    return seen != 0;
}

void interrupt_clear(void)
{
    seen = 0;
}
