// Lets Transformer Engine's library ask cuDNN for attention kernels on a machine without a GPU.
//
// Loaded with LD_PRELOAD. Queries of the CUDA runtime answer as a device of compute capability CAPABILITY / 10.
// cuDNN needs a handle, and so a device, to finalize a graph; given a description of a device instead (its
// backend attributes DEVICEPROP), it decides without one. Only calls that Transformer Engine looks up with dlsym
// are replaced: cuDNN's own code runs unchanged. libcuda.so.1 becomes the stub of `ask.py`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*lookup_t)(void *, const char *);
typedef void *(*open_t)(const char *, int);
typedef int (*create_t)(int, void **);
typedef int (*set_t)(void *, int, int, int64_t, const void *);
typedef int (*finalize_t)(void *);

// Numbers of cudnn_backend_v9.h.
enum { ENGINE_HEURISTIC = 4, DEVICE_PROPERTIES = 38 };
enum { HEURISTIC_DEVICE = 204, PLAN_HANDLE = 400, PLAN_DEVICE = 407, GRAPH_HANDLE = 800, DEVICE_JSON = 2702 };
enum { TYPE_DESCRIPTOR = 15, TYPE_CHAR = 24 };

static void *real(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.34");
    return found ? found : dlvsym(RTLD_NEXT, name, "GLIBC_2.2.5");
}

static void *cudnn(const char *name) {
    static void *library;
    if (!library) library = dlopen("libcudnn_graph.so.9", RTLD_NOW | RTLD_GLOBAL);
    return ((lookup_t)real("dlsym"))(library, name);
}

static int capability(void) {
    const char *value = getenv("CAPABILITY");
    return value ? atoi(value) : 90;
}

static int called_from(void *address, const char *library) {
    Dl_info info;
    return dladdr(address, &info) && info.dli_fname && strstr(info.dli_fname, library);
}

// ---- the CUDA runtime: one device

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { (void)device; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    *stream = (void *)1;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(void **event, unsigned flags) {
    (void)flags;
    *event = (void *)1;
    return cudaSuccess;
}

// Sizes of an H100; the kernels of a generation are chosen by its capability.
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    (void)device;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "a described device");
    properties->major = capability() / 10;
    properties->minor = capability() % 10;
    properties->multiProcessorCount = 132;
    properties->totalGlobalMem = 85029158912ULL;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 232448;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)device;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

static int driver_success(void) { return 0; }
static int driver_device(int *device) { *device = 0; return 0; }
static int driver_context(void **context) { *context = (void *)1; return 0; }
static int driver_count(int *count) { *count = 1; return 0; }
static int driver_version(int *version) { *version = 13000; return 0; }
static int driver_attribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    (void)version, (void)flags;
    *function = driver_success;
    if (!strcmp(name, "cuCtxGetDevice") || !strcmp(name, "cuDeviceGet")) *function = driver_device;
    if (!strcmp(name, "cuCtxGetCurrent")) *function = driver_context;
    if (!strcmp(name, "cuDeviceGetAttribute")) *function = driver_attribute;
    if (!strcmp(name, "cuDeviceGetCount")) *function = driver_count;
    if (!strcmp(name, "cuDriverGetVersion")) *function = driver_version;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ---- cuDNN: a described device where Transformer Engine passes a handle

int cudnnCreate(void **handle) { *handle = (void *)1; return 0; }
int cudnnSetStream(void *handle, void *stream) { (void)handle, (void)stream; return 0; }

static void *described_device(void) {
    static void *device;
    if (device) return device;
    char json[2048];
    int size = snprintf(
        json, sizeof json,
        "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,"
        "\"multiProcessorCount\":132,\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,"
        "\"maxSharedMemoryPerBlockOptin\":232448,\"reservedSharedMemoryPerBlock\":1024,"
        "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
        "\"pciDeviceId\":9008,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":85029158912,"
        "\"smClockRateKHz\":1980000,\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800,\"cudaDeviceId\":0,"
        "\"deviceVer\":%d,\"driverVer\":13000,\"deviceName\":\"a described device\"}",
        capability() * 10);
    int failed = ((create_t)cudnn("cudnnBackendCreateDescriptor"))(DEVICE_PROPERTIES, &device);
    failed |= ((set_t)cudnn("cudnnBackendSetAttribute"))(device, DEVICE_JSON, TYPE_CHAR, size, json);
    failed |= ((finalize_t)cudnn("cudnnBackendFinalize"))(device);
    if (failed) {
        fprintf(stderr, "cuDNN does not take the description of the device\n");
        exit(3);
    }
    return device;
}

static int create_descriptor(int type, void **descriptor) {
    int failed = ((create_t)cudnn("cudnnBackendCreateDescriptor"))(type, descriptor);
    if (!failed && type == ENGINE_HEURISTIC) {
        void *device = described_device();
        ((set_t)cudnn("cudnnBackendSetAttribute"))(*descriptor, HEURISTIC_DEVICE, TYPE_DESCRIPTOR, 1, &device);
    }
    return failed;
}

static int set_attribute(void *descriptor, int attribute, int type, int64_t count, const void *values) {
    set_t set = (set_t)cudnn("cudnnBackendSetAttribute");
    if (attribute == GRAPH_HANDLE) return 0;
    if (attribute == PLAN_HANDLE) {
        void *device = described_device();
        return set(descriptor, PLAN_DEVICE, TYPE_DESCRIPTOR, 1, &device);
    }
    return set(descriptor, attribute, type, count, values);
}

void *dlsym(void *library, const char *name) {
    if (library != RTLD_NEXT && called_from(__builtin_return_address(0), "libtransformer_engine")) {
        if (!strcmp(name, "cudnnBackendCreateDescriptor")) return create_descriptor;
        if (!strcmp(name, "cudnnBackendSetAttribute")) return set_attribute;
        if (!strcmp(name, "cudaGetDevice")) return cudaGetDevice;
        if (!strncmp(name, "cudaGetDeviceProperties", 23)) return cudaGetDeviceProperties;
        if (!strcmp(name, "cudaDeviceGetAttribute")) return cudaDeviceGetAttribute;
    }
    return ((lookup_t)real("dlsym"))(library, name);
}

void *dlopen(const char *name, int flags) {
    open_t open = (open_t)real("dlopen");
    int is_driver = name && !strncmp(name, "libcuda.so", 10);
    if (is_driver && called_from(__builtin_return_address(0), "libcudnn_graph")) {
        return open(getenv("DRIVER_STUB"), flags);
    }
    return open(name, flags);
}
