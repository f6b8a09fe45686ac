// Implements CUDA's runtime for tests without a GPU. Kernels are compiled by g++, the threads of a
// block run as fibers, and each stream is a thread. emulation.cpp describes its checks. Only the
// functions that ggml-cuda and our executor use exist.

#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

// The emulated CUDA version. For this version, ggml does not use cub, fp8 and programmatic
// launches.
#define CUDART_VERSION 11040

#define __host__
#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_assume(condition)

// ---- types ----

#define MOE_EMU_VEC2(T, name, bytes) \
    struct alignas(bytes) name { T x, y; }; \
    inline name make_##name(T x, T y) { return { x, y }; }
#define MOE_EMU_VEC3(T, name) \
    struct name { T x, y, z; }; \
    inline name make_##name(T x, T y, T z) { return { x, y, z }; }
#define MOE_EMU_VEC4(T, name, bytes) \
    struct alignas(bytes) name { T x, y, z, w; }; \
    inline name make_##name(T x, T y, T z, T w) { return { x, y, z, w }; }

MOE_EMU_VEC2(signed char, char2, 2)
MOE_EMU_VEC2(unsigned char, uchar2, 2)
MOE_EMU_VEC2(short, short2, 4)
MOE_EMU_VEC2(unsigned short, ushort2, 4)
MOE_EMU_VEC2(int, int2, 8)
MOE_EMU_VEC2(unsigned int, uint2, 8)
MOE_EMU_VEC2(float, float2, 8)
MOE_EMU_VEC2(double, double2, 16)
MOE_EMU_VEC2(long long, longlong2, 16)
MOE_EMU_VEC3(signed char, char3)
MOE_EMU_VEC3(int, int3)
MOE_EMU_VEC3(unsigned int, uint3)
MOE_EMU_VEC3(float, float3)
MOE_EMU_VEC4(signed char, char4, 4)
MOE_EMU_VEC4(unsigned char, uchar4, 4)
MOE_EMU_VEC4(short, short4, 8)
MOE_EMU_VEC4(int, int4, 16)
MOE_EMU_VEC4(unsigned int, uint4, 16)
MOE_EMU_VEC4(float, float4, 16)

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorGraphExecUpdateFailure = 910,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999,
};

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault,
};

enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged,
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
};

enum cudaDeviceAttr {
    cudaDevAttrCooperativeLaunch,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrAsyncEngineCount,
    cudaDevAttrCanMapHostMemory,
    cudaDevAttrCanUseHostPointerForRegisteredMem,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
};

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed,
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated,
};

enum cudaGraphExecUpdateResult { cudaGraphExecUpdateSuccess };
struct cudaGraphExecUpdateResultInfo {
    cudaGraphExecUpdateResult result;
};

struct cudaDeviceProp {
    char   name[256];
    size_t totalGlobalMem;
    size_t sharedMemPerBlock;
    size_t sharedMemPerBlockOptin;
    size_t sharedMemPerMultiprocessor;
    int    warpSize;
    int    major, minor;
    int    multiProcessorCount;
    int    maxThreadsPerBlock;
    int    integrated;
    int    asyncEngineCount;
    int    canMapHostMemory;
    int    concurrentKernels;
    int    pciDomainID, pciBusID, pciDeviceID;
};

struct cudaPointerAttributes {
    cudaMemoryType type;
    int            device;
    void *         devicePointer;
    void *         hostPointer;
};

struct cudaFuncAttributes {
    int    ptxVersion;
    int    binaryVersion;
    size_t sharedSizeBytes;
    int    maxThreadsPerBlock;
    int    numRegs;
};

namespace moe_emu {
struct stream;
struct event;
struct graph;
struct graph_exec;
}

using cudaStream_t    = moe_emu::stream *;
using cudaEvent_t     = moe_emu::event *;
using cudaGraph_t     = moe_emu::graph *;
using cudaGraphExec_t = moe_emu::graph_exec *;
using cudaGraphNode_t = void *;
using cudaHostFn_t    = void (*)(void *);

#define cudaStreamLegacy    ((cudaStream_t) 1)
#define cudaStreamPerThread ((cudaStream_t) 2)

enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocDefault = 0,
    cudaHostAllocPortable = 1,
    cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4,
    cudaHostRegisterDefault = 0,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2,
    cudaHostRegisterReadOnly = 8,
    cudaDeviceScheduleSpin = 1,
};

