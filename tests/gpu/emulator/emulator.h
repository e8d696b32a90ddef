/* An emulated GPU: what the files of the stand-in runtime share.
 *
 *   device.c    devices, their properties, errors, kernel launches that nobody computes
 *   memory.c    allocations and copies
 *   stream.c    the calls on streams and events
 *   queue.c     the queue of every stream, its thread, and the order in which work is done
 *   capture.c   stream capture and graphs
 *
 * One lock guards all of it. Functions whose name ends in _locked want it held.
 */
#ifndef HPCTRAIN_EMULATOR_H
#define HPCTRAIN_EMULATOR_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

enum { MOST_DEVICES = 4 };
#define DEVICE_BYTES ((size_t)16 << 30)
typedef struct Stream Stream;
typedef struct Capture Capture;
typedef struct Graph Graph;

/* One piece of work in a stream's queue. */
typedef struct Work {
    struct Work *next;
    uint64_t number; /* its place in the stream, from 1 */
    void (*run)(void *data);
    void (*drop)(void *data); /* frees the data; NULL: there is nothing to free */
    void *data;
    Stream *awaited; /* NULL, or the stream that must have done its work up to `until` first */
    uint64_t until;
    bool may_block; /* a host function: it may wait for another process */
    bool at_once;   /* needs no demand: marks freed memory as soon as the stream comes to it */
} Work;

struct Stream {
    Stream *next;
    int device;
    bool blocking; /* takes turns with the legacy default stream of its device */
    Work *first, *last;
    uint64_t queued, allowed, done; /* numbers of work: the last queued, that may run, that ran */
    bool running, has_thread;
    uint64_t pace; /* how often it goes on in a random order */
    pthread_cond_t wake;
    Capture *capture;           /* NULL, or the capture that its work is recorded by */
    uint64_t captured, joined;  /* works of this capture: recorded; those the origin waits for */
    int polls;                  /* cudaStreamQuery in a row without success */
};

typedef struct Event {
    bool timing, recorded;
    int device;
    Stream *stream; /* where it was recorded last, after which work */
    uint64_t number;
    double seconds; /* when that was done */
    unsigned long long capture; /* id of the capture that recorded it; 0: none did */
    uint64_t captured;
    int references, polls;
} Event;

extern pthread_mutex_t emulator_lock;
extern bool emulator_forked;

/* queue.c */
bool stream_of(cudaStream_t handle, Stream **found); /* false: no such stream */
Stream *default_stream(int device);
Stream *all_streams(void);
Stream *add_stream(int device, bool blocking);
/* Takes the lock for a call of the host, which may let some work be done; NULL: no call of CUDA. */
void enter_call(const char *name);
#define enter() enter_call(__func__)
void leave(void);
Work *make_work(void (*run)(void *), void (*drop)(void *), void *data);
cudaError_t enqueue_call(const char *name, cudaStream_t handle, Work *work); /* enter, queue, leave */
#define enqueue(handle, work) enqueue_call(__func__, handle, work)
cudaError_t enqueue_locked(Stream *stream, Work *work);
void finish_locked(Stream *stream, uint64_t number); /* the host waits */
void finish_device_locked(int device);
bool has_finished_locked(Stream *stream, uint64_t number, int *polls);
double now(void);

/* capture.c */
cudaError_t capture_locked(Stream *stream, Work *work);
cudaError_t unsafe_in_capture_locked(void);     /* for calls that no capture allows */
cudaError_t forbidden_in_capture_locked(Stream *stream); /* for waits for a stream */
cudaError_t wait_in_capture_locked(Stream *stream, Event *event);
void invalidate_locked(Capture *capture);
unsigned long long capture_id(const Capture *capture);
Capture *find_capture_locked(unsigned long long id);

/* memory.c */
typedef struct Block {
    char *start;
    size_t length, mapped;
    int device;
    enum cudaMemoryType type;
} Block;
bool find_block(const void *address, Block *found);

/* device.c */
int device_count(void);
int current_device(void);
int exchange_device(int chosen); /* returns the one before; creates no context */
bool has_context(int device);
void use_context(const char *call);             /* creates that of the current device */
void check_device(int used, const char *call);  /* reports another than the current device */
cudaError_t told(cudaError_t code); /* what a call returns: cudaGetLastError gives it again */
cudaError_t failed(void);           /* the error of a kernel, of which a device does not recover */

/* For operators.cpp and the tests: what is counted, and how a kernel is launched. */
enum {
    LAUNCHES, COPIES_UP, COPIES_DOWN, COPIES_WITHIN, BYTES_UP, BYTES_DOWN, BYTES_WITHIN,
    ALLOCATIONS, FREES, HOST_ALLOCATIONS, HOST_WAITS, HOST_BLOCKED, GRAPH_LAUNCHES, OTHER_DEVICE,
    COUNTERS
};
extern uint64_t emulator_counters[COUNTERS];
cudaError_t emulator_launch(cudaStream_t, void (*run)(void *), void (*drop)(void *), void *data);
cudaError_t emulator_mark_freed(int device, cudaStream_t, void *start, size_t length);
void emulator_fail(const char *words);
unsigned emulator_contexts(void); /* a bit for each device */
bool emulator_set_order(const char *text, long idle_milliseconds);

#endif
