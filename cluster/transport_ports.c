#include "cluster/transport_ports.h"

#include <inttypes.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

/* A port of 1 to 65535; *text is moved behind it. */
static bool read_port(const char **text, uint16_t *out)
{
    unsigned value = 0;
    const char *at = *text;
    while (*at >= '0' && *at <= '9' && value <= UINT16_MAX) {
        value = value * 10 + (unsigned)(*at - '0');
        at++;
    }
    if (at == *text || value == 0 || value > UINT16_MAX) {
        return false;
    }
    *text = at;
    *out = (uint16_t)value;
    return true;
}

fl_status transport_ports_parse(const char *text, const char *name, struct transport_ports *out)
{
    struct transport_ports ports;
    const char *at = text;
    if (!read_port(&at, &ports.first) || *at++ != '-' || !read_port(&at, &ports.last) ||
        *at != '\0') {
        return FL_FAIL(FL_INVALID, "%s \"%.32s\" is not FIRST-LAST, two ports of 1 to 65535", name,
                       text);
    }
    if (ports.last < ports.first || ports.last - ports.first + 1 < TRANSPORT_PORTS_MIN) {
        return FL_FAIL(
            FL_INVALID, "%s %.32s has too few ports: a process needs %d, so %u-%u would do", name,
            text, TRANSPORT_PORTS_MIN,
            ports.first - (ports.first == UINT16_MAX ? TRANSPORT_PORTS_MIN - 1 : 0),
            ports.first == UINT16_MAX ? UINT16_MAX : ports.first + TRANSPORT_PORTS_MIN - 1u);
    }
    *out = ports;
    return FL_OK;
}

static bool is_free(uint16_t port)
{
    const struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(port)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is =
        fd >= 0 && bind(fd, (const struct sockaddr *)(const void *)&place, sizeof(place)) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return is;
}

fl_status transport_ports_check(const struct transport_ports *ports)
{
    unsigned count = 0;
    for (unsigned port = ports->first; port <= ports->last && count < TRANSPORT_PORTS_MIN; port++) {
        count += is_free((uint16_t)port);
    }
    return count >= TRANSPORT_PORTS_MIN
               ? FL_OK
               : FL_FAIL(FL_BUSY,
                         "of the data ports %u-%u only %u can be had and a process needs %d: name "
                         "more of them, or stop what uses them",
                         ports->first, ports->last, count, TRANSPORT_PORTS_MIN);
}

void transport_ports_text(const struct transport_ports *ports, char out[TRANSPORT_PORTS_TEXT_MAX])
{
    snprintf(out, TRANSPORT_PORTS_TEXT_MAX, "%" PRIu16 "-%" PRIu16, ports->first, ports->last);
}
