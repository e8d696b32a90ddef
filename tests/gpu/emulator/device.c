/* Devices and their properties, errors, and kernels: a kernel of torch's own that is launched is an
 * error, because nobody computes it. Operators come from operators.cpp. */
#define _GNU_SOURCE
#include "emulator.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#undef cudaGetDeviceProperties

static __thread int device;
static __thread cudaError_t last;
static cudaError_t sticky;

static struct {
    int count, numbers[MOST_DEVICES]; /* those of the machine, from 1 */
    bool mig;
} visible;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

/* Whether a word of CUDA_VISIBLE_DEVICES is the number, from 1, of a device, or its UUID, which may
 * be shortened. */
static bool names(const char *word, size_t length, int number) {
    char digits[8], uuid[64] = "GPU-";
    snprintf(digits, sizeof digits, "%d", number - 1);
    if (visible.mig)
        strcpy(uuid, "MIG-");
    for (int i = 0; i < 16; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        snprintf(uuid + strlen(uuid), 4, "%s%02x", dash, number);
    }
    bool is_number = !visible.mig && length == strlen(digits) && !strncmp(word, digits, length);
    return is_number || (length > 4 && !strncmp(word, uuid, length));
}

/* The devices of the machine, or those that CUDA_VISIBLE_DEVICES names up to the first word that
 * names none. A process sees one slice of a GPU. */
static void look(void) {
    const char *text = getenv("HPCTRAIN_EMULATED_GPUS"), *mig = getenv("HPCTRAIN_EMULATED_MIG");
    const char *word = getenv("CUDA_VISIBLE_DEVICES");
    int there = text ? atoi(text) : 1;
    visible.mig = mig && *mig;
    there = there < 0 ? 0 : there > MOST_DEVICES ? MOST_DEVICES : there;
    for (int number = 1; !word && number <= there; number++)
        visible.numbers[visible.count++] = number;
    while (word && visible.count < MOST_DEVICES) {
        size_t length = strcspn(word, ",");
        int number = there;
        while (number && !names(word, length, number))
            number--;
        if (!number)
            break;
        visible.numbers[visible.count++] = number;
        word = word[length] ? word + length + 1 : NULL;
    }
    if (visible.mig && visible.count)
        visible.count = 1;
}

int device_count(void) {
    pthread_once(&looked, look);
    return visible.count;
}

/* That of a whole GPU, which its slices share. */
static int bus_of(int chosen) { return visible.mig ? 1 : visible.numbers[chosen]; }

int current_device(void) { return device; }

int exchange_device(int chosen) {
    int before = device;
    device = chosen;
    return before;
}

/* ---- contexts: a process has one on every device that was the current one of a call ---- */

static _Atomic unsigned contexts; /* a bit for each device */

bool has_context(int chosen) { return contexts >> chosen & 1; }

unsigned emulator_contexts(void) { return contexts; }

void use_context(const char *call) {
    unsigned before = atomic_fetch_or(&contexts, 1u << device);
    if (before && !(before >> device & 1))
        fprintf(stderr, "emulated GPU: %s creates a context on GPU %d, too\n", call, device);
}

/* Every call and pair of devices is printed once. Callers hold the lock. */
void check_device(int used, const char *call) {
    static struct {
        const char *call;
        int used, current;
    } printed[64];
    static size_t count;
    if (used == device)
        return;
    emulator_counters[OTHER_DEVICE]++;
    for (size_t i = 0; i < count; i++)
        if (printed[i].call == call && printed[i].used == used && printed[i].current == device)
            return;
    if (count == sizeof printed / sizeof *printed)
        return;
    printed[count].call = call;
    printed[count].used = used;
    printed[count++].current = device;
    fprintf(stderr, "emulated GPU: %s uses GPU %d, and its thread's current device is GPU %d\n",
            call, used, device);
}

cudaError_t told(cudaError_t code) {
    if (code)
        last = code;
    return code;
}

cudaError_t failed(void) { return emulator_forked ? cudaErrorInitializationError : sticky; }

void emulator_fail(const char *words) {
    fprintf(stderr, "emulated GPU: a kernel failed: %s\n", words);
    sticky = cudaErrorAssert;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t code = last;
    last = cudaSuccess;
    return code;
}

cudaError_t cudaPeekAtLastError(void) { return last; }

