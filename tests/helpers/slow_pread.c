// Preloaded library: delays each pread by SLOW_PREAD_US microseconds.

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

ssize_t pread(int file, void * to, size_t n, off_t at) {
    const char * us = getenv("SLOW_PREAD_US");
    if (us) {
        usleep(atoi(us));
    }
    return syscall(SYS_pread64, file, to, n, at);
}

ssize_t pread64(int file, void * to, size_t n, off_t at) { return pread(file, to, n, at); }
