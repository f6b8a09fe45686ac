// Upstream's queue, which looks once a second whether a client that waits has gone away. Here it looks
// twenty times as often, so that the work for one who left ends with the micro-batch.

#include "log.h"
#include "server-queue.h"
#include "server-task.h"

#include <algorithm>
#include <chrono>
#include <thread>

#define seconds(n) milliseconds(50 * (n))
#include "server-queue.cpp"
