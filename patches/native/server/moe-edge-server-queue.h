#pragma once

#include <functional>

// Computes a step, on the thread that is in upstream's queue. is_long: requests for figures are answered meanwhile,
// on another thread.
void moe_edge_server_compute(bool is_long, const std::function<void()> & step);
