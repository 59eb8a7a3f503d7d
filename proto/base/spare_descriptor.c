#include "proto/base/spare_descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/socket.h>
#include <unistd.h>

int fl_spare_descriptor_open(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

bool fl_spare_descriptor_refuse(int *spare, int listener, int error)
{
    if (error != EMFILE && error != ENFILE) {
        return false;
    }
    fl_spare_descriptor_close(spare);
    const int visitor = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (visitor >= 0) {
        close(visitor);
    }
    *spare = fl_spare_descriptor_open();
    return visitor >= 0;
}

void fl_spare_descriptor_close(int *spare)
{
    if (*spare >= 0) {
        close(*spare);
    }
    *spare = -1;
}
