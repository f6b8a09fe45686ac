#define _GNU_SOURCE
// moe_edge_barrier: no thread passes before all have arrived, threads that wait long sleep, none
// sleeps forever, and a thread that shares its core is detected.

#include "moe-edge-barrier.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, ROUNDS = 3000 };

static atomic_int arrived, passed;
static atomic_int came[ROUNDS];
static atomic_llong waiting_cpu_ns;

static atomic_int known;

int moe_edge_compute_thread(void) {
    atomic_fetch_add(&known, 1);
    return open("/proc/thread-self/schedstat", O_RDONLY);
}

static void relax(void) {}

static void sleep_us(long us) {
    const struct timespec t = { us / 1000000, us % 1000000 * 1000 };
    nanosleep(&t, NULL);
}

static long long cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char * sentence) {
    fprintf(stderr, "barrier_test: %s\n", sentence);
    exit(1);
}

static void * run(void * argument) {
    const int thread = (int) (size_t) argument;
    unsigned random = 7 * thread + 1;
    for (int i = 0; i < ROUNDS; i++) {
        random = random * 1664525 + 1013904223;
        if (random >> 16 & 1 && i % 100 == 0) {
            sleep_us(1000);  // longer than the others spin
        }
        if (i % 500 == thread) {
            // as if the thread had been preempted: then no thread spins
            atomic_store(&moe_edge_shared_until, moe_edge_barrier_ns() + 2000000);
        }
        atomic_fetch_add(&came[i], 1);
        moe_edge_barrier(&arrived, &passed, THREADS, relax);
        if (atomic_load(&came[i]) != THREADS) {
            die("a thread passed before all had arrived");
        }
    }
    // The first thread is 60 ms late. The others must not use the CPU meanwhile, although no core
    // is shared.
    moe_edge_barrier(&arrived, &passed, THREADS, relax);
    atomic_store(&moe_edge_shared_until, 0);
    moe_edge_barrier(&arrived, &passed, THREADS, relax);
    if (thread == 0) {
        sleep_us(60000);
    }
    const long long start = cpu_ns();
    moe_edge_barrier(&arrived, &passed, THREADS, relax);
    if (thread != 0) {
        atomic_fetch_add(&waiting_cpu_ns, cpu_ns() - start);
    }
    return NULL;
}

// Computes for 100 ms of wall time.
static void * compute(void * unused) {
    const long long start = moe_edge_barrier_ns();
    while (moe_edge_barrier_ns() - start < 100000000) {
    }
    return unused;
}

// This thread is late, because another thread computes on its core.
static void * late(void * unused) {
    pthread_t other;
    if (pthread_create(&other, NULL, compute, NULL) != 0) {
        die("no thread");
    }
    moe_edge_barrier_late();  // the time before does not count
    compute(unused);
    moe_edge_barrier(&arrived, &passed, 2, relax);
    pthread_join(other, NULL);
    return NULL;
}

static void share_a_core(void) {
    cpu_set_t all, one;
    CPU_ZERO(&one);
    sched_getaffinity(0, sizeof(all), &all);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &all)) {
            CPU_SET(cpu, &one);
        }
    }
    sched_setaffinity(0, sizeof(one), &one);
    atomic_store(&moe_edge_shared_until, 0);
    // If the process is stopped meanwhile, or its threads start late, the two overlap for less than
    // 100 ms.
    for (int tries = 0; atomic_load(&moe_edge_shared_until) == 0; tries++) {
        if (tries == 100) {
            die("the shared core was not detected");
        }
        pthread_t thread;
        if (pthread_create(&thread, NULL, late, NULL) != 0) {
            die("no thread");
        }
        moe_edge_barrier(&arrived, &passed, 2, relax);
        pthread_join(thread, NULL);
    }
}

// Simulates what a late thread sees on a machine. The thread is preempted for off_us in each
// round_us, and it is runnable without a core whenever threads sleep. It checks every look_us.
// Returns the fraction of 4 s in which threads sleep.
static double asleep(long long off_us, long long round_us, long long look_us) {
    atomic_store(&moe_edge_shared_until, 0);
    atomic_store(&moe_edge_shared_ns, 0);
    memset(&moe_edge_late, 0, sizeof(moe_edge_late));
    const long long begin_us = 10000000;
    long long asleep_us = 0, delay_us = 0;
    for (long long us = begin_us; us < begin_us + 4000000; us += look_us) {
        const long long in_round = (us - begin_us) % round_us;
        if (in_round < look_us) {
            us += off_us;
            delay_us += off_us;
        }
        const long long until = atomic_load(&moe_edge_shared_until);
        if (1000*us >= until) {
            moe_edge_barrier_judge(1000*us, 1000*delay_us);
        }
        if (1000*us < atomic_load(&moe_edge_shared_until)) {
            asleep_us += look_us;
            delay_us += look_us;
        }
    }
    return asleep_us / 4e6;
}

static void judge(void) {
    // Small processes take a core for 1 ms of 13, whether threads spin or sleep. The check runs
    // rarely or at each barrier.
    if (asleep(1000, 13000, 50) > 0.02 || asleep(1000, 13000, 5000) > 0.02) {
        die("an idle machine is taken for a shared one");
    }
    // Another process that computes for 5 ms of 50 or 100 must not make threads sleep more than 10
    // %.
    if (asleep(5000, 50000, 50) > 0.1 || asleep(5000, 100000, 1000) > 0.1) {
        die("short bursts make threads sleep");
    }
    // Another process takes half of the time in time slices.
    if (asleep(3000, 6000, 50) < 0.4 || asleep(3000, 6000, 1000) < 0.4) {
        die("a shared machine is not detected");
    }
}

int main(void) {
    judge();
    pthread_t threads[THREADS];
    // the count of barriers wraps around during the test
    atomic_store(&passed, (0x7fffffff - ROUNDS) & ~1);
    for (size_t i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, run, (void *) i) != 0) {
            die("no thread");
        }
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    if (atomic_load(&known) != THREADS) {
        die("not every thread registered once");
    }
    if (atomic_load(&waiting_cpu_ns) > 10000000) {
        die("waiting threads used the CPU");
    }
    moe_edge_late.file = moe_edge_compute_thread();
    if (moe_edge_delay_ns() >= 0) {
        share_a_core();
    }
    puts("all passed together");
    return 0;
}
