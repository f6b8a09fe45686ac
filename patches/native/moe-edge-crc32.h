// Declares a function that combines the CRC-32s of pieces that are read in any order.

#pragma once

#include "moe-edge.h"

// Returns the contribution of a piece of data to the CRC-32 of the whole data. crc is the piece's own CRC-32. n is the
// number of bytes after the piece. The XOR of the contributions of all pieces is the CRC-32 of the whole.
uint32_t moe_edge_crc32_before(uint32_t crc, uint64_t n);