// ---- host side ----

const char * cudaGetErrorString(cudaError_t error);
const char * cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int * count);
cudaError_t cudaGetDevice(int * device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaSetDeviceFlags(unsigned int flags);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp * prop, int device);
cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char * id, int length, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int * least, int * greatest);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceCanAccessPeer(int * can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
cudaError_t cudaDriverGetVersion(int * version);
cudaError_t cudaRuntimeGetVersion(int * version);

cudaError_t cudaMemGetInfo(size_t * free, size_t * total);
cudaError_t cudaMalloc(void ** memory, size_t bytes);
cudaError_t cudaMallocManaged(void ** memory, size_t bytes);
enum cudaMemoryAdvise { cudaMemAdviseSetReadMostly = 1, cudaMemAdviseSetPreferredLocation = 3 };
inline cudaError_t cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
cudaError_t cudaFree(void * memory);
cudaError_t cudaMallocHost(void ** memory, size_t bytes);
cudaError_t cudaHostAlloc(void ** memory, size_t bytes, unsigned int flags);
cudaError_t cudaFreeHost(void * memory);
cudaError_t cudaHostRegister(void * memory, size_t bytes, unsigned int flags);
cudaError_t cudaHostUnregister(void * memory);
cudaError_t cudaHostGetDevicePointer(void ** device, void * host, unsigned int flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes * out, const void * memory);

template <typename T> cudaError_t cudaMalloc(T ** memory, size_t bytes) { return cudaMalloc(reinterpret_cast<void **>(memory), bytes); }
template <typename T> cudaError_t cudaMallocHost(T ** memory, size_t bytes) { return cudaMallocHost(reinterpret_cast<void **>(memory), bytes); }
template <typename T> cudaError_t cudaHostAlloc(T ** memory, size_t bytes, unsigned int flags) { return cudaHostAlloc(reinterpret_cast<void **>(memory), bytes, flags); }
template <typename T> cudaError_t cudaHostGetDevicePointer(T ** device, void * host, unsigned int flags) { return cudaHostGetDevicePointer(reinterpret_cast<void **>(device), host, flags); }

cudaError_t cudaMemcpy(void * to, const void * from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeerAsync(void * to, int to_device, const void * from, int from_device, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void * to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void * to, int value, size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreate(cudaStream_t * stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned int flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t * stream, unsigned int flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void * argument);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus * status);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * graph);

cudaError_t cudaGraphInstantiate(cudaGraphExec_t * instance, cudaGraph_t graph, cudaGraphNode_t * error, char * log, size_t log_bytes);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t instance, cudaGraph_t graph, cudaGraphNode_t * error, cudaGraphExecUpdateResult * result);
cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance);

cudaError_t cudaEventCreate(cudaEvent_t * event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t from, cudaEvent_t to);

template <typename F> cudaError_t cudaFuncSetAttribute(F *, cudaFuncAttribute, int) { return cudaSuccess; }
template <typename F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * out, F *) {
    *out = {};
    out->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
template <typename F> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int * blocks, F *, int, size_t) {
    *blocks = 1;
    return cudaSuccess;
}
template <typename F> cudaError_t cudaLaunchCooperativeKernel(F *, dim3, dim3, void **, size_t, cudaStream_t) {
    return cudaErrorNotSupported;
}

// ---- launching ----

namespace moe_emu {

// Runs a kernel on the stream's thread. The function `thread` is called once for each thread of the
// grid.
void launch(const char * kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream, std::function<void()> thread);

// Aborts the process if a kernel on a real GPU could not follow this pointer.
void check_pointer(const char * kernel, const void * p);

template <typename T> void check_argument(const char * kernel, const T & argument) {
    if constexpr (std::is_pointer_v<T>) {
        check_pointer(kernel, argument);
    }
}

// Sets the name of the next kernel that this thread launches through ggml's wrapper.
void naming(const char * kernel);

template <typename F> struct prepared {
    const char * name;
    F call;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;

    template <typename... A> void operator()(A &&... arguments) const {
        std::tuple<std::decay_t<A>...> copies(std::forward<A>(arguments)...);
        std::apply([this](const auto &... each) { (check_argument(name, each), ...); }, copies);
        launch(name, grid, block, shared, stream, [call = call, copies] { std::apply(call, copies); });
    }
};

struct config {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;

