#pragma once

#include <functional>
#include <vector>

// Computes a step on the thread that runs upstream's queue. is_long: let another thread answer requests for metrics
// meanwhile.
void moe_edge_server_compute(bool is_long, const std::function<void()> & step);

struct server_task;
struct server_queue;

// Prepares the tasks of a request before upstream queues them. Called on the thread of the request. Returns the tasks.
std::vector<server_task> & moe_edge_server_begin(std::vector<server_task> & tasks);

// Processes the queued tasks after the thread that normally does so has returned.
void moe_edge_server_finish(server_queue & queue);
