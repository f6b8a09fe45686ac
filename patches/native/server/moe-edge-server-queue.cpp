// Upstream's queue, with two things of ours. It looks once a second whether a client that waits has gone away;
// here it looks twenty times as often, so that the work for one who left ends with the micro-batch. And it wakes a
// thread at the begin and at the end of every step, and waits for it, so that figures can be asked for meanwhile;
// here that is done for steps with prompts, which are long. Between two tokens it would cost both a thread's turn.
// Besides, we are asked before the tasks of a request are queued, and what is queued can be done behind the loop's end.

#include "moe-edge-server-queue.h"

// Upstream's server calls the second one, a name that CMakeLists.txt gives to the first one there.
#define yield_to_queue(work) yield_to_queue(work); void moe_edge_yield_to_queue(work); void moe_edge_finish()
#include "server-queue.h"
#undef yield_to_queue

#include "log.h"
#include "server-task.h"

#include <algorithm>
#include <chrono>
#include <thread>

#define seconds(n) milliseconds(50 * (n))
#define get_list_id(tasks) get_list_id(moe_edge_server_begin(tasks))
#include "server-queue.cpp"

static thread_local server_queue * computing = nullptr;

void server_queue::moe_edge_yield_to_queue(std::function<void()> && work) {
    computing = this;
    work();
    computing = nullptr;
}

void moe_edge_server_compute(bool is_long, const std::function<void()> & step) {
    if (is_long && computing) {
        computing->yield_to_queue([&] { step(); });
    } else {
        step();
    }
}

void server_queue::moe_edge_finish() {
    running = true;
    process_new_tasks(false);
    running = false;
}

void moe_edge_server_finish(server_queue & queue) {
    queue.moe_edge_finish();
}
