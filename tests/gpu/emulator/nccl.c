/* A stand-in for NCCL (libnccl.so.2) and RCCL (librccl.so.1) between processes of one host.
 *
 *     gcc -O1 -shared -fPIC -pthread -Wl,-soname,libnccl.so.2 -o libnccl.so.2 nccl.c -ldl -lrt
 *     gcc ... -Wl,-soname,librccl.so.1 -o librccl.so.1 nccl.c ...
 *
 * The unique id names a segment of POSIX shared memory with one ring of bytes for every pair of
 * ranks. A call is queued on its stream by cudaLaunchHostFunc where the process has one (the
 * emulated CUDA runtime), after the communicator's earlier calls on whatever stream, as NCCL does;
 * where it has none, on plain host memory, it is done at once. It may run on any thread.
 *
 * Refused as by NCCL: two ranks with one GPU, memory that is not of the communicator's GPU,
 * a group end without its start. A peer that died or does not answer for EMULATED_NCCL_SECONDS
 * (60) gives ncclRemoteError, at once or as the asynchronous error. Functions of NCCL that are not
 * written here answer ncclInternalError (the list at the end is what libtorch_cuda.so refers to);
 * names that are in neither may be made to answer anything.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define VERSION 22907
#define RING 65536 /* bytes under way from one rank to another */
#define MOST 16    /* ranks */
#define MARK 90

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE,
       REMOTE_ERROR };
typedef int Result;
typedef struct { char name[128]; } Id;
typedef struct {
    _Atomic uint64_t written, read; /* bytes so far */
    char bytes[RING];
} Ring;
typedef struct {
    _Atomic int joined, failed, pids[MOST];
    char gpus[MOST][64];
    Ring rings[]; /* [from * size + to] */
} Shared;
typedef struct {
    Shared *shared;
    int rank, size, device;
    void *event; /* after the latest call */
    _Atomic int error, aborted;
} Comm;
typedef struct { /* one way of bytes between this rank and a peer */
    char *bytes;
    size_t left;
    int peer, receives;
} Way;
typedef struct Call {
    Comm *comm;
    void *stream;
    enum { ALLREDUCE, SEND, RECV } what;
    char *from, *to;
    size_t count;
    int type, peer;
    struct Call *next;
} Call;

static char last_error[512];
static _Thread_local int depth;
static _Thread_local Result group_error;
static _Thread_local Call *group_first, *group_last;

