/* The driver calls of a small copy in the order of a stream, in two calls from Python: an event is recorded; and
 * another stream waits for it, copies, records its end, and is waited for.  Each is one stream's, whose recordings
 * Python lets nobody else make meanwhile.  The driver's functions are handed in: nothing is needed to build it.
 */
#include <stddef.h>
#include <stdint.h>

#define BESIDE_API __attribute__((visibility("default")))

typedef struct beside_calls {
    int (*current)(uintptr_t *context);
    int (*push)(uintptr_t context);
    int (*pop)(uintptr_t *context);
    int (*record)(uintptr_t event, uintptr_t stream);
    int (*wait)(uintptr_t stream, uintptr_t event, unsigned flags);
    int (*capturing)(uintptr_t stream, int *status);
    int (*copy)(uintptr_t dst, uintptr_t src, size_t nbytes, uintptr_t stream);
} beside_calls;

enum { PUSH, RECORD, CAPTURING, WAIT, COPY };

/* The first call that was refused, by its number and its answer; whether the event was recorded, and into a graph. */
typedef struct beside_answer {
    int code, call, recorded, captured;
} beside_answer;

enum { DEFAULT_STREAM = 0, LEGACY_STREAM = 1 }; /* cannot be captured, and asking breaks captures of others */

static int refused(beside_answer *answer, int call, int code)
{
    if (code != 0 && answer->code == 0) {
        answer->call = call;
        answer->code = code;
    }
    return code != 0;
}

/* Whether the context is current now; `pushed` says whether it is to be popped. */
static int enter(const beside_calls *cu, uintptr_t context, int *pushed, beside_answer *answer)
{
    uintptr_t current = 0;
    *answer = (beside_answer){0};
    *pushed = 0;
    if (cu->current(&current) == 0 && current == context)
        return 1;
    if (refused(answer, PUSH, cu->push(context)))
        return 0;
    *pushed = 1;
    return 1;
}

static void leave(const beside_calls *cu, int pushed)
{
    uintptr_t popped;
    if (pushed)
        cu->pop(&popped);
}

static int record(const beside_calls *cu, uintptr_t event, uintptr_t stream, beside_answer *answer)
{
    if (refused(answer, RECORD, cu->record(event, stream)))
        return 0;
    answer->recorded = 1;
    if (stream != DEFAULT_STREAM && stream != LEGACY_STREAM)
        refused(answer, CAPTURING, cu->capturing(stream, &answer->captured));
    return 1;
}

/* Both return whether there is something to look at in the answer. */
BESIDE_API int beside_begin(const beside_calls *cu, uintptr_t context, uintptr_t stream, uintptr_t event,
                            beside_answer *answer)
{
    int pushed;
    if (enter(cu, context, &pushed, answer))
        record(cu, event, stream, answer);
    leave(cu, pushed);
    return answer->code != 0 || answer->captured != 0;
}

BESIDE_API int beside_copy(const beside_calls *cu, uintptr_t context, uintptr_t lane, uintptr_t begin, uintptr_t dst,
                           uintptr_t src, size_t nbytes, uintptr_t end, uintptr_t stream, beside_answer *answer)
{
    int pushed;
    if (enter(cu, context, &pushed, answer) && !refused(answer, WAIT, cu->wait(lane, begin, 0))) {
        refused(answer, COPY, cu->copy(dst, src, nbytes, lane));
        if (record(cu, end, lane, answer)) /* also after a refusal: the stream comes after what was before */
            refused(answer, WAIT, cu->wait(stream, end, 0));
    }
    leave(cu, pushed);
    return answer->code != 0 || answer->captured != 0;
}