    config(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr) : grid(grid), block(block), shared(shared), stream(stream) {}

    // call: runs one thread of the kernel
    template <typename F> prepared<F> of(const char * name, F call) const { return { name, call, grid, block, shared, stream }; }
};

}  // namespace moe_emu

// ---- device side ----

namespace moe_emu {

[[noreturn]] void no_ptx();
void * dynamic_shared();

// The offset of a shared variable in the memory of each block of a launch.
struct shared_place {
    uint64_t launch = 0;
    size_t   at     = 0;
};
void * named_shared(shared_place & place, size_t bytes, size_t align);

// Returns a shared variable of the running block. Each shared variable has its own type T (see
// preprocess.py).
template <typename T> T & of_block() {
    static shared_place place;
    return *static_cast<T *>(named_shared(place, sizeof(T), alignof(T)));
}

// Lets other threads and blocks run, sometimes.
void pause();

void   barrier();
int    barrier_count(int predicate);

// Synchronizes with the lanes of the warp in `mask`, and exchanges a value with them. The returned
// values of all lanes stay valid until this lane calls `meet` again. Lanes that have exited give a
// NaN pattern.
constexpr size_t WARP_VALUE = 16;
using warp_values = const unsigned char (*)[WARP_VALUE];
warp_values meet(int kind, unsigned int mask, const void * value, size_t bytes);
unsigned int lanes_met();
int lane();

enum { KIND_SHFL, KIND_SHFL_UP, KIND_SHFL_DOWN, KIND_SHFL_XOR, KIND_VOTE, KIND_SYNC };

template <typename T> T shuffle(int kind, unsigned int mask, T value, int source) {
    static_assert(sizeof(T) <= WARP_VALUE && std::is_trivially_copyable_v<T>);
    const warp_values values = meet(kind, mask, &value, sizeof(T));
    T result;
    memcpy(&result, values[source], sizeof(T));
    return result;
}

}  // namespace moe_emu

extern uint3 threadIdx, blockIdx;
extern dim3  blockDim, gridDim;
constexpr int warpSize = 32;

inline void __syncthreads() { moe_emu::barrier(); }
inline int  __syncthreads_or(int p) { return moe_emu::barrier_count(p != 0) > 0; }
inline int  __syncthreads_and(int p) { return moe_emu::barrier_count(p == 0) == 0; }
inline int  __syncthreads_count(int p) { return moe_emu::barrier_count(p != 0); }
inline void __syncwarp(unsigned int mask = 0xffffffff) { moe_emu::meet(moe_emu::KIND_SYNC, mask, nullptr, 0); }
inline void __threadfence() { moe_emu::pause(); }
inline void __threadfence_block() { moe_emu::pause(); }
inline void __threadfence_system() { moe_emu::pause(); }
[[noreturn]] inline void __trap() { abort(); }
inline long long clock64() { return 0; }
inline void __nanosleep(unsigned int) {}

