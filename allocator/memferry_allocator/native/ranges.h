/* The book of a pool's memory: which ranges are live, kept aside by exact size, or free, and who used them last.
 * No driver calls and no lock: the pool has both.
 */
#ifndef MEMFERRY_RANGES_H
#define MEMFERRY_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RANGES_STREAMS = 256 };

/* Which streams may still be using a range. */
typedef struct uses {
    uint64_t bits[RANGES_STREAMS / 64];
} uses;

typedef enum block_state { BLOCK_LIVE, BLOCK_CACHED, BLOCK_FREE } block_state;

typedef struct block {
    uint64_t start;
    size_t nbytes;
    uint64_t freed; /* the pool's clock when the last part of it was given back */
    uses uses;      /* of a live block: streams that use it beside the one that will free it */
    int stream;     /* the one it was given back on last */
    block_state state;
    struct block *before, *after; /* by address */
    struct block *link;           /* in a bin, or among spare nodes */
    struct block *left, *right;   /* in the tree of free blocks, by size and then by address */
    uint32_t priority;
} block;

typedef struct bin {
    size_t nbytes;
    int stream;
    block *head;
} bin;

typedef struct ranges {
    block *first;
    block *tree;
    block *spare;
    bin *bins;
    size_t bin_count, bin_room;
    block **live;
    size_t live_count, live_room;
    size_t cached;
    uint32_t random;
} ranges;

/* All of [base, base + nbytes) becomes one free block; false when the host has no memory. */
bool ranges_begin(ranges *self, uint64_t base, size_t nbytes);
void ranges_end(ranges *self);

/* Make room for one more live block, so that taking one cannot fail; false when the host has no memory. */
bool ranges_prepare(ranges *self);

/* A cached block of exactly this size, last given back on `stream`; NULL without one. */
block *ranges_cached(const ranges *self, size_t nbytes, int stream);
/* The tightest free block, then (with `than`) the next one in the order of size and address; NULL at the end. */
block *ranges_fit(const ranges *self, size_t nbytes, const block *than);
/* Make a block of `ranges_cached` or `ranges_fit` live, the first `nbytes` of it; the rest stays free. */
void ranges_take(ranges *self, block *from, size_t nbytes);

block *ranges_live(const ranges *self, uint64_t start);
/* Take back a live block whose uses, `stream` and `freed` the caller has set: aside, if nobody else uses it. */
void ranges_give(ranges *self, block *live);
/* Join everything that is free and adjacent. */
void ranges_join(ranges *self);
/* The largest `ranges_fit` after a join. */
size_t ranges_largest(const ranges *self);

/* Nothing free that was given back until `clock` is in use any more; all free memory is joined. */
void ranges_settle(ranges *self, uint64_t clock);
/* One stream uses nothing any more; all free memory is joined. */
void ranges_forget(ranges *self, int stream);
/* Every stream that something is waiting for. */
uses ranges_users(const ranges *self);

void uses_add(uses *self, int stream);
void uses_remove(uses *self, int stream);
bool uses_has(const uses *self, int stream);
/* Whether some stream other than `stream` is in it. */
bool uses_foreign(const uses *self, int stream);

#endif
