/* Memory: that of a device is mapped apart, filled with NaNs, and gone when it is freed. */
#define _GNU_SOURCE
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NAN_BYTE = 0xff };

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks; /* by address */
static size_t block_count, block_space;
static size_t used[MOST_DEVICES];

/* The number of blocks that begin at or before an address. */
static size_t count_before(const void *address) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start <= (const char *)address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool find_block(const void *address, Block *found) {
    pthread_mutex_lock(&blocks_lock);
    size_t place = count_before(address);
    bool is_in = place && (const char *)address < blocks[place - 1].start + blocks[place - 1].length;
    if (is_in)
        *found = blocks[place - 1];
    pthread_mutex_unlock(&blocks_lock);
    return is_in;
}

static void add_block(Block block) {
    pthread_mutex_lock(&blocks_lock);
    if (block_count == block_space)
        blocks = realloc(blocks, (block_space = 2 * block_space + 64) * sizeof *blocks);
    size_t place = count_before(block.start);
    memmove(blocks + place + 1, blocks + place, (block_count++ - place) * sizeof *blocks);
    blocks[place] = block;
    if (block.type == cudaMemoryTypeDevice)
        used[block.device] += block.length;
    pthread_mutex_unlock(&blocks_lock);
}

static bool remove_block(const void *start, enum cudaMemoryType type, Block *found) {
    pthread_mutex_lock(&blocks_lock);
    size_t place = count_before(start);
    bool is_one = place && blocks[place - 1].start == start && blocks[place - 1].type == type;
    if (is_one) {
        *found = blocks[place - 1];
        memmove(blocks + place - 1, blocks + place, (block_count-- - place) * sizeof *blocks);
        if (type == cudaMemoryTypeDevice)
            used[found->device] -= found->length;
    }
    pthread_mutex_unlock(&blocks_lock);
    return is_one;
}

static cudaError_t allocate(void **pointer, size_t length, enum cudaMemoryType type) {
    int device = current_device();
    *pointer = NULL;
    if (!length)
        return cudaSuccess;
    if (type == cudaMemoryTypeDevice && used[device] + length > DEVICE_BYTES)
        return cudaErrorMemoryAllocation;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t mapped = (length + page - 1) / page * page + page; /* the last page stays closed */
    char *start = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED || mprotect(start, mapped - page, PROT_READ | PROT_WRITE))
        return cudaErrorMemoryAllocation;
    memset(start, NAN_BYTE, length);
    add_block((Block){start, length, mapped, device, type});
    *pointer = start;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t length) {
    enter();
    cudaError_t code = unsafe_in_capture_locked();
    emulator_counters[ALLOCATIONS]++;
    leave();
    return told(code ? code : allocate(pointer, length, cudaMemoryTypeDevice));
}

cudaError_t cudaHostAlloc(void **pointer, size_t length, unsigned flags) {
    (void)flags;
    enter();
    cudaError_t code = unsafe_in_capture_locked();
    emulator_counters[HOST_ALLOCATIONS]++;
    leave();
    return told(code ? code : allocate(pointer, length, cudaMemoryTypeHost));
}

cudaError_t cudaMallocHost(void **pointer, size_t length) {
    return cudaHostAlloc(pointer, length, 0);
}

/* Both wait for the device, as CUDA does. */
static cudaError_t give_back(void *pointer, enum cudaMemoryType type) {
    Block block;
    if (!pointer)
        return cudaSuccess;
    if (!find_block(pointer, &block) || block.start != pointer || block.type != type)
        return told(cudaErrorInvalidValue);
    enter();
    if (type == cudaMemoryTypeDevice)
        check_device(block.device, "cudaFree");
    cudaError_t code = unsafe_in_capture_locked();
    if (!code)
        finish_device_locked(block.device);
    emulator_counters[FREES]++;
    leave();
    if (!code && remove_block(pointer, type, &block))
        munmap(block.start, block.mapped);
    return told(code);
}

cudaError_t cudaFree(void *pointer) { return give_back(pointer, cudaMemoryTypeDevice); }

cudaError_t cudaFreeHost(void *pointer) { return give_back(pointer, cudaMemoryTypeHost); }

