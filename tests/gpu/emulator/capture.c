/* Stream capture and graphs: work that is queued during a capture is kept, and done at each launch
 * in the order in which it was queued. What a capture does not allow returns CUDA's error codes
 * (CUDA C++ Programming Guide, "Prohibited and unhandled operations"). */
#include "emulator.h"

#include <stdlib.h>

struct Graph {
    Work *first, *last;
    size_t count;
    int references;
};

struct Capture {
    Capture *next;
    unsigned long long id;
    Stream *origin;
    Graph *graph;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    bool invalid;
};

static Capture *captures;
static unsigned long long newest;
static __thread enum cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;

unsigned long long capture_id(const Capture *capture) { return capture->id; }

Capture *find_capture_locked(unsigned long long id) {
    Capture *c = captures;
    while (c && c->id != id)
        c = c->next;
    return c;
}

void invalidate_locked(Capture *capture) { capture->invalid = true; }

cudaError_t capture_locked(Stream *stream, Work *work) {
    Graph *graph = stream->capture->graph;
    if (stream->capture->invalid)
        return cudaErrorStreamCaptureInvalidated;
    if (graph->last)
        graph->last->next = work;
    else
        graph->first = work;
    graph->last = work;
    graph->count++;
    stream->captured++;
    return cudaSuccess;
}

/* A thread in relaxed mode may do all. One in thread-local mode is held by captures that it began
 * itself, one in global mode, the first of all threads, by those of others too that are global. */
cudaError_t unsafe_in_capture_locked(void) {
    cudaError_t code = cudaSuccess;
    if (own_mode == cudaStreamCaptureModeRelaxed)
        return code;
    for (Capture *c = captures; c; c = c->next) {
        bool own = c->mode != cudaStreamCaptureModeRelaxed && pthread_equal(c->thread, pthread_self());
        bool others = own_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal;
        if (own || others) {
            c->invalid = true;
            code = cudaErrorStreamCaptureUnsupported;
        }
    }
    return code;
}

cudaError_t forbidden_in_capture_locked(Stream *stream) {
    if (!stream->capture)
        return unsafe_in_capture_locked();
    stream->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
}

/* Within one capture the order of queueing keeps what an event would. A stream that waits for an
 * event of a capture joins it; none may wait for work outside. */
cudaError_t wait_in_capture_locked(Stream *stream, Event *event) {
    Capture *capture = event->capture ? find_capture_locked(event->capture) : NULL;
    if (!event->capture && !event->recorded)
        return cudaSuccess;
    if (!capture || (stream->capture && stream->capture != capture)) {
        if (stream->capture)
            stream->capture->invalid = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (!stream->capture) {
        stream->capture = capture;
        stream->captured = stream->joined = 0;
    }
    if (stream == capture->origin && event->stream->joined < event->captured)
        event->stream->joined = event->captured;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    Stream *stream;
    enter();
    cudaError_t code = cudaSuccess;
    if (!stream_of(handle, &stream))
        code = cudaErrorInvalidResourceHandle;
    else if (stream == default_stream(stream->device))
        code = cudaErrorStreamCaptureImplicit; /* the legacy stream cannot be captured */
    else if (stream->capture)
        code = cudaErrorIllegalState;
    if (!code) {
        Capture *capture = calloc(1, sizeof *capture);
        Graph *graph = calloc(1, sizeof *graph);
        graph->references = 1;
        *capture = (Capture){captures, ++newest, stream, graph, mode, pthread_self(), false};
        captures = capture;
        stream->capture = capture;
        stream->captured = stream->joined = 0;
    }
    leave();
    return told(code);
}

/* Let all streams of a capture go; whether the origin waited for all work of the others. */
static bool leave_capture_locked(Capture *capture) {
    bool joined = true;
    for (Stream *s = all_streams(); s; s = s->next)
        if (s->capture == capture) {
            joined &= s == capture->origin || s->captured <= s->joined;
            s->capture = NULL;
        }
    return joined;
}

static void free_graph(Graph *graph) {
    while (graph->first) {
        Work *work = graph->first;
        graph->first = work->next;
        if (work->drop)
            work->drop(work->data);
        free(work);
    }
    free(graph);
}

static void release_graph(void *data) {
    Graph *graph = data;
    pthread_mutex_lock(&emulator_lock);
    bool last = --graph->references == 0;
    pthread_mutex_unlock(&emulator_lock);
    if (last)
        free_graph(graph);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Stream *stream;
    enter();
    *graph = NULL;
    Capture *capture = stream_of(handle, &stream) ? stream->capture : NULL;
    cudaError_t code = cudaSuccess;
    if (!capture)
        code = cudaErrorIllegalState;
    else if (capture->origin != stream)
        code = cudaErrorStreamCaptureUnmatched;
    else if (capture->mode != cudaStreamCaptureModeRelaxed &&
             !pthread_equal(capture->thread, pthread_self()))
        code = cudaErrorStreamCaptureWrongThread;
    if (code) {
        leave();
        return told(code);
    }
    code = capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    if (!leave_capture_locked(capture) && !code)
        code = cudaErrorStreamCaptureUnjoined;
    for (Capture **c = &captures; *c; c = &(*c)->next)
        if (*c == capture) {
            *c = capture->next;
            break;
        }
    leave();
    if (code)
        release_graph(capture->graph);
    else
        *graph = (cudaGraph_t)capture->graph;
    free(capture);
    return told(code);
}

static enum cudaStreamCaptureStatus status_of(const Capture *capture) {
    if (!capture)
        return cudaStreamCaptureStatusNone;
    return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    Stream *stream;
    enter();
    bool known = stream_of(handle, &stream);
    if (known)
        *status = status_of(stream->capture);
    leave();
    return told(known ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
    size_t *count) {
    Stream *stream;
    enter();
    bool known = stream_of(handle, &stream);
    Capture *capture = known ? stream->capture : NULL;
    *status = status_of(capture);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    leave();
    return told(known ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = own_mode;
    own_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* ---- graphs: one that is instantiated is the same list ---- */

cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    enter();
    ((Graph *)graph)->references++;
    leave();
    *made = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(
    cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes) /* nobody asks for them */
        return told(cudaErrorNotSupported);
    *count = ((Graph *)graph)->count;
    return cudaSuccess;
}

static void run_graph(void *data) {
    for (Work *work = ((Graph *)data)->first; work; work = work->next)
        if (work->run)
            work->run(work->data);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    Graph *graph = (Graph *)handle;
    enter();
    graph->references++;
    emulator_counters[GRAPH_LAUNCHES]++;
    leave();
    return told(enqueue(stream, make_work(run_graph, release_graph, graph)));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    release_graph(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    release_graph(graph);
    return cudaSuccess;
}
