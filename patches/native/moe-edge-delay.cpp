// Measures for how long the compute threads of this process have been runnable without a core, because other threads
// used the cores.

#include "moe-edge-cpu.h"

#if defined(__linux__)

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <vector>

namespace {

struct compute_thread {
    int     file;     // its kernel statistics (schedstat)
    int64_t delay_ns; // at the last measurement
};

struct compute_threads {
    std::mutex mutex;
    std::vector<compute_thread> threads;
    int64_t delay_ns = 0;  // sum over all threads, including those that have ended
};

// The registered threads. The object is never destroyed, because OpenMP's threads may register until the process ends.
compute_threads & known = *new compute_threads;

// Returns for how many nanoseconds a thread has been runnable without a core in total, from its schedstat file. Returns
// -1 if the thread has ended or the kernel does not report the time.
int64_t delay_ns(int file) {
    char text[64];
    const ssize_t n = pread(file, text, sizeof(text) - 1, 0);
    long long found;
    if (n <= 0) {
        return -1;
    }
    text[n] = 0;
    return sscanf(text, "%*s %lld", &found) == 1 ? found : -1;
}

}  // namespace

extern "C" void moe_edge_compute_thread(void) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/task/%ld/schedstat", (long) syscall(SYS_gettid));
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const int64_t delay = file < 0 ? -1 : delay_ns(file);
    if (delay >= 0) {
        std::lock_guard<std::mutex> lock(known.mutex);
        known.threads.push_back({ file, delay });
    } else if (file >= 0) {
        close(file);
    }
}

int64_t moe_edge_compute_delay_us() {
    std::lock_guard<std::mutex> lock(known.mutex);
    if (known.threads.empty() && known.delay_ns == 0) {
        return -1;
    }
    for (auto it = known.threads.begin(); it != known.threads.end();) {
        const int64_t delay = delay_ns(it->file);
        if (delay < 0) {
            close(it->file);
            it = known.threads.erase(it);
            continue;
        }
        known.delay_ns += delay - it->delay_ns;
        it->delay_ns = delay;
        ++it;
    }
    return known.delay_ns / 1000;
}

#else

int64_t moe_edge_compute_delay_us() {
    return -1;
}

#endif
