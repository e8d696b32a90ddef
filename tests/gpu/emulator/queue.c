/* The queues. Every stream has a thread that does its work in order, when it may.
 *
 * HPCTRAIN_EMULATED_GPU_ORDER says when that is, all within what CUDA allows:
 *
 *   free    as soon as the thread comes to it, beside the host (the default)
 *   early   before the call that queues it returns, where nothing else must be done first
 *   late    when the host waits for it, or work that the host waits for does
 *   NUMBER  at each call a random part of it, by this seed, and the rest late; some streams are
 *           slower than others
 *
 * A host that waits for something else, an MPI call for example, does not hold work up for ever:
 * after HPCTRAIN_EMULATED_GPU_IDLE milliseconds (20) without a call all of it may be done.
 */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { POLLS = 64, MOST_AT_RANDOM = 16, OFTEN = 64 };
enum Order { FREE, EARLY, LATE, RANDOM };

pthread_mutex_t emulator_lock = PTHREAD_MUTEX_INITIALIZER;
uint64_t emulator_counters[COUNTERS];

static Stream *streams;
static Stream *defaults[MOST_DEVICES];
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* something was done */
static enum Order order;
static uint64_t randomness = 1, calls;
static long idle = 20; /* milliseconds */
static bool ending, started;
bool emulator_forked; /* in a child of fork nothing goes on, as on a GPU */

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static uint64_t draw(void) { /* xorshift64* */
    randomness ^= randomness >> 12;
    randomness ^= randomness << 25;
    randomness ^= randomness >> 27;
    return (randomness * 2685821657736338717ull) >> 32;
}

static void draw_pace(Stream *s) {
    const uint64_t paces[] = {0, 2, OFTEN / 4, OFTEN};
    s->pace = paces[draw() % 4];
}

static bool is_ready(const Stream *s) {
    const Work *work = s->first;
    return work && !s->running && (work->at_once || work->number <= s->allowed) &&
           (!work->awaited || work->awaited->done >= work->until);
}

/* Freed memory is marked before anything else is done that could still use it. */
static bool is_marking(void) {
    for (const Stream *s = streams; s; s = s->next)
        if (s->first && s->first->at_once)
            return true;
    return false;
}

static bool may_run(const Stream *s) {
    return is_ready(s) && (s->first->at_once || !is_marking());
}

static void wake_all(void) {
    for (Stream *s = streams; s; s = s->next)
        if (s->has_thread && may_run(s))
            pthread_cond_signal(&s->wake);
    pthread_cond_broadcast(&changed);
}

static void *work_through(void *argument) {
    Stream *s = argument;
    pthread_mutex_lock(&emulator_lock);
    while (true) {
        while (ending || !may_run(s))
            pthread_cond_wait(&s->wake, &emulator_lock);
        Work *work = s->first;
        s->running = true;
        pthread_mutex_unlock(&emulator_lock);
        if (work->run)
            work->run(work->data);
        if (work->drop)
            work->drop(work->data);
        pthread_mutex_lock(&emulator_lock);
        s->running = false;
        s->done = work->number;
        s->first = work->next;
        if (!s->first)
            s->last = NULL;
        free(work);
        wake_all();
    }
    return NULL;
}

/* Let the work of a stream be done up to `number`, and what it waits for. */
static void demand(Stream *s, uint64_t number) {
    if (s->allowed >= number)
        return;
    s->allowed = number;
    for (Work *w = s->first; w && w->number <= number; w = w->next)
        if (w->awaited)
            demand(w->awaited, w->until);
}

static void demand_all(void) {
    for (Stream *s = streams; s; s = s->next)
        demand(s, s->queued);
}

/* Whether something is done now, or can be; a host function may wait for another process. */
static bool is_busy(void) {
    for (const Stream *s = streams; s; s = s->next)
        if (s->first && !s->first->may_block && (s->running || may_run(s)))
            return true;
    return false;
}

