#include "proto/client/interrupt.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static volatile sig_atomic_t seen; /* which one; a signal handler has no other place to write to */

static void on_signal(int signal_number)
{
    if (seen != 0) {
        _exit(EXIT_INTERRUPTED);
    }
    seen = signal_number;
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

bool interrupt_is_final(void)
{
    return seen == SIGTERM;
}

void interrupt_clear(void)
{
    if (!interrupt_is_final()) {
        seen = 0;
    }
}
