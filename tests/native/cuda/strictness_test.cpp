// Errors that a GPU or its driver would not allow, made on purpose on the emulated one. Each runs
// in its own process. The emulation aborts with a message, or the program itself checks for the
// later effect.
//
//   strictness_test ACT      "list" prints all names
//
// Exit status 0: the program's own check detected the error.

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

extern "C" void moe_emu_set_delay_us(uint64_t most);

namespace {

void right(cudaError_t status) {
    if (status != cudaSuccess) {
        printf("a valid call failed: %s\n", cudaGetErrorString(status));
        exit(3);
    }
}

void noticed(bool is) { exit(is ? 0 : 4); }

int * on_device(size_t n = 64) {
    int * memory = nullptr;
    right(cudaMalloc(&memory, n * sizeof(int)));
    return memory;
}

cudaStream_t new_stream(unsigned int flags = cudaStreamNonBlocking) {
    cudaStream_t s = nullptr;
    right(cudaStreamCreateWithFlags(&s, flags));
    return s;
}

cudaEvent_t new_event() {
    cudaEvent_t e = nullptr;
    right(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}

cudaStream_t captured(cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed, unsigned int flags = cudaStreamNonBlocking) {
    cudaStream_t s = new_stream(flags);
    right(cudaStreamBeginCapture(s, mode));
    return s;
}

void store(int * to, int value, cudaStream_t s) {
    moe_emu::config(1, 1, 0, s).of("store", [](int * p, int v) { *p = v; })(to, value);
}

const std::map<std::string, std::function<void()>> ACTS = {
    // address spaces
    { "host-reads-device", [] { volatile int * p = on_device(); (void) *p; } },
    { "kernel-gets-pageable", [] { store(new int[4], 1, new_stream()); } },
    { "kernel-gets-other-device", [] {
        int * there = on_device();
        right(cudaSetDevice(1));
        store(there, 1, new_stream());
    } },
    { "copy-leaves-allocation", [] {
        std::vector<int> from(128);
        cudaMemcpy(on_device(64), from.data(), 128 * sizeof(int), cudaMemcpyHostToDevice);
    } },
    { "copy-from-two-pieces", [] {
        char * host = static_cast<char *>(aligned_alloc(4096, 8192));
        right(cudaHostRegister(host, 4096, 0));
        right(cudaHostRegister(host + 4096, 4096, 0));
        cudaMemcpyAsync(on_device(2048), host, 8192, cudaMemcpyHostToDevice, new_stream());
    } },
    { "misaligned-load", [] {
        int * p = on_device();
        cudaStream_t s = new_stream();
        moe_emu::config(1, 1, 0, s).of("load", [](int * at) { const volatile int4 v = *reinterpret_cast<int4 *>(at + 1); (void) v; })(p);
        cudaStreamSynchronize(s);
    } },
    { "write-past-the-end", [] {
        int * p = on_device(64);
        cudaStream_t s = new_stream();
        moe_emu::config(1, 1, 0, s).of("past", [](int * at) { at[64] = 0; })(p);
        right(cudaStreamSynchronize(s));
        cudaFree(p);
    } },
    // the current device of a thread
    { "kernel-in-other-stream", [] {
        cudaStream_t s = new_stream();
        right(cudaSetDevice(1));
        store(on_device(), 1, s);
    } },
    { "event-in-other-stream", [] {
        cudaEvent_t e = new_event();
        right(cudaSetDevice(1));
        cudaEventRecord(e, new_stream());
    } },
    { "new-thread-asks", [] {
        right(cudaSetDevice(1));
        cudaEvent_t e = new_event();
        right(cudaEventRecord(e, new_stream()));
        std::thread([e] { cudaEventQuery(e); }).join();
    } },
    // time
    { "late-pageable-copy", [] {  // a reader in another stream reads too early
        moe_emu_set_delay_us(2000);
        int * p = on_device(1);
        int * seen = nullptr;
        right(cudaMallocHost(&seen, sizeof(int)));
        cudaStream_t s = new_stream();
        for (int value = 7; value < 57; value++) {  // after a short stop of the program, the read may come late
            right(cudaMemcpy(p, &value, sizeof(int), cudaMemcpyHostToDevice));
            moe_emu::config(1, 1, 0, s).of("look", [](int * from, int * to) { *to = *from; })(p, seen);
            right(cudaStreamSynchronize(s));
            if (*seen != value) {
                noticed(true);
            }
        }
        noticed(false);
    } },
    { "not-ready-stays", [] {
        moe_emu_set_delay_us(0);
        cudaStream_t s = new_stream();
        std::atomic<bool> asked { false };
        right(cudaLaunchHostFunc(s, [](void * asked) {
            while (!*static_cast<std::atomic<bool> *>(asked)) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }, &asked));
        cudaEvent_t e = new_event();
        right(cudaEventRecord(e, s));
        const bool stays = cudaEventQuery(e) == cudaErrorNotReady && cudaGetLastError() == cudaErrorNotReady && cudaGetLastError() == cudaSuccess;
        asked = true;
        right(cudaStreamSynchronize(s));
        noticed(stays);
    } },
    { "sticky-error", [] {  // of the first kernel
        cudaStream_t s = new_stream();
        int * p = on_device();
        store(p, 1, s);
        const bool first = cudaStreamSynchronize(s) == cudaErrorIllegalAddress;
        int * more = nullptr;
        noticed(first && cudaMalloc(&more, 4) == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress &&
                cudaGetLastError() == cudaErrorIllegalAddress && cudaMemcpyAsync(p, p + 8, 4, cudaMemcpyDeviceToDevice, s) == cudaErrorIllegalAddress);
    } },
    { "blocks-in-order", [] {  // code that relies on the order is wrong in one of a few launches
        int * order = nullptr;
        right(cudaMallocHost(&order, 17 * sizeof(int)));
        bool other = false;
        for (int i = 0; i < 4; i++) {
            order[16] = 0;
            cudaStream_t s = new_stream();
            moe_emu::config(16, 1, 0, s).of("blocks", [](int * at) { at[atomicAdd(at + 16, 1)] = blockIdx.x; })(order);
            right(cudaStreamSynchronize(s));
            for (int b = 0; b < 16; b++) {
                other = other || order[b] != b;
            }
        }
        noticed(other);
    } },
    { "blocks-one-at-a-time", [] {  // a block sees writes of another block between two barriers
        int * count = nullptr;
        right(cudaMallocHost(&count, 2 * sizeof(int)));
        count[0] = count[1] = 0;
        cudaStream_t s = new_stream();
        moe_emu::config(64, 32, 0, s).of("turns", [](int * at) {
            const int before = at[0];
            __syncthreads();
            if (threadIdx.x == 0) {
                at[0] = before + 1;
                atomicAdd(at + 1, 1);
            }
        })(count);
        right(cudaStreamSynchronize(s));
        noticed(count[1] == 64 && count[0] < 64);
    } },
    { "atomic-in-two", [] {  // a read and a write are not atomic, with or without a barrier between them
        int * count = nullptr;
        right(cudaMallocHost(&count, 2 * sizeof(int)));
        count[0] = count[1] = 0;
        cudaStream_t s = new_stream();
        moe_emu::config(64, 1, 0, s).of("halves", [](int * at) { atomicExch(at, atomicAdd(at, 0) + 1); atomicAdd(at + 1, 1); })(count);
        right(cudaStreamSynchronize(s));
        noticed(count[1] == 64 && count[0] < 64);
    } },
    { "shared-memory-unset", [] {
        bool * nan = nullptr;
        right(cudaMallocHost(&nan, 2 * sizeof(bool)));
        nan[0] = nan[1] = false;
        cudaStream_t s = new_stream();
        moe_emu::config(16, 1, 0, s).of("unset", [](bool * at) {
            struct first { float value; };
            struct second { float value; };
            for (float * of : { &moe_emu::of_block<first>().value, &moe_emu::of_block<second>().value }) {
                at[of == &moe_emu::of_block<second>().value] = *of != *of;
                *of = 1.0f;
            }
        })(nan);
        right(cudaStreamSynchronize(s));
        noticed(nan[0] && nan[1]);
    } },
    { "too-much-shared-memory", [] {
        struct all { char bytes[48 << 10]; };
        struct more { char byte; };
        cudaStream_t s = new_stream();
        moe_emu::config(1, 1, 0, s).of("much", [](int) { moe_emu::of_block<all>(); moe_emu::of_block<more>(); })(0);
        cudaStreamSynchronize(s);
    } },
    // while a stream is captured
    { "captured-stream-waited-for", [] { cudaStreamSynchronize(captured()); } },
    { "captured-stream-asked", [] { cudaStreamQuery(captured()); } },
    { "captured-device-waited-for", [] { captured(); cudaDeviceSynchronize(); } },
    { "captured-event-asked", [] {
        cudaEvent_t e = new_event();
        right(cudaEventRecord(e, captured()));
        cudaEventQuery(e);
    } },
    { "captured-event-waited-for", [] {
        cudaEvent_t e = new_event();
        right(cudaEventRecord(e, captured()));
        cudaEventSynchronize(e);
    } },
    { "capture-waits-for-outside", [] {
        cudaEvent_t e = new_event();
        right(cudaEventRecord(e, new_stream()));
        cudaStreamWaitEvent(captured(), e);
    } },
    { "captured-pageable-copy", [] {
        static int value = 1;
        cudaStream_t s = captured();
        cudaMemcpyAsync(on_device(), &value, sizeof(int), cudaMemcpyHostToDevice, s);
    } },
    { "captured-copy-back", [] {
        static int value = 1;
        int * p = on_device();
        cudaMemcpyAsync(&value, p, sizeof(int), cudaMemcpyDeviceToHost, captured());
    } },
    { "allocation-while-captured", [] { captured(cudaStreamCaptureModeGlobal); on_device(); } },
    { "free-while-captured", [] { int * p = on_device(); captured(cudaStreamCaptureModeThreadLocal); cudaFree(p); } },
    { "pinning-while-captured", [] {
        captured(cudaStreamCaptureModeGlobal);
        cudaHostRegister(aligned_alloc(4096, 4096), 4096, 0);
    } },
    { "blocking-copy-while-captured", [] {
        int * p = on_device();
        int value = 1;
        captured(cudaStreamCaptureModeGlobal);
        cudaMemcpy(p, &value, sizeof(int), cudaMemcpyHostToDevice);
    } },
    { "default-stream-while-captured", [] {
        int * p = on_device();
        captured(cudaStreamCaptureModeRelaxed, cudaStreamDefault);
        store(p, 1, nullptr);
    } },
    { "default-stream-captured", [] { cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed); } },
    { "captured-twice", [] { cudaStreamBeginCapture(captured(), cudaStreamCaptureModeRelaxed); } },
    { "capture-that-nobody-began", [] { cudaGraph_t g; cudaStreamEndCapture(new_stream(), &g); } },
    { "captured-stream-destroyed", [] { cudaStreamDestroy(captured()); } },
    // these must work
    { "blocks-share-nothing", [] {
        int * wrong = nullptr;
        right(cudaMallocHost(&wrong, sizeof(int)));
        *wrong = 0;
        cudaStream_t s = new_stream();
        moe_emu::config(dim3(9, 3, 2), 64, 64 * sizeof(int), s).of("own", [](int * at) {
            struct mine { int value[64]; };
            auto & named = moe_emu::of_block<mine>().value;
            int * dynamic = static_cast<int *>(moe_emu::dynamic_shared());
            const int block = blockIdx.x + 100 * blockIdx.y + 10000 * blockIdx.z, other = (threadIdx.x + 37) % 64;
            named[threadIdx.x] = dynamic[threadIdx.x] = 64 * block + threadIdx.x;
            __syncthreads();
            const bool same = block == int(blockIdx.x + 100 * blockIdx.y + 10000 * blockIdx.z);
            atomicAdd(at, !same || named[other] != 64 * block + other || dynamic[other] != named[other]);
        })(wrong);
        right(cudaStreamSynchronize(s));
        noticed(*wrong == 0);
    } },
    { "relaxed-capture-allows", [] {
        cudaStream_t s = captured();
        int * p = on_device();
        store(p, 1, s);
        cudaGraph_t g;
        cudaGraphExec_t e;
        right(cudaStreamEndCapture(s, &g));
        right(cudaGraphInstantiate(&e, g, nullptr, nullptr, 0));
        right(cudaGraphLaunch(e, s));
        int value = 0;
        right(cudaMemcpyAsync(&value, p, sizeof(int), cudaMemcpyDeviceToHost, s));
        right(cudaStreamSynchronize(s));
        noticed(value == 1);
    } },
};

}  // namespace

int main(int argc, char ** argv) {
    const std::string name = argc > 1 ? argv[1] : "list";
    if (name == "list") {
        for (const auto & act : ACTS) {
            printf("%s\n", act.first.c_str());
        }
        return 0;
    }
    ACTS.at(name)();
    return 5;  // not detected
}