static Result fail(Result code, const char *text, ...) {
    va_list values;
    va_start(values, text);
    vsnprintf(last_error, sizeof last_error, text, values);
    va_end(values);
    if (depth && !group_error) group_error = code;
    return code;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static double limit(void) {
    const char *text = getenv("EMULATED_NCCL_SECONDS");
    return text ? atof(text) : 60;
}

/* The CUDA runtime of this process, as far as there is one. */
#define CUDA(name, ...) int (*name)(__VA_ARGS__) = dlsym(RTLD_DEFAULT, #name)

static int current_device(void) {
    CUDA(cudaGetDevice, int *);
    int device = 0;
    if (cudaGetDevice) cudaGetDevice(&device);
    return device;
}

static void use_device(int device) {
    CUDA(cudaSetDevice, int);
    if (cudaSetDevice) cudaSetDevice(device);
}

static Result check_memory(Comm *comm, const void *place, size_t bytes) {
    CUDA(cudaPointerGetAttributes, void *, const void *);
    struct { int type, device; void *pointers[2]; long reserved[16]; } found = {0};
    if (!cudaPointerGetAttributes || !bytes) return SUCCESS;
    int code = cudaPointerGetAttributes(&found, place);
    if (code || found.type != 2 || found.device != comm->device)
        return fail(INVALID_ARGUMENT, "%p is not memory of GPU %d (type %d, GPU %d)", place,
                    comm->device, found.type, found.device);
    return SUCCESS;
}

/* Dead, or dead and not yet waited for by its parent. */
static int is_gone(int pid) {
    char path[32], text[512], *end;
    if (kill(pid, 0)) return errno == ESRCH;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[n] = 0;
    end = strrchr(text, ')');
    return end && end[1] && end[2] == 'Z';
}

/* Why to give up waiting: a peer failed or died, this rank aborted, nothing came for too long. */
static Result lost(Comm *comm, double since) {
    Shared *shared = comm->shared;
    if (comm->aborted) return fail(INTERNAL_ERROR, "rank %d aborted", comm->rank);
    if (shared->failed) return fail(REMOTE_ERROR, "another rank failed");
    for (int rank = 0; rank < comm->size; rank++) {
        int pid = shared->pids[rank];
        if (pid && is_gone(pid))
            return fail(REMOTE_ERROR, "rank %d (process %d) is gone", rank, pid);
    }
    if (seconds() - since > limit())
        return fail(REMOTE_ERROR, "no answer from a peer for %.0f s", limit());
    return SUCCESS;
}

/* Move what can be moved; how many bytes that were. */
static size_t progress(Comm *comm, Way *way) {
    int from = way->receives ? way->peer : comm->rank, to = way->receives ? comm->rank : way->peer;
    Ring *ring = &comm->shared->rings[from * comm->size + to];
    uint64_t done = way->receives ? ring->read : ring->written;
    size_t there = ring->written - ring->read, can = way->receives ? there : RING - there;
    size_t n = can < way->left ? can : way->left, to_end = RING - done % RING;
    n = n < to_end ? n : to_end;
    if (!n) return 0;
    if (way->receives) {
        memcpy(way->bytes, ring->bytes + done % RING, n);
        ring->read = done + n;
    } else {
        memcpy(ring->bytes + done % RING, way->bytes, n);
        ring->written = done + n;
    }
    way->bytes += n;
    way->left -= n;
    return n;
}

/* All ways at once. Those of one pair in one direction go one after another. */
static Result move(Comm *comm, Way *ways, int many) {
    double since = seconds();
    for (long idle = 0;; idle++) {
        size_t moved = 0, left = 0;
        char busy[MOST][2] = {{0}};
        for (int i = 0; i < many; i++) {
            char *taken = &busy[ways[i].peer][ways[i].receives];
            if (ways[i].left && !*taken) moved += progress(comm, &ways[i]);
            if (ways[i].left) *taken = 1;
            left += ways[i].left;
        }
        if (!left) return SUCCESS;
        if (moved) { since = seconds(); idle = 0; continue; }
        if (idle < 50) { sched_yield(); continue; }
        Result code = lost(comm, since);
        if (code) return code;
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
}

static size_t width(int type) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? bytes[type] : 0;
}

/* In the order of ranks, so that all have the same bits. */
static void add(char *sum, const char *more, size_t count, int type) {
    for (size_t i = 0; i < count; i++)
        if (type == 7) ((float *)sum)[i] += ((const float *)more)[i];
        else if (type == 8) ((double *)sum)[i] += ((const double *)more)[i];
        else if (type == 4) ((int64_t *)sum)[i] += ((const int64_t *)more)[i];
        else ((int32_t *)sum)[i] += ((const int32_t *)more)[i];
}

static Result allreduce(Call *call) {
    Comm *comm = call->comm;
    size_t wide = width(call->type), most = RING / wide;
    char *received = malloc((size_t)comm->size * RING);
    Result code = SUCCESS;
    for (size_t first = 0; first < call->count && !code; first += most) {
        size_t n = call->count - first < most ? call->count - first : most, bytes = n * wide;
        Way ways[2 * MOST];
        int many = 0;
        for (int peer = 0; peer < comm->size; peer++) {
            char *place = received + (size_t)peer * RING;
            if (peer == comm->rank) memcpy(place, call->from + first * wide, bytes);
            else {
                ways[many++] = (Way){call->from + first * wide, bytes, peer, 0};
                ways[many++] = (Way){place, bytes, peer, 1};
            }
        }
        code = move(comm, ways, many);
        if (code) break;
        for (int rank = 1; rank < comm->size; rank++)
            add(received, received + (size_t)rank * RING, n, call->type);
        memcpy(call->to + first * wide, received, bytes);
    }
    free(received);
    return code;
}

static Result exchange(Call *calls) {
    int many = 0;
    for (Call *call = calls; call; call = call->next) many++;
    Way *ways = calloc(many + 1, sizeof *ways);
    Call *sent = NULL;
    many = 0;
    for (Call *call = calls; call; call = call->next) {
        size_t bytes = call->count * width(call->type);
        if (call->what == ALLREDUCE) continue;
        if (call->peer != call->comm->rank) {
            int receives = call->what == RECV;
            ways[many++] = (Way){receives ? call->to : call->from, bytes, call->peer, receives};
        } else if (!sent) sent = call;
        else { /* to itself: the other half of the pair */
            Call *out = sent->what == SEND ? sent : call, *in = sent->what == SEND ? call : sent;
            memmove(in->to, out->from, bytes);
            sent = NULL;
        }
    }
    Result code = sent ? fail(INVALID_USAGE, "a send to itself without its receive")
                       : move(calls->comm, ways, many);
    free(ways);
    return code;
}

/* What the stream runs: the calls of one group and communicator. */
static void work(Call *calls, int queued) {
    Call *next;
    Comm *comm = calls->comm;
    Result code = comm->error;
    for (Call *call = calls; call && !code; call = call->next)
        if (call->what == ALLREDUCE) code = allreduce(call);
    if (!code) code = exchange(calls);
    if (code) {
        comm->error = code;
        comm->shared->failed = 1;
        /* As a kernel of NCCL: nothing after it on the stream is done before an abort. */
        for (double since = seconds(); queued && !comm->aborted && seconds() - since < limit();)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    for (Call *call = calls; call; call = next) {
        next = call->next;
        free(call);
    }
}

static void run(void *data) { work(data, 1); }

static Result launch(Call *calls) {
    CUDA(cudaLaunchHostFunc, void *, void (*)(void *), void *);
    CUDA(cudaStreamWaitEvent, void *, void *, unsigned);
    CUDA(cudaEventRecord, void *, void *);
    Comm *comm = calls->comm;
    void *stream = calls->stream;
    if (!cudaLaunchHostFunc) {
        work(calls, 0);
        return comm->error;
    }
    int before = current_device();
    use_device(comm->device);
    int code = cudaStreamWaitEvent(stream, comm->event, 0);
    if (!code) code = cudaLaunchHostFunc(stream, run, calls);
    if (!code) code = cudaEventRecord(comm->event, stream);
    use_device(before);
    return code ? fail(CUDA_ERROR, "the CUDA runtime refused the call (%d)", code) : SUCCESS;
}

static Result queue(Call call) {
    Comm *comm = call.comm;
    size_t bytes = call.count * width(call.type);
    if (!comm) return fail(INVALID_ARGUMENT, "no communicator");
    if (comm->aborted) return fail(INVALID_USAGE, "the communicator was aborted");
    if (!width(call.type) || (call.what == ALLREDUCE && (width(call.type) < 4)))
        return fail(INVALID_ARGUMENT, "data type %d is not played", call.type);
    if (call.peer < 0 || call.peer >= comm->size)
        return fail(INVALID_ARGUMENT, "peer %d of %d ranks", call.peer, comm->size);
    Result code = call.what == RECV ? SUCCESS : check_memory(comm, call.from, bytes);
    if (!code && call.what != SEND) code = check_memory(comm, call.to, bytes);
    if (code) return code;
    Call *kept = malloc(sizeof *kept);
    *kept = call;
    kept->next = NULL;
    if (!depth) return launch(kept);
    if (group_first && (group_first->comm != comm || group_first->stream != call.stream))
        return fail(INVALID_USAGE, "a group of several communicators or streams is not played");
    if (group_first) group_last->next = kept;
    else group_first = kept;
    group_last = kept;
    return SUCCESS;
}

Result ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }

const char *ncclGetErrorString(Result code) {
    static const char *texts[] = {
        "no error", "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage", "remote process exited or there was a network error"};
    return code >= 0 && code < 7 ? texts[code] : "unknown result code";
}

const char *ncclGetLastError(Comm *comm) { (void)comm; return last_error; }

Result ncclGetUniqueId(Id *id) {
    static _Atomic int number;
    memset(id, 0, sizeof *id);
    id->name[sizeof id->name - 1] = MARK; /* comes back only where all of it is passed on */
    snprintf(id->name, sizeof id->name - 1, "/emulated-nccl-%d-%d-%lx", getpid(), number++,
             (long)(seconds() * 1e6));
    return SUCCESS;
}

static Result join(Comm *comm, const char *name) {
    Shared *shared = comm->shared;
    CUDA(cudaDeviceGetPCIBusId, char *, int, int);
    char *gpu = shared->gpus[comm->rank];
    if (cudaDeviceGetPCIBusId) cudaDeviceGetPCIBusId(gpu, 64, comm->device);
    shared->pids[comm->rank] = getpid();
    shared->joined++;
    for (double since = seconds(); shared->joined < comm->size;) {
        Result code = lost(comm, since);
        if (code) return code;
        nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    shm_unlink(name); /* by now all have it */
    for (int a = 0; a < comm->size; a++)
        for (int b = 0; b < a && *shared->gpus[a]; b++)
            if (!strcmp(shared->gpus[a], shared->gpus[b]))
                return fail(INVALID_USAGE,
                            "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s",
                            b, a, shared->gpus[a]);
    return SUCCESS;
}

Result ncclCommInitRank(Comm **made, int size, Id id, int rank) {
    CUDA(cudaEventCreateWithFlags, void **, unsigned);
    if (size < 1 || size > MOST || rank < 0 || rank >= size)
        return fail(INVALID_ARGUMENT, "rank %d of %d", rank, size);
    if (id.name[sizeof id.name - 1] != MARK)
        return fail(INVALID_ARGUMENT, "this is no unique id, or not all of it");
    size_t bytes = sizeof(Shared) + sizeof(Ring) * size * size;
    int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, bytes)) return fail(SYSTEM_ERROR, "%s: %s", id.name, strerror(errno));
    Comm *comm = calloc(1, sizeof *comm);
    comm->shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return fail(SYSTEM_ERROR, "mmap: %s", strerror(errno));
    comm->rank = rank, comm->size = size, comm->device = current_device();
    if (cudaEventCreateWithFlags) cudaEventCreateWithFlags(&comm->event, 2 /* no timing */);
    Result code = join(comm, id.name);
    if (code) shm_unlink(id.name);
    else *made = comm;
    return code;
}

