// The device's attributes exclude launches over the whole grid. This file only lets the code
// compile.

#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {
struct grid_group {
    void sync() const { moe_emu::no_ptx(); }
};
inline grid_group this_grid() { return {}; }
}
