#include "moe-edge-bounds.h"

#include <stdexcept>

#include <time.h>

namespace {

const int64_t MOST_STEPS = 4 << 20;
// The smallest stack that a thread of any system has is 512 KiB.
const uintptr_t MOST_STACK = 256 << 10;
const int64_t LOOK = 4096;

thread_local moe_edge_bounded * current = nullptr;

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

moe_edge_bounded::moe_edge_bounded(std::function<bool()> is_given_up, int64_t most_ns)
    : is_given_up(std::move(is_given_up)),
      outer(current),
      stack(stack_now()),
      end_ns(most_ns ? thread_ns() + most_ns : INT64_MAX) {
    current = this;
}

moe_edge_bounded::~moe_edge_bounded() {
    current = outer;
}

void moe_edge_bounded::count(int64_t weight) {
    taken += weight;
    if (stack > stack_now() + MOST_STACK) {
        throw std::invalid_argument("the grammar or schema of the request is nested too deeply");
    }
    if (taken < looked + LOOK) {
        return;
    }
    looked = taken;
    check_given_up();
    if (taken > MOST_STEPS || (end_ns != INT64_MAX && thread_ns() > end_ns)) {
        throw std::invalid_argument("the grammar or schema of the request takes too much work: make it smaller");
    }
}

void moe_edge_bounded::check_given_up() const {
    if (is_given_up()) {
        throw std::invalid_argument("the grammar or schema of the request was given up");
    }
}

void moe_edge_check_given_up() {
    if (current) {
        current->check_given_up();
    }
}

int moe_edge_step(int64_t weight) {
    if (current) {
        current->count(weight);
    }
    return 0;
}