static const struct {
    cudaError_t code;
    const char *name, *words;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not initiated in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

static size_t place_of(cudaError_t code) {
    size_t count = sizeof errors / sizeof *errors, i = 0;
    while (i < count && errors[i].code != code)
        i++;
    return i < count ? i : 1;
}

const char *cudaGetErrorString(cudaError_t code) { return errors[place_of(code)].words; }

const char *cudaGetErrorName(cudaError_t code) { return errors[place_of(code)].name; }

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = device_count();
    return told(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *found) {
    *found = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int chosen) {
    if (chosen < 0 || chosen >= device_count())
        return told(cudaErrorInvalidDevice);
    device = chosen;
    use_context(__func__);
    return told(failed());
}

enum { WARP = 32, MULTIPROCESSORS = 4, THREADS = 1024, SHARED = 49152, MAJOR = 9, MINOR = 0 };
enum { HERTZ = 1000000000 };

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int chosen) {
    if (chosen < 0 || chosen >= device_count())
        return told(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, visible.mig ? "Emulated GPU MIG 1g.16gb" : "Emulated GPU");
    p->totalGlobalMem = DEVICE_BYTES;
    p->major = MAJOR;
    p->minor = MINOR;
    p->multiProcessorCount = MULTIPROCESSORS;
    p->warpSize = WARP;
    p->maxThreadsPerBlock = THREADS;
    p->maxThreadsPerMultiProcessor = 2 * THREADS;
    p->sharedMemPerBlock = p->sharedMemPerBlockOptin = SHARED;
    p->sharedMemPerMultiprocessor = 2 * SHARED;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxGridSize[0] = p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = p->maxThreadsDim[2] = THREADS;
    p->l2CacheSize = 1 << 20;
    p->unifiedAddressing = 1;
    p->pciBusID = bus_of(chosen);
    memset(&p->uuid, visible.numbers[chosen], sizeof p->uuid);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int chosen) {
    (void)chosen;
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? MAJOR
             : attribute == cudaDevAttrMultiProcessorCount    ? MULTIPROCESSORS
             : attribute == cudaDevAttrWarpSize               ? WARP
             : attribute == cudaDevAttrMaxThreadsPerBlock     ? THREADS
             : attribute == cudaDevAttrMaxSharedMemoryPerBlock ? SHARED
                                                              : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int chosen) {
    snprintf(text, (size_t)length, "0000:%02x:00.0", bus_of(chosen));
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int own, int other) {
    *can = own != other;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned flags) {
    (void)other, (void)flags;
    return cudaSuccess;
}

static cudaError_t give_version(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { return give_version(version); }

cudaError_t cudaRuntimeGetVersion(int *version) { return give_version(version); }

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (found)
        *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(
    const char *name, void **function, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, found);
}

/* ---- kernels of libraries: known by name, never computed ---- */

static struct {
    const void *function;
    const char *name;
} *kernels;
static size_t kernel_count, kernel_space;

void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

char __cudaInitModule(void **handle) {
    (void)handle;
    return 0;
}

void __cudaRegisterVar(void) {}

/* Called while libraries are loaded, by one thread. */
void __cudaRegisterFunction(void **handle, const char *function, char *name) {
    (void)handle;
    if (kernel_count == kernel_space)
        kernels = realloc(kernels, (kernel_space = 2 * kernel_space + 1024) * sizeof *kernels);
    kernels[kernel_count].function = function;
    kernels[kernel_count++].name = name;
}

static void spin(void *data) {
    int64_t cycles = *(int64_t *)data;
    nanosleep(&(struct timespec){cycles / HERTZ, cycles % HERTZ}, NULL);
}

/* torch.cuda._sleep is the one kernel of torch's own that does something here. */
static cudaError_t launch(const void *function, void **arguments, cudaStream_t stream) {
    const char *name = "?";
    for (size_t i = 0; i < kernel_count; i++)
        if (kernels[i].function == function)
            name = kernels[i].name;
    if (strstr(name, "spin_kernel")) {
        int64_t *cycles = malloc(sizeof *cycles);
        *cycles = *(int64_t *)arguments[0];
        return emulator_launch(stream, spin, free, cycles);
    }
    fprintf(stderr, "emulated GPU: nobody computes the kernel %s\n", name);
    return told(cudaErrorNotSupported);
}

static __thread cudaStream_t pushed; /* of the launch that follows */

cudaError_t __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, cudaStream_t stream) {
    (void)g, (void)b, (void)shared;
    pushed = stream;
    return cudaSuccess;
}

cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *shared, void *stream) {
    (void)shared;
    *(cudaStream_t *)stream = pushed;
    *g = *b = (dim3){1, 1, 1};
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    (void)g, (void)b, (void)shared;
    return launch(kernel, arguments, stream);
}

cudaError_t cudaLaunchKernel(
    const void *function, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    (void)g, (void)b, (void)shared;
    return launch(function, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(function, arguments, config->stream);
}

cudaError_t emulator_unwritten(const char *name) {
    fprintf(stderr, "emulated GPU: nobody has written %s\n", name);
    return told(cudaErrorNotSupported);
}
