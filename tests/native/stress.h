// What the programs under stress share.

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

// Whether it was called out of its turn.
template <typename F> bool refuses(const F & call) {
    try {
        call();
    } catch (const std::logic_error &) {
        return true;
    }
    return false;
}

// The pread behind a program's own, which comes first: the sanitizer's, which has to see what is written.
inline ssize_t next_pread(int fd, void * to, size_t bytes, off_t at) {
    static const auto next = reinterpret_cast<ssize_t (*)(int, void *, size_t, off_t)>(dlsym(RTLD_NEXT, "pread"));
    return next(fd, to, bytes, at);
}

// How long a situation may take to come up: two minutes of sleep at least. They are counted, since a program that was
// stopped for a while had none of them.
struct patience {
    int left = 60000;

    void wait(const std::string & for_what) {
        if (left-- == 0) {
            die("a situation did not come up: " + for_what);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
};
