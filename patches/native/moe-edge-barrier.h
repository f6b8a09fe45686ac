// How ggml's compute threads wait for each other: by spinning, or asleep while they share their cores.
//
// A token has hundreds of barriers. On an idle machine the last thread comes within microseconds, and
// whoever sleeps comes back too late. Beside other processes a thread may be off its core for
// milliseconds, and whoever spins meanwhile takes the core that it could go on with. So a thread that
// kept others waiting looks how long it had been ready without a core, and where that was long, nobody
// spins for a while.

#pragma once

#if defined(__linux__) && !defined(__cplusplus)

#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOE_EDGE_BARRIER 1

#define MOE_EDGE_SPIN_NS    300000LL  // longer than a policy takes to decide about a layer
#define MOE_EDGE_SPIN_ROUND 32        // looks at the other threads between two at the clock

// A thread shares its core where it was ready without one for this part of a time, and a shorter time than
// MOE_EDGE_LOOK_NS counts as that one. So a thread that something small put off its core for a millisecond, as
// happens on every idle machine, does not share it. Another process that computes takes a whole time slice.
#define MOE_EDGE_DELAY_PART 8
#define MOE_EDGE_LOOK_NS    20000000LL

// How long nobody spins: a time slice at first, and twice as long where threads spin again and a core is still
// shared within MOE_EDGE_FORGET_NS. What another process computes now and then is over by then.
#define MOE_EDGE_SHARED_NS      4000000LL
#define MOE_EDGE_MOST_SHARED_NS 256000000LL
#define MOE_EDGE_FORGET_NS      40000000LL

static atomic_llong moe_edge_shared_until;  // until when nobody spins
static atomic_llong moe_edge_shared_ns;     // for how long, the last time

// What this thread saw where the time began over which it is asked.
static _Thread_local struct {
    int       file;  // its statistics of the kernel's; 0: not opened yet, -1: there are none
    long long at_ns;
    long long delay_ns;
} moe_edge_late;

// Of moe-edge-cpu: the calling thread computes, and how long it waits for a core counts from now on.
void moe_edge_compute_thread(void);

static _Thread_local int moe_edge_known;

static inline long long moe_edge_barrier_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// How long this thread has been ready without a core, in all; -1 where the kernel does not say.
static inline long long moe_edge_delay_ns(void) {
    if (moe_edge_late.file == 0) {
        const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        moe_edge_late.file = file > 0 ? file : -1;
    }
    char text[64];
    const ssize_t n = moe_edge_late.file > 0 ? pread(moe_edge_late.file, text, sizeof(text) - 1, 0) : 0;
    long long delay_ns;
    if (n <= 0) {
        return -1;
    }
    text[n] = 0;
    return sscanf(text, "%*s %lld", &delay_ns) == 1 ? delay_ns : -1;
}

// Whether this thread shares its core: it has been ready without one for delay_ns in all, now. While nobody
// spins each barrier wakes threads, and until they run they are ready: that time does not count.
static inline void moe_edge_barrier_judge(long long now, long long delay_ns) {
    const long long until = atomic_load_explicit(&moe_edge_shared_until, memory_order_relaxed);
    const long long delay = delay_ns - moe_edge_late.delay_ns, time = now - moe_edge_late.at_ns;
    const int spun   = moe_edge_late.at_ns >= until;
    const int shared = spun && delay * MOE_EDGE_DELAY_PART >= (time > MOE_EDGE_LOOK_NS ? time : MOE_EDGE_LOOK_NS);
    if (!spun || shared || time > MOE_EDGE_LOOK_NS) {
        moe_edge_late.delay_ns = delay_ns;
        moe_edge_late.at_ns    = now;
    }
    if (!shared) {
        return;
    }
    const long long held = atomic_load_explicit(&moe_edge_shared_ns, memory_order_relaxed);
    long long more = now - until > MOE_EDGE_FORGET_NS ? MOE_EDGE_SHARED_NS : 2*held;
    more = more > MOE_EDGE_MOST_SHARED_NS ? MOE_EDGE_MOST_SHARED_NS : more;
    atomic_store_explicit(&moe_edge_shared_ns, more, memory_order_relaxed);
    atomic_store_explicit(&moe_edge_shared_until, now + more, memory_order_relaxed);
}

// The thread that came last has kept others waiting: was it because somebody else had its core?
static inline void moe_edge_barrier_late(void) {
    const long long now = moe_edge_barrier_ns();
    if (now >= atomic_load_explicit(&moe_edge_shared_until, memory_order_relaxed)) {
        moe_edge_barrier_judge(now, moe_edge_delay_ns());
    }
}

// One of n_threads arrives. arrived counts them and is 0 between barriers; passed counts finished
// barriers in twos, and is odd while somebody sleeps until it changes.
static inline void moe_edge_barrier(atomic_int * arrived, atomic_int * passed, int n_threads, void (*relax)(void)) {
    if (!moe_edge_known) {
        moe_edge_known = 1;
        moe_edge_compute_thread();
    }
    const int before = atomic_load_explicit(passed, memory_order_relaxed) & ~1;
    if (atomic_fetch_add_explicit(arrived, 1, memory_order_seq_cst) == n_threads - 1) {
        atomic_store_explicit(arrived, 0, memory_order_relaxed);
        const int after = (int) ((unsigned) before + 2);
        if (atomic_exchange_explicit(passed, after, memory_order_seq_cst) & 1) {
            syscall(SYS_futex, passed, FUTEX_WAKE_PRIVATE, n_threads, NULL, NULL, 0);
            moe_edge_barrier_late();
        }
        return;
    }
    long long start = 0;
    for (int i = 1; (atomic_load_explicit(passed, memory_order_acquire) & ~1) == before; i++) {
        relax();
        if (i % MOE_EDGE_SPIN_ROUND != 0) {
            continue;
        }
        const long long now = moe_edge_barrier_ns();
        start = start == 0 ? now : start;
        if (now - start > MOE_EDGE_SPIN_NS || now < atomic_load_explicit(&moe_edge_shared_until, memory_order_relaxed)) {
            int expected = before;
            // The exchange fails where another one sleeps already, or where the barrier has been passed.
            atomic_compare_exchange_strong_explicit(passed, &expected, before | 1, memory_order_seq_cst, memory_order_seq_cst);
            if ((expected & ~1) == before) {
                syscall(SYS_futex, passed, FUTEX_WAIT_PRIVATE, before | 1, NULL, NULL, 0);
            }
        }
    }
    atomic_thread_fence(memory_order_seq_cst);
}

#endif
