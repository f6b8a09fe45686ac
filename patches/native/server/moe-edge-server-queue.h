#pragma once

#include <functional>
#include <vector>

// Computes a step, on the thread that is in upstream's queue. is_long: requests for figures are answered meanwhile,
// on another thread.
void moe_edge_server_compute(bool is_long, const std::function<void()> & step);

struct server_task;
struct server_queue;

// Upstream calls this before it queues the tasks of a request, on the thread of that, and goes on with what it returns.
std::vector<server_task> & moe_edge_server_begin(std::vector<server_task> & tasks);

// Does what is queued, where the thread that did so has returned.
void moe_edge_server_finish(server_queue & queue);
