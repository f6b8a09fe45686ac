// Limits the work that one request or one chat template may cause in upstream code that has no limits of its own. The
// work on a schema or a grammar grows faster than its text, and the recursion is as deep as the nesting. A chat
// template is a program: it can loop forever, create any amount of text, and call itself.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

// The kinds of work that are limited. Each kind has its own counters.
enum moe_edge_work { MOE_EDGE_GRAMMAR, MOE_EDGE_TEMPLATE };

// Thrown when a chat template exceeds a limit. It is not derived from std::exception, because upstream catches those
// exceptions and then tries the template with other inputs.
struct moe_edge_refused {
    std::string reason;
};

// Counts and limits the steps of one kind of work on the current thread while the object exists. A step is a small
// piece of work, such as one pass through a loop. If a second object of the same kind is created meanwhile, only the
// second one counts, with its own limits.
class moe_edge_bounded {
  public:
    // Starts to count the steps of `work` on this thread. is_given_up: called from time to time; when it returns true,
    // the work fails. most_ns: limit on the CPU time of this thread in nanoseconds, or 0 for no limit. input_bytes:
    // size of the conversation that a chat template renders; the limits of a template grow with it.
    moe_edge_bounded(moe_edge_work work, std::function<bool()> is_given_up, int64_t most_ns, size_t input_bytes = 0);
    ~moe_edge_bounded();
    moe_edge_bounded(const moe_edge_bounded &) = delete;

    // Counts steps of work, and bytes of text that a chat template has created. If a limit is exceeded, throws
    // moe_edge_refused for a chat template, and std::invalid_argument for a grammar or a schema.
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

// Counts `weight` steps of work on a grammar or a schema, and returns 0. Throws std::invalid_argument with one sentence
// if the work of this thread exceeds a limit. Has no effect on a thread without limits.
int moe_edge_step(int64_t weight = 1);

// Throws std::invalid_argument if the request of this thread was cancelled or the server is stopping. Called in loops
// that wait.
void moe_edge_check_given_up();

// Counts 8 steps and returns its argument.
template <typename T> T && moe_edge_step_with(T && value) {
    moe_edge_step(8);
    return std::forward<T>(value);
}

// Counts steps of the chat template that this thread renders, and bytes of text that the template has created. Returns
// 0. Throws moe_edge_refused if a limit is exceeded.
int moe_edge_template_step(int64_t steps = 1, int64_t bytes = 0);

// Adds `more`, which may be negative, to the number of values that chat templates on this thread hold now.
void moe_edge_template_values(int64_t more);
