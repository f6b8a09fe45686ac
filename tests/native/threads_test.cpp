// moe_edge_threads on simulated machines: the chosen number of threads, the cost of its trials, and
// no trials on an idle machine.

#include "moe-edge-threads.h"

#include <cstdio>
#include <cstdlib>
#include <functional>

namespace {

[[noreturn]] void die(const char * sentence, double value) {
    fprintf(stderr, "threads_test: %s (%g)\n", sentence, value);
    exit(1);
}

// Microseconds of a step with n threads, and the mean number of threads that wait for a core during
// it.
struct machine {
    std::function<double(int32_t)> step_us;
    std::function<double(int32_t)> waiting;
};

struct result {
    int32_t usual;  // of the last step
    double  mean_us;
    int     most;  // percentage of steps with all threads
};

int64_t delay_us = 0;
uint64_t now_us = 0;

result play(moe_edge_threads & threads, const machine & m, uint64_t for_us, int32_t n_tokens = 1) {
    const uint64_t end = now_us + for_us;
    double total = 0;
    int steps = 0, most = 0;
    while (now_us < end) {
        const int32_t n = threads.count(n_tokens);
        const double us = m.step_us(n);
        now_us += us;
        delay_us += us * m.waiting(n);
        total += us;
        steps++;
        most += n == threads.most();
        threads.step(n_tokens, us, now_us, [] { return delay_us; });
    }
    return { threads.count(n_tokens), total / steps, most * 100 / steps };
}

constexpr uint64_t SECOND = 1000000;

const machine idle = { [](int32_t n) { return n == 2 ? 8000 : 13000; }, [](int32_t) { return 0.01; } };
const machine one_loop = { [](int32_t n) { return n == 2 ? 18000 : 13500; }, [](int32_t n) { return n == 2 ? 0.5 : 0.02; } };
const machine four_jobs = { [](int32_t n) { return n == 2 ? 57000 : 32000; }, [](int32_t n) { return n == 2 ? 1.2 : 0.6; } };
// A small load: two threads sometimes wait, but are still faster.
const machine some = { [](int32_t n) { return n == 2 ? 9500 : 13500; }, [](int32_t n) { return n == 2 ? 0.2 : 0.05; } };

}  // namespace

int main() {
    moe_edge_threads two(2);
    result r = play(two, idle, 20 * SECOND);
    if (r.most != 100) {
        die("an idle machine got trials", r.most);
    }
    r = play(two, one_loop, 20 * SECOND);
    if (r.mean_us > 1.03 * 13500) {
        die("next to a busy loop it is slower than one thread", r.mean_us);
    }
    if (two.count(512) != 2) {
        die("a prompt does not get all threads", two.count(512));
    }
    r = play(two, idle, SECOND * 5 / 2);
    r = play(two, idle, 5 * SECOND);
    if (r.most != 100) {
        die("it did not return to all threads after the loop", r.most);
    }
    r = play(two, four_jobs, 20 * SECOND);
    if (r.mean_us > 1.03 * 32000) {
        die("next to four jobs it is slower than one thread", r.mean_us);
    }
    play(two, idle, 3 * SECOND);
    r = play(two, some, 20 * SECOND);
    if (r.mean_us > 1.02 * 9500) {
        die("it gave up a useful thread", r.mean_us);
    }

    // Many cores, a third of which are taken. Each thread without a core delays all others.
    const machine many = {
        [](int32_t n) { return 60000.0 / n * (n > 11 ? 2.0 : 1.0); },
        [](int32_t n) { return n > 11 ? n - 10.5 : 0.05; },
    };
    moe_edge_threads sixteen(16);
    r = play(sixteen, many, 10 * SECOND);
    r = play(sixteen, many, 20 * SECOND);
    if (r.mean_us > 1.15 * 60000.0 / 11) {
        die("it chose too few or too many of sixteen threads", r.mean_us);
    }

    // A model that reads from disk: its I/O threads take cores too, some steps take three times as
    // long as others, and one thread is slower.
    uint32_t seed = 1;
    const auto part = [&seed] { return 0.5 + 1.0 * ((seed = seed * 1664525u + 1013904223u) >> 16) / 65536.0; };
    const machine reading = {
        [&](int32_t n) { return part() * (n == 2 ? 28000 : 41000); }, [](int32_t n) { return n == 2 ? 0.3 : 0.2; },
    };
    moe_edge_threads reader(2);
    r = play(reader, reading, 60 * SECOND);
    if (r.mean_us > 1.05 * 28000) {
        die("a model that reads computes with too few threads", r.mean_us);
    }

    // Prompts get all threads, and their delays do not count for tokens.
    moe_edge_threads other(2);
    play(other, idle, SECOND);
    for (int i = 0; i < 50; i++) {
        if (other.count(512) != 2) {
            die("a prompt does not get all threads", other.count(512));
        }
        delay_us += 400000;
        now_us += 500000;
        other.step(512, 500000, now_us, [] { return delay_us; });
        if (play(other, idle, 100000).most != 100) {
            die("a prompt's delays caused trials for tokens", i);
        }
    }

    // If the kernel does not report waiting threads, the number stays.
    moe_edge_threads blind(2);
    for (int i = 0; i < 1000; i++) {
        now_us += 18000;
        blind.step(1, 18000, now_us, [] { return int64_t(-1); });
        if (blind.count(1) != 2) {
            die("the number changed without data", i);
        }
    }
    moe_edge_threads one(1);
    if (play(one, one_loop, SECOND).usual != 1) {
        die("one thread must stay one thread", 0);
    }
    puts("the number of threads follows the free cores");
    return 0;
}
