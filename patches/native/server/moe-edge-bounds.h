// Bounds on the work that one request, or one chat template, may cause in upstream code that has no bounds of its own.
// Upstream's work on a schema or a grammar grows faster than its text and recurses as deeply as it is nested. A chat
// template is a program: it can loop for ever, build any text, and call itself.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

// What a thread's work is counted for. The two kinds have separate counters.
enum moe_edge_work { MOE_EDGE_GRAMMAR, MOE_EDGE_TEMPLATE };

// Thrown when a chat template takes too much. It is no std::exception, because upstream catches those and tries the
// template with other inputs.
struct moe_edge_refused {
    std::string reason;
};

// While an object of this class lives, steps of its kind on its thread are counted. An inner object has its own limits:
// the outer one of its kind does not count the inner one's steps.
class moe_edge_bounded {
  public:
    // is_given_up: asked now and then; work that was given up fails. most_ns: CPU time of this thread, so that a busy
    // machine is no reason to fail; 0 for no limit. input_bytes: size of the conversation that a template renders,
    // with which the limits of a template grow.
    moe_edge_bounded(moe_edge_work work, std::function<bool()> is_given_up, int64_t most_ns, size_t input_bytes = 0);
    ~moe_edge_bounded();
    moe_edge_bounded(const moe_edge_bounded &) = delete;

    // Counts steps and bytes of text. Throws once a limit is exceeded.
    void count(int64_t steps, int64_t bytes = 0);
    void check_given_up() const;

  private:
    [[noreturn]] void fail(const char * why) const;

    const moe_edge_work   work;
    std::function<bool()> is_given_up;
    moe_edge_bounded *    outer;
    const uintptr_t       stack;
    const int64_t         most_steps, most_bytes, most_values, end_ns;
    int64_t               taken = 0, looked = 0, written = 0;
};

// Counts a step of a grammar or a schema and returns 0. Throws std::invalid_argument with a sentence once the work of
// this thread exceeds a limit. Does nothing on a thread without bounds.
int moe_edge_step(int64_t weight = 1);

// Throws std::invalid_argument if the work of this thread is given up. For loops that wait.
void moe_edge_check_given_up();

// Counts 8 steps and returns its argument.
template <typename T> T && moe_edge_step_with(T && value) {
    moe_edge_step(8);
    return std::forward<T>(value);
}

// Counts a step of a chat template, and bytes of text that it makes, and returns 0. Throws moe_edge_refused.
int moe_edge_template_step(int64_t steps = 1, int64_t bytes = 0);

// Adds to the number of values of chat templates that live on this thread.
void moe_edge_template_values(int64_t more);
