// Shared parts of the stress programs.

#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>

[[noreturn]] inline void die(const std::string & sentence) {
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, sentence.c_str());
    exit(1);
}

// Returns whether the call throws std::logic_error.
template <typename F> bool refuses(const F & call) {
    try {
        call();
    } catch (const std::logic_error &) {
        return true;
    }
    return false;
}

// Calls the next pread after the program's own. It may be a sanitizer's, which must see what is
// written.
inline ssize_t next_pread(int fd, void * to, size_t bytes, off_t at) {
    static const auto next = reinterpret_cast<ssize_t (*)(int, void *, size_t, off_t)>(dlsym(RTLD_NEXT, "pread"));
    return next(fd, to, bytes, at);
}

// Limits the wait for a situation to two minutes of sleep. It counts the sleeps, so that time in
// which the program was stopped does not count.
struct patience {
    int left = 60000;

    void wait(const std::string & for_what) {
        if (left-- == 0) {
            die("timed out while waiting for " + for_what);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
};
