#pragma once

#include <functional>
#include <vector>

// Computes a step on the thread that is in upstream's queue. is_long: requests for metrics are answered on another
// thread meanwhile.
void moe_edge_server_compute(bool is_long, const std::function<void()> & step);

struct server_task;
struct server_queue;

// Called by upstream before it queues the tasks of a request, on the thread of that request. Upstream queues the tasks
// that this function returns.
std::vector<server_task> & moe_edge_server_begin(std::vector<server_task> & tasks);

// Processes the queued tasks after the thread that did so has returned.
void moe_edge_server_finish(server_queue & queue);
