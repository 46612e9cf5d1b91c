// A CUDA runtime whose device is the host's memory and whose streams are always done: every call completes at once.
#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "launch.h"

#pragma weak turbomind_cpu_kernel

namespace {

constexpr int kOk = 0;
constexpr int kInvalidValue = 1;
constexpr int kSMs = 80;
constexpr size_t kFreeBytes = size_t{512} << 20;  // the engine really allocates its cache from what is free
constexpr size_t kAlignment = 512;
constexpr int kUninitialised = 0xCD;  // read before it was written, device memory gives NaN-like noise
constexpr int kDeviceMemory = 2;
constexpr int kMajorAttribute = 75, kMinorAttribute = 76, kSMsAttribute = 16;

struct Device {
    std::mutex mutex;
    std::unordered_map<const void*, std::string> kernels;  // host stub -> mangled name
    std::map<uintptr_t, size_t> ranges;                    // device memory: begin -> bytes
};

Device& device() {
    static Device* instance = new Device;  // outlives the static destructors of the engine
    return *instance;
}

// Compute capability times ten: `TURBOMIND_CPU_SM`, 80 where unset.
int capability() {
    const char* text = std::getenv("TURBOMIND_CPU_SM");
    return text ? std::atoi(text) : 80;
}

int allocate(void** pointer, size_t bytes) {
    const size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;
    *pointer = std::aligned_alloc(kAlignment, rounded);
    require(*pointer, "no memory for an allocation", std::to_string(bytes).c_str());
    std::memset(*pointer, kUninitialised, rounded);
    std::lock_guard lock(device().mutex);
    device().ranges[reinterpret_cast<uintptr_t>(*pointer)] = rounded;
    return kOk;
}

int release(void* pointer) {
    std::lock_guard lock(device().mutex);
    device().ranges.erase(reinterpret_cast<uintptr_t>(pointer));
    std::free(pointer);
    return kOk;
}

bool on_device(const void* pointer) {
    std::lock_guard lock(device().mutex);
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = device().ranges.upper_bound(address);
    if (after == device().ranges.begin()) {
        return false;
    }
    const auto [begin, bytes] = *--after;
    return address < begin + bytes;
}

int some_handle(void** handle) {
    static char anything;
    *handle = &anything;
    return kOk;
}

template <class T>
void put(void* record, size_t offset, T value) {
    std::memcpy(static_cast<char*>(record) + offset, &value, sizeof value);
}

std::string demangled(const std::string& name) {
    char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
    std::string result = text ? std::string(text) + " [" + name + "]" : name;
    std::free(text);
    return result;
}

// Into the file that `TURBOMIND_CPU_TRACE` names, if it is set: a launch a line.
void note(const std::string& name) {
    static const char* const path = std::getenv("TURBOMIND_CPU_TRACE");
    static std::FILE* const trace = path ? std::fopen(path, "a") : nullptr;
    if (trace) {
        std::fprintf(trace, "%s\n", name.c_str());
        std::fflush(trace);
    }
}

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local Configuration configuration;

}  // namespace

extern "C" {

// ---- kernels

void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
    std::lock_guard lock(device().mutex);
    device().kernels[host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}

int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void** stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *stream = configuration.stream;
    return kOk;
}

int cudaLaunchKernel(const void* host, dim3 grid, dim3, void** args, size_t, void*) {
    std::string name;
    {
        std::lock_guard lock(device().mutex);
        const auto found = device().kernels.find(host);
        require(found != device().kernels.end(), "a kernel was launched that nobody registered", "unnamed");
        name = found->second;
    }
    const Kernel kernel = turbomind_cpu_kernel ? turbomind_cpu_kernel(name.c_str()) : nullptr;
    require(kernel, "no CPU version of the kernel", demangled(name).c_str());
    note(name);
    kernel(Launch{name.c_str(), grid, args});
    return kOk;
}

int cudaLaunchKernelExC(const void*, const void* host, void**) {
    std::lock_guard lock(device().mutex);
    const auto found = device().kernels.find(host);
    const auto name = found == device().kernels.end() ? std::string("unnamed") : demangled(found->second);
    refuse("kernels with launch attributes have no CPU version", name.c_str());
}

// sizes as of CUDA 12's cudaFuncAttributes
int cudaFuncGetAttributes(void* attributes, const void*) {
    std::memset(attributes, 0, 144);
    put(attributes, 24, 1024);  // maxThreadsPerBlock
    put(attributes, 28, 64);    // numRegs
    put(attributes, 32, 80);    // ptxVersion
    put(attributes, 36, 80);    // binaryVersion
    return kOk;
}

int cudaFuncSetAttribute(const void*, int, int) { return kOk; }

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return kOk;
}

int cudaOccupancyMaxActiveClusters(int* clusters, const void*, const void*) {
    *clusters = 2;
    return kOk;
}

// ---- the device

int cudaGetDevice(int* index) {
    *index = 0;
    return kOk;
}

int cudaGetDeviceCount(int* count) {
    *count = 1;
    return kOk;
}

int cudaSetDevice(int) { return kOk; }
int cudaDeviceSynchronize() { return kOk; }

int cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return kOk;
}

int cudaDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case kMajorAttribute:
            *value = capability() / 10;
            return kOk;
        case kMinorAttribute:
            *value = capability() % 10;
            return kOk;
        case kSMsAttribute:
            *value = kSMs;
            return kOk;
    }
    refuse("cudaDeviceGetAttribute was asked for an attribute that has no answer", std::to_string(attribute).c_str());
}

// cudaDeviceProp of CUDA 12
int cudaGetDeviceProperties_v2(void* properties, int) {
    std::memset(properties, 0, 1032);
    std::strcpy(static_cast<char*>(properties), "turbomind_cpu");
    put(properties, 288, size_t{16} << 30);  // totalGlobalMem
    put(properties, 296, size_t{48} << 10);  // sharedMemPerBlock
    put(properties, 304, 65536);             // regsPerBlock
    put(properties, 308, 32);                // warpSize
    put(properties, 320, 1024);              // maxThreadsPerBlock
    put(properties, 336, 2147483647);        // maxGridSize
    put(properties, 340, 65535);
    put(properties, 344, 65535);
    put(properties, 348, 1400000);            // clockRate, kHz
    put(properties, 360, capability() / 10);  // major
    put(properties, 364, capability() % 10);  // minor
    put(properties, 388, kSMs);               // multiProcessorCount
    put(properties, 608, 1200000);            // memoryClockRate, kHz
    put(properties, 612, 5120);               // memoryBusWidth, bits
    put(properties, 616, 40 << 20);           // l2CacheSize
    put(properties, 624, 2048);               // maxThreadsPerMultiProcessor
    put(properties, 640, size_t{164} << 10);  // sharedMemPerMultiprocessor
    put(properties, 648, 65536);              // regsPerMultiprocessor
    put(properties, 696, size_t{163} << 10);  // sharedMemPerBlockOptin
    return kOk;
}

int cudaGetDriverEntryPoint(const char*, void** function, unsigned long long, int* status) {
    *function = nullptr;
    *status = 1;  // cudaDriverEntryPointSymbolNotFound
    return kOk;
}

// ---- errors: there are none

const char* cudaGetErrorName(int) { return "turbomind_cpu"; }
const char* cudaGetErrorString(int) { return "the stand-in CUDA runtime reports no errors"; }
int cudaGetLastError() { return kOk; }
int cudaPeekAtLastError() { return kOk; }

// ---- memory

int cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
int cudaMallocAsync(void** pointer, size_t bytes, void*) { return allocate(pointer, bytes); }
int cudaMallocFromPoolAsync(void** pointer, size_t bytes, void*, void*) { return allocate(pointer, bytes); }
int cudaFree(void* pointer) { return release(pointer); }
int cudaFreeAsync(void* pointer, void*) { return release(pointer); }

int cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    *pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
    return *pointer ? kOk : 2;
}

int cudaFreeHost(void* pointer) {
    std::free(pointer);
    return kOk;
}

int cudaMemGetInfo(size_t* free, size_t* total) {
    *free = *total = kFreeBytes;
    return kOk;
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int) {
    std::memmove(to, from, bytes);
    return kOk;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void*) {
    return cudaMemcpy(to, from, bytes, kind);
}

int cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) { return cudaMemcpy(to, from, bytes, 0); }

int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t rows, int,
                      void*) {
    for (size_t row = 0; row < rows; ++row) {
        std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * pitch, width);
    }
    return kOk;
}

int cudaMemset(void* pointer, int value, size_t bytes) {
    std::memset(pointer, value, bytes);
    return kOk;
}

int cudaMemsetAsync(void* pointer, int value, size_t bytes, void*) { return cudaMemset(pointer, value, bytes); }

int cudaMemPoolCreate(void** pool, const void*) { return some_handle(pool); }
int cudaDeviceGetDefaultMemPool(void** pool, int) { return some_handle(pool); }
int cudaMemPoolSetAttribute(void*, int, void*) { return kOk; }
int cudaMemPoolTrimTo(void*, size_t) { return kOk; }
int cudaMemPoolDestroy(void*) { return kOk; }

int cudaPointerGetAttributes(void* attributes, const void* pointer) {
    if (!pointer) {
        return kInvalidValue;
    }
    const bool ours = on_device(pointer);
    put(attributes, 0, ours ? kDeviceMemory : 0);
    put(attributes, 4, 0);
    put(attributes, 8, ours ? pointer : nullptr);
    put(attributes, 16, pointer);
    return kOk;
}

// ---- streams and events

int cudaStreamCreateWithFlags(void** stream, unsigned) { return some_handle(stream); }
int cudaStreamCreateWithPriority(void** stream, unsigned, int) { return some_handle(stream); }
int cudaStreamDestroy(void*) { return kOk; }
int cudaStreamSynchronize(void*) { return kOk; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return kOk; }
int cudaEventCreate(void** event) { return some_handle(event); }
int cudaEventCreateWithFlags(void** event, unsigned) { return some_handle(event); }
int cudaEventDestroy(void*) { return kOk; }
int cudaEventRecord(void*, void*) { return kOk; }
int cudaEventSynchronize(void*) { return kOk; }

int cudaEventElapsedTime(float* milliseconds, void*, void*) {
    *milliseconds = 1;
    return kOk;
}

}  // extern "C"