static void settle(void) {
    wake_all();
    while (is_busy())
        pthread_cond_wait(&changed, &emulator_lock);
}

static void progress(void) {
    if (order == FREE || order == EARLY)
        demand_all();
    if (order == RANDOM && draw() % 4 == 0) {
        int waiting = 0;
        for (Stream *s = streams; s; s = s->next)
            waiting += s->allowed < s->queued;
        int chosen = waiting ? (int)(draw() % (unsigned)waiting) : -1;
        for (Stream *s = streams; s; s = s->next)
            if (s->allowed < s->queued && chosen-- == 0 && draw() % OFTEN < s->pace) {
                uint64_t number = s->done + 1 + draw() % MOST_AT_RANDOM;
                demand(s, number < s->queued ? number : s->queued);
            }
    }
    if (order == FREE)
        wake_all();
    else
        settle();
}

static void *go_on_when_idle(void *unused) {
    (void)unused;
    uint64_t before = 0;
    pthread_mutex_lock(&emulator_lock);
    while (true) {
        struct timespec pause = {idle / 1000, idle % 1000 * 1000000};
        pthread_mutex_unlock(&emulator_lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&emulator_lock);
        if (calls == before) {
            demand_all();
            wake_all();
        }
        before = calls;
    }
    return NULL;
}

/* At the end of the process no thread may use what other libraries take down. */
static void end(void) {
    pthread_mutex_lock(&emulator_lock);
    ending = true;
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 2;
    for (Stream *s = streams; s; s = s->next)
        while (s->running && !(s->first && s->first->may_block))
            if (pthread_cond_timedwait(&changed, &emulator_lock, &limit))
                break;
    pthread_mutex_unlock(&emulator_lock);
}

static void start_thread(void *(*function)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, argument)) {
        fprintf(stderr, "emulated GPU: no thread could be started\n");
        abort();
    }
    pthread_detach(thread);
}

static void after_fork(void) {
    emulator_forked = true;
    pthread_mutex_init(&emulator_lock, NULL);
}

static bool choose_order(const char *text) {
    const char *names[] = {"free", "early", "late"}, *rank = getenv("OMPI_COMM_WORLD_RANK");
    for (int i = FREE; i <= LATE; i++)
        if (!strcmp(text, names[i])) {
            order = (enum Order)i;
            return true;
        }
    char *rest;
    uint64_t seed = strtoull(text, &rest, 10);
    if (!*text || *rest)
        return false;
    order = RANDOM;
    randomness = seed * 4 + 1 + (rank ? strtoull(rank, NULL, 10) << 40 : 0);
    for (int i = 0; i < 8; i++)
        draw();
    for (Stream *s = streams; s; s = s->next)
        draw_pace(s);
    return true;
}

static void start(void) {
    started = true;
    pthread_atfork(NULL, NULL, after_fork);
    atexit(end);
    const char *text = getenv("HPCTRAIN_EMULATED_GPU_ORDER");
    if (text && *text && !choose_order(text)) {
        fprintf(stderr, "HPCTRAIN_EMULATED_GPU_ORDER=%s: free, early, late or a number\n", text);
        exit(2);
    }
    text = getenv("HPCTRAIN_EMULATED_GPU_IDLE");
    idle = text && *text ? atol(text) : idle;
    start_thread(go_on_when_idle, NULL);
}

/* Another order from now on; what is queued is done first. False: there is none of this name. */
bool emulator_set_order(const char *text, long idle_milliseconds) {
    enter_call(NULL);
    for (Stream *s = streams; s; s = s->next)
        finish_locked(s, s->queued);
    bool known = choose_order(text);
    idle = idle_milliseconds;
    for (Stream *s = streams; s; s = s->next)
        s->allowed = s->done;
    leave();
    return known;
}

void enter_call(const char *name) {
    if (name)
        use_context(name);
    pthread_mutex_lock(&emulator_lock);
    if (!started)
        start();
    calls++;
    if (order == RANDOM && !emulator_forked)
        progress();
}

