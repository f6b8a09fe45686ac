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
    bool    any = false;   // a thread has been registered
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

// Adds to known.delay_ns the time for which a thread was runnable without a core since its last measurement.
void measure(compute_thread & thread) {
    const int64_t delay = delay_ns(thread.file);
    if (delay >= 0) {
        known.delay_ns += delay - thread.delay_ns;
        thread.delay_ns = delay;
    }
}

// A thread-local object of a registered thread. When the thread ends, the destructor removes the thread from `known`
// and closes the file with its kernel statistics (schedstat).
struct registration {
    int file = -1;

    ~registration() {
        std::lock_guard<std::mutex> lock(known.mutex);
        for (auto it = known.threads.begin(); it != known.threads.end(); ++it) {
            if (it->file == file) {
                measure(*it);
                known.threads.erase(it);
                close(file);
                return;
            }
        }
    }
};

}  // namespace

extern "C" int moe_edge_compute_thread(void) {
    static thread_local registration own;
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/task/%ld/schedstat", (long) syscall(SYS_gettid));
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const int64_t delay = file < 0 ? -1 : delay_ns(file);
    if (delay < 0) {
        if (file >= 0) {
            close(file);
        }
        return -1;
    }
    std::lock_guard<std::mutex> lock(known.mutex);
    known.threads.push_back({ file, delay });
    known.any = true;
    return own.file = file;
}

int64_t moe_edge_compute_delay_us() {
    std::lock_guard<std::mutex> lock(known.mutex);
    for (auto & thread : known.threads) {
        measure(thread);
    }
    return known.any ? known.delay_ns / 1000 : -1;
}

#else

int64_t moe_edge_compute_delay_us() {
    return -1;
}

#endif
