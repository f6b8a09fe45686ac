// Computes CRC-32 checksums (IEEE 802.3, as in zlib). A packed file has a checksum for each expert matrix.

#include "moe-edge-crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// The CRC polynomial without its term x^32. The coefficient of the lowest power is in the highest bit, as in all
// functions of this file.
constexpr uint32_t POLYNOMIAL = 0xEDB88320;
constexpr uint32_t ONE        = 1u << 31;

// Returns the product of two polynomials over GF(2), modulo the CRC polynomial.
constexpr uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (; a != 0; a <<= 1) {
        sum ^= a & ONE ? b : 0;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return sum;
}

// Returns x^1, x^2, x^4, x^8, and so on, modulo the CRC polynomial.
constexpr std::array<uint32_t, 64> powers_of_two() {
    std::array<uint32_t, 64> out = {};
    uint32_t power = ONE >> 1;
    for (auto & each : out) {
        each  = power;
        power = product(power, power);
    }
    return out;
}

constexpr std::array<uint32_t, 64> SQUARES = powers_of_two();

constexpr uint32_t power_of_x(uint64_t exponent) {
    uint32_t power = ONE;
    for (int i = 0; exponent != 0; i++, exponent >>= 1) {
        if (exponent & 1) {
            power = product(power, SQUARES[i]);
        }
    }
    return power;
}

// TABLES[n][byte] is the CRC remainder of the byte followed by n zero bytes.
using tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr tables make_tables() {
    tables out = {};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        }
        out[0][byte] = crc;
    }
    for (size_t n = 1; n < out.size(); n++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            out[n][byte] = out[n - 1][byte] >> 8 ^ out[0][out[n - 1][byte] & 255];
        }
    }
    return out;
}

constexpr tables TABLES = make_tables();

uint64_t load64(const uint8_t * at) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) {
        value |= (uint64_t) at[i] << (8 * i);
    }
    return value;
}

// Extends a CRC by n bytes, eight at a time with lookup tables. Does not complement the CRC at the start and at the
// end.
uint32_t by_tables(uint32_t crc, const uint8_t * data, uint64_t n) {
    for (; n >= 8; n -= 8, data += 8) {
        const uint64_t word = load64(data) ^ crc;
        crc = 0;
        for (int i = 0; i < 8; i++) {
            crc ^= TABLES[7 - i][word >> (8 * i) & 255];
        }
    }
    for (; n > 0; n--, data++) {
        crc = crc >> 8 ^ TABLES[0][(crc ^ *data) & 255];
    }
    return crc;
}

#if defined(__x86_64__)

constexpr uint64_t LANES_BYTES = 64;

// Returns the constant with which fold() multiplies one half of a 16-byte lane, to move the half by this many bits. It
// stands for x^(bits + 64) for the first 8 bytes, and for x^bits for the last 8 bytes. The exponents in the code are
// lower by 32: a polynomial in the low half of a 64-bit word stands for itself times x^32. The shift by one bit is
// needed because carry-less products of reversed bits are one bit too low.
constexpr uint64_t forward(uint64_t bits, bool first) { return (uint64_t) power_of_x(first ? bits + 32 : bits - 32) << 1; }

__attribute__((target("pclmul,sse4.1"))) __m128i fold(__m128i lane, __m128i by, __m128i next) {
    const __m128i first  = _mm_clmulepi64_si128(lane, by, 0x00);
    const __m128i second = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

// Extends a CRC by n bytes with carry-less multiplications. n must be a positive multiple of 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(uint32_t crc, const uint8_t * data, uint64_t n) {
    constexpr uint64_t ALL_1 = forward(512, true), ALL_2 = forward(512, false);
    constexpr uint64_t ONE_1 = forward(128, true), ONE_2 = forward(128, false);
    const __m128i all = _mm_set_epi64x(ALL_2, ALL_1);
    const __m128i one = _mm_set_epi64x(ONE_2, ONE_1);
    const auto * at = reinterpret_cast<const __m128i *>(data);
    __m128i a = _mm_xor_si128(_mm_loadu_si128(at), _mm_cvtsi32_si128((int) crc));
    __m128i b = _mm_loadu_si128(at + 1), c = _mm_loadu_si128(at + 2), d = _mm_loadu_si128(at + 3);
    for (n -= LANES_BYTES, at += 4; n > 0; n -= LANES_BYTES, at += 4) {
        a = fold(a, all, _mm_loadu_si128(at));
        b = fold(b, all, _mm_loadu_si128(at + 1));
        c = fold(c, all, _mm_loadu_si128(at + 2));
        d = fold(d, all, _mm_loadu_si128(at + 3));
    }
    uint8_t left[16];
    _mm_storeu_si128(reinterpret_cast<__m128i *>(left), fold(fold(fold(a, one, b), one, c), one, d));
    return by_tables(0, left, sizeof(left));
}

#endif

}  // namespace

uint32_t moe_edge_crc32(uint32_t crc, const void * data, uint64_t n) {
    const auto * at = static_cast<const uint8_t *>(data);
    crc = ~crc;
#if defined(__x86_64__)
    static const bool multiplies = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    const uint64_t most = multiplies ? n / LANES_BYTES * LANES_BYTES : 0;
    if (most > 0) {
        crc = by_products(crc, at, most);
        at += most;
        n  -= most;
    }
#endif
    return ~by_tables(crc, at, n);
}

uint32_t moe_edge_crc32_before(uint32_t crc, uint64_t n) { return product(power_of_x(8 * n), crc); }
