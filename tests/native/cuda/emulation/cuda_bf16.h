// bfloat16 of the emulation

#pragma once

#include "cuda_fp16.h"

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>> __nv_bfloat16(T value) {
        const float f = static_cast<float>(value);
        uint32_t u;
        memcpy(&u, &f, 4);
        bits = (u & 0x7fffffff) > 0x7f800000 ? (u >> 16 | 64) : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
    operator float() const {
        const uint32_t u = static_cast<uint32_t>(bits) << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
};
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
    nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
using nv_bfloat162 = __nv_bfloat162;

inline float  __bfloat162float(nv_bfloat16 v) { return v; }
inline nv_bfloat16 __float2bfloat16(float v) { return nv_bfloat16(v); }
inline nv_bfloat16 __float2bfloat16_rn(float v) { return nv_bfloat16(v); }
inline float2 __bfloat1622float2(nv_bfloat162 v) { return { v.x, v.y }; }
inline nv_bfloat162 __float22bfloat162_rn(float2 v) { return { nv_bfloat16(v.x), nv_bfloat16(v.y) }; }
inline float  __low2float(nv_bfloat162 v) { return v.x; }
inline float  __high2float(nv_bfloat162 v) { return v.y; }
inline nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return { x, y }; }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return { x, y }; }