void leave(void) { pthread_mutex_unlock(&emulator_lock); }

Stream *all_streams(void) { return streams; }

Stream *add_stream(int device, bool blocking) {
    Stream *s = calloc(1, sizeof *s);
    s->device = device;
    s->blocking = blocking;
    pthread_cond_init(&s->wake, NULL);
    draw_pace(s);
    s->next = streams;
    return streams = s;
}

Stream *default_stream(int device) {
    if (!defaults[device])
        defaults[device] = add_stream(device, true);
    return defaults[device];
}

bool stream_of(cudaStream_t handle, Stream **found) {
    uintptr_t number = (uintptr_t)handle;
    if (number <= 2) { /* 0, cudaStreamLegacy, cudaStreamPerThread */
        *found = default_stream(current_device());
        return true;
    }
    for (Stream *s = streams; s; s = s->next)
        if (s == (Stream *)handle) {
            *found = s;
            return true;
        }
    return false;
}

Work *make_work(void (*run)(void *), void (*drop)(void *), void *data) {
    Work *work = calloc(1, sizeof *work);
    work->run = run;
    work->drop = drop;
    work->data = data;
    return work;
}

static void append(Stream *s, Work *work) {
    work->number = ++s->queued;
    if (s->last)
        s->last->next = work;
    else
        s->first = work;
    s->last = work;
    if (!s->has_thread) {
        s->has_thread = true;
        start_thread(work_through, s);
    }
    if (work->awaited && s->allowed >= work->number)
        demand(work->awaited, work->until);
}

/* The legacy default stream and the blocking streams of a device take turns. */
static void take_turns(Stream *s) {
    for (Stream *other = streams; s->blocking && other; other = other->next) {
        bool one_is_legacy = s == defaults[s->device] || other == defaults[s->device];
        if (other == s || other->device != s->device || !other->blocking || !one_is_legacy ||
            other->done == other->queued)
            continue;
        Work *wait = make_work(NULL, NULL, NULL);
        wait->awaited = other;
        wait->until = other->queued;
        append(s, wait);
    }
}

cudaError_t enqueue_locked(Stream *s, Work *work) {
    if (s->capture)
        return capture_locked(s, work);
    take_turns(s);
    append(s, work);
    if (order == FREE && s->allowed + 1 == s->queued && !s->first->awaited && !work->awaited) {
        s->allowed = s->queued; /* the usual case, without a look at all streams */
        pthread_cond_signal(&s->wake);
    } else
        progress();
    return cudaSuccess;
}

cudaError_t enqueue_call(const char *name, cudaStream_t handle, Work *work) {
    Stream *stream;
    enter_call(name);
    cudaError_t code = failed();
    if (!code && !stream_of(handle, &stream))
        code = cudaErrorInvalidResourceHandle;
    if (!code) {
        check_device(stream->device, name);
        code = enqueue_locked(stream, work);
    }
    leave();
    if (code) {
        if (work->drop)
            work->drop(work->data);
        free(work);
    }
    return code;
}

void finish_locked(Stream *s, uint64_t number) {
    emulator_counters[HOST_BLOCKED] += s->done < number;
    demand(s, number);
    wake_all();
    while (s->done < number && !emulator_forked)
        pthread_cond_wait(&changed, &emulator_lock);
}

void finish_device_locked(int device) {
    for (Stream *s = streams; s; s = s->next)
        if (s->device == device)
            demand(s, s->queued);
    for (Stream *s = streams; s; s = s->next)
        if (s->device == device)
            finish_locked(s, s->queued);
}

bool has_finished_locked(Stream *s, uint64_t number, int *polls) {
    if (s->done < number && ++*polls >= POLLS) {
        demand(s, number);
        wake_all();
    }
    if (s->done >= number)
        *polls = 0;
    return s->done >= number;
}
