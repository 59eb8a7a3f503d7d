#include "proto/span.h"

const char *fl_phase_name(enum fl_phase phase)
{
    static const char *const names[FL_PHASE_COUNT] = {
        [FL_PHASE_UNKNOWN] = "unknown",
        [FL_PHASE_START] = "start",
        [FL_PHASE_OPEN] = "open",
        [FL_PHASE_PLAN] = "plan",
        [FL_PHASE_TOKENISE] = "tokenise",
        [FL_PHASE_QUEUE] = "queue",
        [FL_PHASE_SEND] = "send",
        [FL_PHASE_RECEIVE] = "receive",
        [FL_PHASE_WAKE] = "wake",
        [FL_PHASE_MEMORY] = "memory",
        [FL_PHASE_KV] = "kv",
        [FL_PHASE_LINK] = "link",
        [FL_PHASE_READ] = "read",
        [FL_PHASE_VERIFY] = "verify",
        [FL_PHASE_REPACK] = "repack",
        [FL_PHASE_COPY] = "copy",
        [FL_PHASE_EMBED] = "embed",
        [FL_PHASE_JOIN] = "join",
        [FL_PHASE_PREFILL] = "prefill",
        [FL_PHASE_HEAD] = "head",
        [FL_PHASE_SAMPLE] = "sample",
        [FL_PHASE_DECODE] = "decode",
        [FL_PHASE_RETURN] = "return",
    };
    return (unsigned)phase < FL_PHASE_COUNT ? names[phase] : names[FL_PHASE_UNKNOWN];
}

const char *fl_lane_name(enum fl_lane lane)
{
    static const char *const names[FL_LANE_COUNT] = {"none", "wire", "compute",
                                                     "disk", "main", "worker"};
    return (unsigned)lane < FL_LANE_COUNT ? names[lane] : names[FL_LANE_NONE];
}

const char *fl_source_name(enum fl_source source)
{
    static const char *const names[FL_SOURCE_COUNT] = {"none", "disk", "page cache", "wire",
                                                       "shard cache"};
    return (unsigned)source < FL_SOURCE_COUNT ? names[source] : names[FL_SOURCE_NONE];
}

const char *fl_cause_name(enum fl_cause cause)
{
    static const char *const names[FL_CAUSE_COUNT] = {"none",   "weights", "input", "busy",
                                                      "credit", "link",    "kv"};
    return (unsigned)cause < FL_CAUSE_COUNT ? names[cause] : names[FL_CAUSE_NONE];
}
