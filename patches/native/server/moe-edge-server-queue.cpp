// Compiles upstream's queue of tasks with five changes. Disconnected clients are noticed within 50 ms. During a step,
// requests for metrics are answered only if the step has prompts, because preparing for them takes time. Our code is
// called before the tasks of a request are queued. Queued tasks can be processed after the loop has ended. When a slot
// becomes free, all deferred tasks are queued again.

#include "moe-edge-server-queue.h"

// Adds the methods moe_edge_yield_to_queue and moe_edge_finish to upstream's class server_queue. Upstream's server
// calls moe_edge_yield_to_queue instead of yield_to_queue. moe_edge_finish processes the tasks that are still queued
// after the loop has ended.
#define yield_to_queue(work) yield_to_queue(work); void moe_edge_yield_to_queue(work); void moe_edge_finish()
#define pop_deferred_task(slot) pop_deferred_task(slot); void upstream_pop_deferred_task(slot)
#include "server-queue.h"
#undef yield_to_queue
#undef pop_deferred_task

#include "log.h"
#include "server-task.h"

#include <algorithm>
#include <chrono>
#include <thread>

// Returns how many milliseconds the calling thread may wait for a result. It must then check whether its client is
// still connected.
static int64_t moe_edge_wait_ms() {
    using clock = std::chrono::steady_clock;
    thread_local clock::time_point end;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - clock::now()).count();
    if (left > 0) {
        return left;
    }
    end = clock::now() + std::chrono::milliseconds(50);
    return 0;
}

// Upstream waits for tasks for seconds(1), and for results for seconds(timeout). Replace both times.
#define seconds_1       milliseconds(50)
#define seconds_timeout milliseconds(moe_edge_wait_ms())
#define seconds(n)      seconds_##n
#define get_list_id(tasks) get_list_id(moe_edge_server_begin(tasks))
#define pop_deferred_task upstream_pop_deferred_task
#include "server-queue.cpp"
#undef pop_deferred_task

// Called when a slot becomes free. Queues all deferred tasks again, in their order. Those that still find no free slot
// are deferred again. Upstream queues only one task, which may not occupy the slot, because it only reads the slot or
// is refused. The next deferred task would then wait until another request ends, which may never happen.
void server_queue::pop_deferred_task(int) {
    std::lock_guard<std::mutex> lock(mutex_tasks);
    while (!queue_tasks_deferred.empty()) {
        queue_tasks.push_front(std::move(queue_tasks_deferred.back()));
        queue_tasks_deferred.pop_back();
    }
    time_last_task = ggml_time_ms();
    condition_tasks.notify_one();
}

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
