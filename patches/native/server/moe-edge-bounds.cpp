#include "moe-edge-bounds.h"

#include <stdexcept>

#include <time.h>

namespace {

// The most steps (such as passes through a loop) of one piece of work. MOST_STEPS: work on a grammar or a schema.
// MOST_TEMPLATE_STEPS: rendering chat templates. None of upstream's 70 templates takes more than 1.2 million steps when
// a server starts.
const int64_t MOST_STEPS = 4 << 20, MOST_TEMPLATE_STEPS = 8 << 20;
// The most bytes of text that a chat template may create, counting every copy, and the most values that it may hold at
// the same time.
const int64_t MOST_BYTES = 16 << 20, MOST_VALUES = 256 << 10;
// The additional steps and bytes of text that a chat template may take for each byte of the conversation. Upstream's 70
// templates take at most 230 steps and 120 bytes.
const int64_t STEPS_PER_BYTE = 1024, BYTES_PER_BYTE = 256;
// The most stack, in bytes, that work may use while a moe_edge_bounded limits it. The stack of a thread is at least 512
// KiB on every system.
const uintptr_t MOST_STACK = 256 << 10;
// count() checks the clock after this many steps (such as passes through a loop). TEMPLATE_LOOK, for chat templates, is
// smaller, because one step of a template may copy a long text.
const int64_t LOOK = 4096, TEMPLATE_LOOK = 256;

thread_local moe_edge_bounded * current[2] = {};
thread_local int64_t n_values = 0;

uintptr_t stack_now() {
    char here = 0;
    volatile char * at = &here;
    return reinterpret_cast<uintptr_t>(at);
}

int64_t thread_ns() {
    timespec now = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

}  // namespace

moe_edge_bounded::moe_edge_bounded(
        moe_edge_work work, std::function<bool()> is_given_up, int64_t most_ns, size_t input_bytes)
    : work(work),
      is_given_up(std::move(is_given_up)),
      outer(current[work]),
      stack(stack_now()),
      most_steps(work == MOE_EDGE_GRAMMAR ? MOST_STEPS : MOST_TEMPLATE_STEPS + STEPS_PER_BYTE * int64_t(input_bytes)),
      most_bytes(MOST_BYTES + BYTES_PER_BYTE * int64_t(input_bytes)),
      most_values(n_values + MOST_VALUES + int64_t(input_bytes)),
      end_ns(most_ns ? thread_ns() + most_ns : INT64_MAX) {
    current[work] = this;
}

moe_edge_bounded::~moe_edge_bounded() {
    current[work] = outer;
}

void moe_edge_bounded::fail(const char * why) const {
    if (work == MOE_EDGE_TEMPLATE) {
        throw moe_edge_refused{ std::string("the chat template ") + why };
    }
    throw std::invalid_argument(std::string("the grammar or schema of the request ") + why);
}

void moe_edge_bounded::count(int64_t steps, int64_t bytes) {
    taken += steps;
    written += bytes;
    if (stack > stack_now() + MOST_STACK) {
        fail("is nested too deeply");
    }
    if (written > most_bytes) {
        fail("makes too much text");
    }
    if (taken < looked + (work == MOE_EDGE_TEMPLATE ? TEMPLATE_LOOK : LOOK)) {
        return;
    }
    looked = taken;
    if (n_values > most_values) {
        fail("makes too many values");
    }
    check_given_up();
    if (taken > most_steps || (end_ns != INT64_MAX && thread_ns() > end_ns)) {
        fail("takes too much work: make it smaller");
    }
}

void moe_edge_bounded::check_given_up() const {
    if (is_given_up()) {
        fail("was given up");
    }
}

void moe_edge_check_given_up() {
    if (current[MOE_EDGE_GRAMMAR]) {
        current[MOE_EDGE_GRAMMAR]->check_given_up();
    }
}

int moe_edge_step(int64_t weight) {
    if (current[MOE_EDGE_GRAMMAR]) {
        current[MOE_EDGE_GRAMMAR]->count(weight);
    }
    return 0;
}

int moe_edge_template_step(int64_t steps, int64_t bytes) {
    if (current[MOE_EDGE_TEMPLATE]) {
        current[MOE_EDGE_TEMPLATE]->count(steps, bytes);
    }
    return 0;
}

void moe_edge_template_values(int64_t more) {
    n_values += more;
}