template <typename T> T __shfl_sync(unsigned int mask, T v, int source, int width = 32) {
    const int base = moe_emu::lane() & ~(width - 1);
    return moe_emu::shuffle(moe_emu::KIND_SHFL, mask, v, base + (source & (width - 1)));
}
template <typename T> T __shfl_up_sync(unsigned int mask, T v, unsigned int delta, int width = 32) {
    const int lane = moe_emu::lane(), base = lane & ~(width - 1);
    const int source = lane - static_cast<int>(delta);
    return moe_emu::shuffle(moe_emu::KIND_SHFL_UP, mask, v, source < base ? lane : source);
}
template <typename T> T __shfl_down_sync(unsigned int mask, T v, unsigned int delta, int width = 32) {
    const int lane = moe_emu::lane(), end = (lane & ~(width - 1)) + width;
    const int source = lane + static_cast<int>(delta);
    return moe_emu::shuffle(moe_emu::KIND_SHFL_DOWN, mask, v, source >= end ? lane : source);
}
template <typename T> T __shfl_xor_sync(unsigned int mask, T v, int lane_mask, int width = 32) {
    const int lane = moe_emu::lane(), end = (lane & ~(width - 1)) + width;
    const int source = lane ^ lane_mask;
    return moe_emu::shuffle(moe_emu::KIND_SHFL_XOR, mask, v, source >= end ? lane : source);
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
    const int p = predicate != 0;
    const auto values = moe_emu::meet(moe_emu::KIND_VOTE, mask, &p, sizeof(p));
    const unsigned int met = moe_emu::lanes_met();
    unsigned int result = 0;
    for (int i = 0; i < 32; i++) {
        if (met >> i & 1) {
            int other;
            memcpy(&other, values[i], sizeof(other));
            result |= static_cast<unsigned int>(other) << i;
        }
    }
    return result;
}
inline int __any_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// Plain operations are enough for atomic functions, because fibers switch only at certain points. A
// switch may come before the operation.
template <typename T, typename U> T atomicAdd(T * p, U v) { moe_emu::pause(); const T old = *p; *p = old + static_cast<T>(v); return old; }
template <typename T, typename U> T atomicMax(T * p, U v) { moe_emu::pause(); const T old = *p; *p = std::max(old, static_cast<T>(v)); return old; }
template <typename T, typename U> T atomicMin(T * p, U v) { moe_emu::pause(); const T old = *p; *p = std::min(old, static_cast<T>(v)); return old; }
template <typename T, typename U> T atomicOr(T * p, U v) { moe_emu::pause(); const T old = *p; *p = old | static_cast<T>(v); return old; }
template <typename T, typename U> T atomicExch(T * p, U v) { moe_emu::pause(); const T old = *p; *p = static_cast<T>(v); return old; }
template <typename T, typename U, typename V> T atomicCAS(T * p, U compare, V v) {
    moe_emu::pause();
    const T old = *p;
    *p = old == static_cast<T>(compare) ? static_cast<T>(v) : old;
    return old;
}

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) {
    return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? a : b;
}
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) {
    return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? b : a;
}

template <typename T> T __ldg(const T * p) { return *p; }
template <typename T> T __ldcs(const T * p) { return *p; }

inline int __dp4a(int a, int b, int c) {
    int8_t x[4], y[4];
    memcpy(x, &a, 4);
    memcpy(y, &b, 4);
    return c + x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) { return static_cast<unsigned int>((static_cast<uint64_t>(a) * b) >> 32); }
inline int __popc(unsigned int v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned int>(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned int __brev(unsigned int v) {
    unsigned int r = 0;
    for (int i = 0; i < 32; i++) {
        r |= (v >> i & 1) << (31 - i);
    }
    return r;
}
inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned int result = 0;
    for (int i = 0; i < 4; i++) {
        const uint64_t byte = bytes >> 8 * (selector >> 4 * i & 7) & 0xff;
        result |= static_cast<unsigned int>(byte) << 8 * i;
    }
    return result;
}

namespace moe_emu {
template <typename T, typename F> unsigned int each_byte(unsigned int a, unsigned int b, F f) {
    T x[4], y[4], r[4];
    memcpy(x, &a, 4);
    memcpy(y, &b, 4);
    for (int i = 0; i < 4; i++) {
        r[i] = static_cast<T>(f(x[i], y[i]));
    }
    unsigned int result;
    memcpy(&result, r, 4);
    return result;
}
}  // namespace moe_emu

inline unsigned int __vsub4(unsigned int a, unsigned int b) { return moe_emu::each_byte<uint8_t>(a, b, [](int x, int y) { return x - y; }); }
inline unsigned int __vadd4(unsigned int a, unsigned int b) { return moe_emu::each_byte<uint8_t>(a, b, [](int x, int y) { return x + y; }); }
inline unsigned int __vsubss4(unsigned int a, unsigned int b) { return moe_emu::each_byte<int8_t>(a, b, [](int x, int y) { return std::clamp(x - y, -128, 127); }); }
inline unsigned int __vcmpeq4(unsigned int a, unsigned int b) { return moe_emu::each_byte<uint8_t>(a, b, [](int x, int y) { return x == y ? 0xff : 0; }); }
inline unsigned int __vcmpne4(unsigned int a, unsigned int b) { return moe_emu::each_byte<uint8_t>(a, b, [](int x, int y) { return x != y ? 0xff : 0; }); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline int   __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int   __float_as_int(float x) { int r; memcpy(&r, &x, 4); return r; }
inline unsigned int __float_as_uint(float x) { unsigned int r; memcpy(&r, &x, 4); return r; }
inline float __int_as_float(int x) { float r; memcpy(&r, &x, 4); return r; }
inline float __uint_as_float(unsigned int x) { float r; memcpy(&r, &x, 4); return r; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