/* Nothing is freed: calls may still be queued on streams. */
Result ncclCommAbort(Comm *comm) { comm->aborted = 1; comm->shared->failed = 1; return SUCCESS; }
Result ncclCommDestroy(Comm *comm) { (void)comm; return SUCCESS; }
Result ncclCommFinalize(Comm *comm) { (void)comm; return SUCCESS; }
Result ncclCommCount(Comm *comm, int *count) { *count = comm->size; return SUCCESS; }
Result ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
Result ncclCommGetAsyncError(Comm *comm, Result *found) { *found = comm->error; return SUCCESS; }

Result ncclGroupStart(void) {
    if (!depth++) group_error = SUCCESS;
    return SUCCESS;
}

Result ncclGroupEnd(void) {
    if (!depth) return fail(INVALID_USAGE, "ncclGroupEnd: not in a group call.");
    if (--depth) return SUCCESS;
    Call *calls = group_first;
    group_first = NULL;
    return group_error || !calls ? group_error : launch(calls);
}

Result ncclAllReduce(void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    if (op) return fail(INVALID_ARGUMENT, "reduction %d is not played", op);
    return queue((Call){comm, stream, ALLREDUCE, from, to, count, type, 0, NULL});
}

Result ncclSend(void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return queue((Call){comm, stream, SEND, from, NULL, count, type, peer, NULL});
}

