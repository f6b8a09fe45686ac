// Implements the barrier at which ggml's compute threads wait for each other, hundreds of times per token.
//
// On an idle machine, waiting threads should spin, because a sleeping thread wakes up too late. On a busy machine, they
// should sleep, because a spinning thread may occupy the core that the last thread needs. Therefore the last thread to
// arrive checks how long it was runnable without a core. If that time was long, all threads sleep at barriers for a
// while.

#pragma once

#if defined(__linux__) && !defined(__cplusplus)

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOE_EDGE_BARRIER 1

#define MOE_EDGE_SPIN_NS    300000LL  // a thread sleeps after spinning this long; a policy decides about a layer faster
#define MOE_EDGE_SPIN_ROUND 32        // checks of the other threads between two reads of the clock

// A thread shares its core with another process if it was runnable without a core for at least 1/MOE_EDGE_DELAY_PART of
// its measuring period (see moe_edge_late). A period counts as at least MOE_EDGE_LOOK_NS nanoseconds. Delays below 2.5
// ms, for example by small system tasks, therefore have no effect.
#define MOE_EDGE_DELAY_PART 8
#define MOE_EDGE_LOOK_NS    20000000LL

// After a thread has found that it shares its core, all threads sleep at barriers instead of spinning, for
// MOE_EDGE_SHARED_NS nanoseconds. If a thread finds this again within MOE_EDGE_FORGET_NS after that time has ended, the
// next time is twice as long, up to MOE_EDGE_MOST_SHARED_NS.
#define MOE_EDGE_SHARED_NS      4000000LL
#define MOE_EDGE_MOST_SHARED_NS 256000000LL
#define MOE_EDGE_FORGET_NS      40000000LL

static atomic_llong moe_edge_shared_until;  // time until which no thread spins
static atomic_llong moe_edge_shared_ns;     // the last duration of sleeping

// The state of this thread. at_ns, delay_ns: the clock, and the total time for which the thread had been runnable
// without a core, both at the start of its current measuring period.
static _Thread_local struct {
    int       file;  // descriptor of the thread's schedstat file; 0: not registered yet, -1: not available
    long long at_ns;
    long long delay_ns;
} moe_edge_late;

// Registers the calling thread as a compute thread until it ends. Returns a file descriptor of the thread's schedstat
// file in /proc, which contains the total time for which the thread was runnable without a core. Returns -1 if the
// kernel does not report this time. The descriptor is closed when the thread ends. Implemented in moe-edge-delay.cpp.
int moe_edge_compute_thread(void);

static inline long long moe_edge_barrier_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Returns how long this thread has been runnable without a core in total, or -1 if the kernel does not report it.
static inline long long moe_edge_delay_ns(void) {
    char text[64];
    const ssize_t n = moe_edge_late.file > 0 ? pread(moe_edge_late.file, text, sizeof(text) - 1, 0) : 0;
    long long delay_ns;
    if (n <= 0) {
        return -1;
    }
    text[n] = 0;
    return sscanf(text, "%*s %lld", &delay_ns) == 1 ? delay_ns : -1;
}

// Makes all threads sleep at barriers for a while if this thread shares its core with another process. now: the current
// time. delay_ns: the total time for which this thread has been runnable without a core.
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

// Called by the last thread to arrive at a barrier if other threads already sleep there. Checks whether the thread was
// late because it had no core.
static inline void moe_edge_barrier_late(void) {
    const long long now = moe_edge_barrier_ns();
    if (now >= atomic_load_explicit(&moe_edge_shared_until, memory_order_relaxed)) {
        moe_edge_barrier_judge(now, moe_edge_delay_ns());
    }
}

// Waits until all n_threads threads have called this function. `arrived` counts the threads at the barrier and is 0
// between barriers. `passed` increases by 2 when the barrier is completed. It is odd while a thread sleeps at the
// barrier.
static inline void moe_edge_barrier(atomic_int * arrived, atomic_int * passed, int n_threads, void (*relax)(void)) {
    if (moe_edge_late.file == 0) {
        moe_edge_late.file = moe_edge_compute_thread();
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
            // The exchange fails if another thread already sleeps at this barrier, or if the barrier was just
            // completed.
            atomic_compare_exchange_strong_explicit(passed, &expected, before | 1, memory_order_seq_cst, memory_order_seq_cst);
            if ((expected & ~1) == before) {
                syscall(SYS_futex, passed, FUTEX_WAIT_PRIVATE, before | 1, NULL, NULL, 0);
            }
        }
    }
    atomic_thread_fence(memory_order_seq_cst);
}

#endif
