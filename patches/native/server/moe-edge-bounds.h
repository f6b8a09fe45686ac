// Bounds of what one request may make upstream compute where upstream has none. What it makes of a schema or a
// grammar grows faster than these do, and it recurses as deeply as they are nested.

#pragma once

#include <cstdint>
#include <functional>
#include <utility>

// Counts the steps of its thread while it lives. An inner one has its own bounds: an outer one does not count its steps.
class moe_edge_bounded {
  public:
    // is_given_up: asked now and then; what is given up ends as if it were too much. most_ns: of this thread's time, so
    // that a busy machine is no reason; 0: steps alone count, since the thread has other work between them.
    moe_edge_bounded(std::function<bool()> is_given_up, int64_t most_ns);
    ~moe_edge_bounded();
    moe_edge_bounded(const moe_edge_bounded &) = delete;

    void count(int64_t weight);
    void check_given_up() const;

  private:
    std::function<bool()> is_given_up;
    moe_edge_bounded *    outer;
    const uintptr_t       stack;
    const int64_t         end_ns;
    int64_t               taken = 0, looked = 0;
};

// Returns 0. Throws std::invalid_argument with a sentence once the thread's work has been too much. Where nothing is
// bounded it does nothing.
int moe_edge_step(int64_t weight = 1);

// Throws std::invalid_argument if the work of this thread is given up. For loops that wait.
void moe_edge_check_given_up();

// A step in the place of a value.
template <typename T> T && moe_edge_step_with(T && value) {
    moe_edge_step(8);
    return std::forward<T>(value);
}