Result ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return queue((Call){comm, stream, RECV, NULL, to, count, type, peer, NULL});
}

#define ABSENT(name) Result name(void) { return fail(INTERNAL_ERROR, #name " is not played"); }
ABSENT(ncclAllGather) ABSENT(ncclAlltoAll) ABSENT(ncclBcast) ABSENT(ncclBroadcast)
ABSENT(ncclCommDeregister) ABSENT(ncclCommInitAll) ABSENT(ncclCommInitRankConfig)
ABSENT(ncclCommInitRankScalable) ABSENT(ncclCommMemStats) ABSENT(ncclCommRegister)
ABSENT(ncclCommResume) ABSENT(ncclCommShrink) ABSENT(ncclCommSplit) ABSENT(ncclCommSuspend)
ABSENT(ncclCommWindowDeregister) ABSENT(ncclCommWindowRegister) ABSENT(ncclDevCommCreate)
ABSENT(ncclDevCommDestroy) ABSENT(ncclGetLsaMultimemDevicePointer)
ABSENT(ncclGetPeerDevicePointer) ABSENT(ncclGroupSimulateEnd) ABSENT(ncclMemAlloc)
ABSENT(ncclMemFree) ABSENT(ncclPutSignal) ABSENT(ncclRedOpCreatePreMulSum)
ABSENT(ncclRedOpDestroy) ABSENT(ncclReduce) ABSENT(ncclReduceScatter) ABSENT(ncclSignal)
ABSENT(ncclWaitSignal)
