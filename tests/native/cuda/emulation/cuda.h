// Replaces the header of CUDA's driver interface, which is not used: ggml is built without virtual
// memory management.

#pragma once

#include "cuda_runtime.h"
