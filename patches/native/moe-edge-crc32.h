// CRC-32 of data whose pieces are read in any order.

#pragma once

#include "moe-edge.h"

// Returns the share of a piece in the CRC-32 of the whole. crc is the piece's own CRC-32, and n the number of bytes
// that follow the piece. The XOR of the shares of all pieces is the CRC-32 of the whole.
uint32_t moe_edge_crc32_before(uint32_t crc, uint64_t n);
