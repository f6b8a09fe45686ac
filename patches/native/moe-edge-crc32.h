// The CRC-32 of pieces that are read in any order.

#pragma once

#include "moe-edge.h"

// What a piece with this CRC-32 brings to that of a whole in which n bytes lie behind it: the whole
// has the exclusive or of what its pieces bring.
uint32_t moe_edge_crc32_before(uint32_t crc, uint64_t n);
