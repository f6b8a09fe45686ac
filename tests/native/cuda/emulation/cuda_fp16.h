// Implements half precision with float arithmetic. Each operation is rounded to nearest even, as by
// the hardware's half instructions.

#pragma once

#include "cuda_runtime.h"

namespace moe_emu {

inline uint16_t to_half_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) {
        return sign | 0x7fff;
    }
    if (u >= 0x477ff000) {
        return sign | 0x7c00;  // rounds to infinity
    }
    if (u < 0x38800000) {  // subnormal: the addition rounds at the right bit
        float a, magic;
        const uint32_t m = 126u << 23;
        memcpy(&a, &u, 4);
        memcpy(&magic, &m, 4);
        a += magic;
        memcpy(&u, &a, 4);
        return sign | (u - m);
    }
    u += 0xfff + (u >> 13 & 1);
    return sign | ((u - 0x38000000) >> 13);
}

inline float from_half_bits(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    uint32_t u;
    if (exponent == 0) {
        const float f = static_cast<float>(fraction) * (1.0f / 16777216.0f);
        memcpy(&u, &f, 4);
        u |= sign;
    } else {
        u = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

}  // namespace moe_emu

struct __half {
    uint16_t bits;
    __half() = default;
    template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
    __half(T value) : bits(moe_emu::to_half_bits(static_cast<float>(value))) {}
    operator float() const { return moe_emu::from_half_bits(bits); }
};
using half = __half;

struct alignas(4) __half2 {
    half x, y;
    __half2() = default;
    __half2(half x, half y) : x(x), y(y) {}
};
using half2 = __half2;

inline half operator+(half a, half b) { return half(float(a) + float(b)); }
inline half operator-(half a, half b) { return half(float(a) - float(b)); }
inline half operator*(half a, half b) { return half(float(a) * float(b)); }
inline half operator/(half a, half b) { return half(float(a) / float(b)); }
inline half & operator+=(half & a, half b) { return a = a + b; }
inline half & operator-=(half & a, half b) { return a = a - b; }
inline half & operator*=(half & a, half b) { return a = a * b; }
inline half operator-(half a) { a.bits ^= 0x8000; return a; }
inline half2 operator+(half2 a, half2 b) { return { a.x + b.x, a.y + b.y }; }
inline half2 operator-(half2 a, half2 b) { return { a.x - b.x, a.y - b.y }; }
inline half2 operator*(half2 a, half2 b) { return { a.x * b.x, a.y * b.y }; }
inline half2 operator/(half2 a, half2 b) { return { a.x / b.x, a.y / b.y }; }
inline half2 & operator+=(half2 & a, half2 b) { return a = a + b; }
inline half2 & operator-=(half2 & a, half2 b) { return a = a - b; }
inline half2 & operator*=(half2 & a, half2 b) { return a = a * b; }

inline half  __float2half(float f) { return half(f); }
inline half  __float2half_rn(float f) { return half(f); }
inline float __half2float(half h) { return h; }
inline half2 __float2half2_rn(float f) { return { half(f), half(f) }; }
inline half2 __floats2half2_rn(float a, float b) { return { half(a), half(b) }; }
inline half2 __float22half2_rn(float2 f) { return { half(f.x), half(f.y) }; }
inline float2 __half22float2(half2 h) { return { h.x, h.y }; }
inline half2 __halves2half2(half a, half b) { return { a, b }; }
inline half2 __half2half2(half a) { return { a, a }; }
inline half2 make_half2(half a, half b) { return { a, b }; }
inline half  __low2half(half2 h) { return h.x; }
inline half  __high2half(half2 h) { return h.y; }
inline float __low2float(half2 h) { return h.x; }
inline float __high2float(half2 h) { return h.y; }
inline half  __hadd(half a, half b) { return a + b; }
inline half  __hsub(half a, half b) { return a - b; }
inline half  __hmul(half a, half b) { return a * b; }
inline half  __hmax(half a, half b) { return half(fmaxf(a, b)); }
inline half  __hmin(half a, half b) { return half(fminf(a, b)); }
inline bool  __hisinf(half a) { return (a.bits & 0x7fff) == 0x7c00; }
inline half2 __hadd2(half2 a, half2 b) { return a + b; }
inline half2 __hsub2(half2 a, half2 b) { return a - b; }
inline half2 __hmul2(half2 a, half2 b) { return a * b; }
inline half  __hfma(half a, half b, half c) { return half(fmaf(a, b, c)); }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return { __hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y) }; }
inline half2 __hmax2(half2 a, half2 b) { return { __hmax(a.x, b.x), __hmax(a.y, b.y) }; }
inline half  hexp(half a) { return half(expf(a)); }
inline half2 h2exp(half2 a) { return { hexp(a.x), hexp(a.y) }; }
inline unsigned short __half_as_ushort(half h) { return h.bits; }
inline half __ushort_as_half(unsigned short u) { half h; h.bits = u; return h; }
