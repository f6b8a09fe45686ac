// The driver interface is not used: ggml is built without virtual memory management.

#pragma once

#include "cuda_runtime.h"
