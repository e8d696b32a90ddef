/* The calls on streams and events. */
#include "emulator.h"

#include <stdlib.h>

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    enter();
    *stream = (cudaStream_t)add_stream(current_device(), !(flags & cudaStreamNonBlocking));
    leave();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

/* Its work is still done: a stream that was destroyed is never used again, and stays. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    (void)stream;
    *priority = 0;
    return cudaSuccess;
}

/* Takes the lock for a call on a stream: it, or why there can be none. */
static cudaError_t enter_stream_call(const char *name, cudaStream_t handle, Stream **stream) {
    enter_call(name);
    if (!stream_of(handle, stream))
        return cudaErrorInvalidResourceHandle;
    check_device((*stream)->device, name);
    return failed();
}

#define enter_stream(handle, stream) enter_stream_call(__func__, handle, stream)

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Stream *stream;
    cudaError_t code = enter_stream(handle, &stream);
    if (!code)
        code = forbidden_in_capture_locked(stream);
    emulator_counters[HOST_WAITS]++;
    if (!code) {
        finish_locked(stream, stream->queued);
        code = failed();
    }
    leave();
    return told(code);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Stream *stream;
    cudaError_t code = enter_stream(handle, &stream);
    if (!code)
        code = forbidden_in_capture_locked(stream);
    if (!code && !has_finished_locked(stream, stream->queued, &stream->polls))
        code = cudaErrorNotReady;
    leave();
    return told(code ? code : failed());
}

cudaError_t cudaDeviceSynchronize(void) {
    enter();
    cudaError_t code = unsafe_in_capture_locked();
    emulator_counters[HOST_WAITS]++;
    if (!code) {
        finish_device_locked(current_device());
        code = failed();
    }
    leave();
    return told(code);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    Work *work = make_work(function, NULL, data);
    work->may_block = true;
    return told(enqueue(stream, work));
}

cudaError_t emulator_launch(
    cudaStream_t stream, void (*run)(void *), void (*drop)(void *), void *data) {
    emulator_counters[LAUNCHES]++;
    return told(enqueue(stream, make_work(run, drop, data)));
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    Event *made = calloc(1, sizeof *made);
    made->timing = !(flags & cudaEventDisableTiming);
    made->references = 1;
    made->device = current_device();
    use_context(__func__);
    *event = (cudaEvent_t)made;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

static void release(void *event) {
    pthread_mutex_lock(&emulator_lock); /* not by enter: a stream's thread comes here too */
    bool last = --((Event *)event)->references == 0;
    pthread_mutex_unlock(&emulator_lock);
    if (last)
        free(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    release(event);
    return cudaSuccess;
}

static void note_time(void *data) { ((Event *)data)->seconds = now(); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
    (void)flags;
    Event *event = (Event *)handle;
    Stream *stream;
    cudaError_t code = enter_stream(on, &stream);
    if (!code && stream->capture) {
        event->capture = capture_id(stream->capture);
        event->stream = stream;
        event->captured = stream->captured;
    } else if (!code) {
        event->capture = 0;
        event->references++;
        code = enqueue_locked(stream, make_work(note_time, release, event));
        event->recorded = true;
        event->stream = stream;
        event->number = stream->queued;
        event->polls = 0;
    }
    leave();
    return told(code);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
    (void)flags;
    Event *event = (Event *)awaited;
    Stream *stream;
    cudaError_t code = enter_stream(handle, &stream);
    if (!code && (stream->capture || event->capture))
        code = wait_in_capture_locked(stream, event);
    else if (!code && event->recorded && event->stream != stream) {
        Work *wait = make_work(NULL, NULL, NULL);
        wait->awaited = event->stream;
        wait->until = event->number;
        code = enqueue_locked(stream, wait);
    }
    leave();
    return told(code);
}

/* What the host may ask of an event that a capture recorded, or during another's capture. */
static cudaError_t check_event_locked(Event *event) {
    if (!event->capture)
        return unsafe_in_capture_locked();
    Capture *capture = find_capture_locked(event->capture);
    if (capture)
        invalidate_locked(capture);
    return cudaErrorCapturedEvent;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Event *event = (Event *)handle;
    enter();
    check_device(event->device, __func__);
    cudaError_t code = check_event_locked(event);
    emulator_counters[HOST_WAITS]++;
    if (!code && event->recorded) {
        finish_locked(event->stream, event->number);
        code = failed();
    }
    leave();
    return told(code);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Event *event = (Event *)handle;
    enter();
    check_device(event->device, __func__);
    cudaError_t code = check_event_locked(event);
    if (!code && event->recorded &&
        !has_finished_locked(event->stream, event->number, &event->polls))
        code = cudaErrorNotReady;
    leave();
    return told(code ? code : failed());
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    Event *from = (Event *)first, *to = (Event *)second;
    enter();
    check_device(from->device, __func__);
    cudaError_t code = cudaSuccess;
    if (!from->timing || !to->timing || !from->recorded || !to->recorded)
        code = cudaErrorInvalidResourceHandle;
    else if (from->stream->done < from->number || to->stream->done < to->number)
        code = cudaErrorNotReady;
    *milliseconds = (float)((to->seconds - from->seconds) * 1e3);
    leave();
    return told(code);
}