cudaError_t cudaHostRegister(void *pointer, size_t length, unsigned flags) {
    (void)flags;
    add_block((Block){pointer, length, 0, current_device(), cudaMemoryTypeHost});
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    Block block;
    bool was = remove_block(pointer, cudaMemoryTypeHost, &block);
    return told(was ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    use_context(__func__);
    *total = DEVICE_BYTES;
    *available = DEVICE_BYTES - used[current_device()];
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    Block block;
    memset(found, 0, sizeof *found);
    found->device = -2; /* cudaInvalidDeviceId */
    found->hostPointer = (void *)pointer;
    found->type = cudaMemoryTypeUnregistered;
    if (find_block(pointer, &block)) {
        found->type = block.type;
        found->device = block.device;
        found->devicePointer = (void *)pointer;
        found->hostPointer = block.type == cudaMemoryTypeDevice ? NULL : (void *)pointer;
    }
    return cudaSuccess;
}

/* ---- copies ---- */

typedef struct {
    char *to;
    const char *from;
    size_t length;
    char staged[];
} Copy;

static void do_copy(void *data) {
    Copy *copy = data;
    memmove(copy->to, copy->from, copy->length);
}

static enum cudaMemoryType type_of(const void *pointer) {
    Block block;
    return find_block(pointer, &block) ? block.type : cudaMemoryTypeUnregistered;
}

static void count_copy(bool from_device, bool to_device, size_t length) {
    int kind = from_device == to_device ? 2 : from_device ? 1 : 0;
    emulator_counters[COPIES_UP + kind]++;
    emulator_counters[BYTES_UP + kind] += length;
}

/* A copy is done with the host at once where CUDA says so: it reads pageable memory before it
 * returns, and has written such memory when it returns (CUDA Runtime API, "API synchronization
 * behavior"). Pinned memory is read and written when the stream comes to it. */
static cudaError_t copy(void *to, const void *from, size_t length, cudaStream_t handle, bool wait) {
    if (!length)
        return cudaSuccess;
    enum cudaMemoryType source = type_of(from), target = type_of(to);
    bool staged = source == cudaMemoryTypeUnregistered;
    Copy *data = malloc(sizeof *data + (staged ? length : 0));
    *data = (Copy){to, staged ? memcpy(data->staged, from, length) : from, length};
    Stream *stream;
    enter();
    count_copy(source == cudaMemoryTypeDevice, target == cudaMemoryTypeDevice, length);
    cudaError_t code = failed();
    if (!code && !stream_of(handle, &stream))
        code = cudaErrorInvalidResourceHandle;
    if (!code)
        check_device(stream->device, __func__);
    wait |= target == cudaMemoryTypeUnregistered;
    if (!code && wait)
        code = forbidden_in_capture_locked(stream);
    if (!code)
        code = enqueue_locked(stream, make_work(do_copy, free, data));
    emulator_counters[HOST_WAITS] += wait;
    if (!code && wait) {
        finish_locked(stream, stream->queued);
        code = failed();
    }
    leave();
    return told(code);
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t length, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    return copy(to, from, length, stream, false);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t length, enum cudaMemcpyKind kind) {
    (void)kind;
    return copy(to, from, length, cudaStreamLegacy, true);
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t length, cudaStream_t s) {
    (void)to_device, (void)from_device;
    return copy(to, from, length, s, false);
}

typedef struct {
    void *start;
    int value;
    size_t length;
} Fill;

static void do_fill(void *data) {
    Fill *fill = data;
    memset(fill->start, fill->value, fill->length);
}

static Work *make_fill(void *start, int value, size_t length) {
    Fill *fill = malloc(sizeof *fill);
    *fill = (Fill){start, value, length};
    return make_work(do_fill, free, fill);
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t length, cudaStream_t stream) {
    return told(enqueue(stream, make_fill(start, value, length)));
}

cudaError_t cudaMemset(void *start, int value, size_t length) {
    return cudaMemsetAsync(start, value, length, cudaStreamLegacy);
}

/* The default stream of a device has no handle of its own: the device tells which one it is. */
cudaError_t emulator_mark_freed(int device, cudaStream_t stream, void *start, size_t length) {
    Work *fill = make_fill(start, NAN_BYTE, length);
    int before = exchange_device(device);
    fill->at_once = true;
    cudaError_t code = enqueue(stream, fill);
    exchange_device(before);
    return code;
}
