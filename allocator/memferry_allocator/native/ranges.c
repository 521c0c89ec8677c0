#include "ranges.h"

#include <stdlib.h>

/* -- sets of streams -- */
void uses_add(uses *self, int stream)
{
    self->bits[stream / 64] |= (uint64_t)1 << (stream % 64);
}

void uses_remove(uses *self, int stream)
{
    self->bits[stream / 64] &= ~((uint64_t)1 << (stream % 64));
}

bool uses_has(const uses *self, int stream)
{
    return (self->bits[stream / 64] >> (stream % 64) & 1) != 0;
}

static void uses_join(uses *self, const uses *other)
{
    for (int i = 0; i < RANGES_STREAMS / 64; i++)
        self->bits[i] |= other->bits[i];
}

bool uses_foreign(const uses *self, int stream)
{
    uses rest = *self;
    uses_remove(&rest, stream);
    uint64_t any = 0;
    for (int i = 0; i < RANGES_STREAMS / 64; i++)
        any |= rest.bits[i];
    return any != 0;
}

/* -- nodes -- */
static block *node_get(ranges *self)
{
    block *node = self->spare;
    if (node != NULL)
        self->spare = node->link;
    return node;
}

static void node_put(ranges *self, block *node)
{
    node->link = self->spare;
    self->spare = node;
}

static uint32_t draw(ranges *self)
{
    uint32_t x = self->random;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return self->random = x;
}

/* -- the tree of free blocks: a treap -- */
static bool precedes(const block *one, size_t nbytes, uint64_t start)
{
    return one->nbytes < nbytes || (one->nbytes == nbytes && one->start < start);
}

static void tree_split(block *tree, const block *key, block **lower, block **upper)
{
    while (tree != NULL) {
        if (precedes(tree, key->nbytes, key->start)) {
            *lower = tree;
            lower = &tree->right;
            tree = tree->right;
        } else {
            *upper = tree;
            upper = &tree->left;
            tree = tree->left;
        }
    }
    *lower = *upper = NULL;
}

static block *tree_merge(block *lower, block *upper)
{
    block *root = NULL, **at = &root;
    while (lower != NULL && upper != NULL) {
        if (lower->priority > upper->priority) {
            *at = lower;
            at = &lower->right;
            lower = lower->right;
        } else {
            *at = upper;
            at = &upper->left;
            upper = upper->left;
        }
    }
    *at = lower != NULL ? lower : upper;
    return root;
}

static void tree_insert(ranges *self, block *node)
{
    block **at = &self->tree;
    node->priority = draw(self);
    while (*at != NULL && (*at)->priority >= node->priority)
        at = precedes(*at, node->nbytes, node->start) ? &(*at)->right : &(*at)->left;
    tree_split(*at, node, &node->left, &node->right);
    *at = node;
}

static void tree_erase(ranges *self, const block *node)
{
    block **at = &self->tree;
    while (*at != node)
        at = precedes(*at, node->nbytes, node->start) ? &(*at)->right : &(*at)->left;
    *at = tree_merge(node->left, node->right);
}

block *ranges_fit(const ranges *self, size_t nbytes, const block *than)
{
    uint64_t start = 0;
    if (than != NULL) {
        nbytes = than->nbytes;
        start = than->start + 1;
    }
    block *best = NULL;
    for (block *at = self->tree; at != NULL;) {
        if (precedes(at, nbytes, start)) {
            at = at->right;
        } else {
            best = at;
            at = at->left;
        }
    }
    return best;
}

/* -- the table of live blocks: open addressing, by start -- */
static size_t scatter(uint64_t key)
{
    key *= 0x9E3779B97F4A7C15u;
    return (size_t)(key >> 20);
}

static size_t live_slot(const ranges *self, uint64_t start)
{
    size_t slot = scatter(start >> 8) & (self->live_room - 1);
    while (self->live[slot] != NULL && self->live[slot]->start != start)
        slot = (slot + 1) & (self->live_room - 1);
    return slot;
}

static bool live_grow(ranges *self)
{
    ranges larger = {.live_room = self->live_room == 0 ? 256 : 2 * self->live_room};
    larger.live = calloc(larger.live_room, sizeof *larger.live);
    if (larger.live == NULL)
        return false;
    for (size_t i = 0; i < self->live_room; i++)
        if (self->live[i] != NULL)
            larger.live[live_slot(&larger, self->live[i]->start)] = self->live[i];
    free(self->live);
    self->live = larger.live;
    self->live_room = larger.live_room;
    return true;
}

/* Close the hole, so that whatever lies behind it is still found. */
static void live_erase(ranges *self, uint64_t start)
{
    size_t hole = live_slot(self, start), mask = self->live_room - 1;
    for (size_t at = (hole + 1) & mask; self->live[at] != NULL; at = (at + 1) & mask) {
        size_t home = scatter(self->live[at]->start >> 8) & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            self->live[hole] = self->live[at];
            hole = at;
        }
    }
    self->live[hole] = NULL;
    self->live_count--;
}

block *ranges_live(const ranges *self, uint64_t start)
{
    return self->live_room == 0 ? NULL : self->live[live_slot(self, start)];
}

/* -- bins: blocks kept aside, by exact size and stream -- */
static bin *bin_slot(const ranges *self, size_t nbytes, int stream)
{
    size_t slot = scatter((nbytes >> 8) * RANGES_STREAMS + (size_t)stream) & (self->bin_room - 1);
    while (self->bins[slot].nbytes != 0 && (self->bins[slot].nbytes != nbytes || self->bins[slot].stream != stream))
        slot = (slot + 1) & (self->bin_room - 1);
    return &self->bins[slot];
}

static bool bins_grow(ranges *self)
{
    ranges larger = {.bin_room = self->bin_room == 0 ? 64 : 2 * self->bin_room};
    larger.bins = calloc(larger.bin_room, sizeof *larger.bins);
    if (larger.bins == NULL)
        return false;
    for (size_t i = 0; i < self->bin_room; i++)
        if (self->bins[i].nbytes != 0)
            *bin_slot(&larger, self->bins[i].nbytes, self->bins[i].stream) = self->bins[i];
    free(self->bins);
    self->bins = larger.bins;
    self->bin_room = larger.bin_room;
    return true;
}

block *ranges_cached(const ranges *self, size_t nbytes, int stream)
{
    return self->bin_room == 0 ? NULL : bin_slot(self, nbytes, stream)->head;
}

/* -- joining -- */
static void absorb(ranges *self, block *left, block *right)
{
    left->nbytes += right->nbytes;
    left->after = right->after;
    if (right->after != NULL)
        right->after->before = left;
    left->freed = left->freed > right->freed ? left->freed : right->freed;
    uses_join(&left->uses, &right->uses);
    node_put(self, right);
}

/* Put a block that is in no list into the tree, together with the free blocks beside it. */
static void make_free(ranges *self, block *node)
{
    block *left = node->before, *right = node->after;
    if (right != NULL && right->state == BLOCK_FREE) {
        tree_erase(self, right);
        absorb(self, node, right);
    }
    if (left != NULL && left->state == BLOCK_FREE) {
        tree_erase(self, left);
        absorb(self, left, node);
        node = left;
    }
    node->state = BLOCK_FREE;
    tree_insert(self, node);
}

void ranges_join(ranges *self)
{
    for (size_t i = 0; i < self->bin_room; i++) {
        for (block *node = self->bins[i].head, *next; node != NULL; node = next) {
            next = node->link;
            make_free(self, node);
        }
        self->bins[i] = (bin){0};
    }
    self->bin_count = self->cached = 0;
}

/* -- taking and giving -- */
bool ranges_prepare(ranges *self)
{
    if (4 * (self->live_count + 1) > 3 * self->live_room && !live_grow(self))
        return false;
    if (self->spare == NULL) {
        block *node = malloc(sizeof *node);
        if (node == NULL)
            return false;
        node_put(self, node);
    }
    return true;
}

static void cut(ranges *self, block *from, size_t nbytes)
{
    block *rest = node_get(self);
    *rest = *from; /* uses, and when it was given back, hold for both parts */
    rest->start = from->start + nbytes;
    rest->nbytes = from->nbytes - nbytes;
    rest->before = from;
    if (rest->after != NULL)
        rest->after->before = rest;
    from->after = rest;
    from->nbytes = nbytes;
    tree_insert(self, rest);
}

void ranges_take(ranges *self, block *from, size_t nbytes)
{
    if (from->state == BLOCK_CACHED) {
        bin_slot(self, from->nbytes, from->stream)->head = from->link;
        self->cached -= from->nbytes;
    } else {
        tree_erase(self, from);
        if (from->nbytes > nbytes)
            cut(self, from, nbytes);
    }
    from->state = BLOCK_LIVE;
    from->uses = (uses){{0}};
    self->live[live_slot(self, from->start)] = from;
    self->live_count++;
}

void ranges_give(ranges *self, block *live)
{
    live_erase(self, live->start);
    live->state = BLOCK_CACHED;
    bool full = 4 * (self->bin_count + 1) > 3 * self->bin_room;
    if (uses_foreign(&live->uses, live->stream) || (full && !bins_grow(self))) {
        make_free(self, live);
        return;
    }
    bin *place = bin_slot(self, live->nbytes, live->stream);
    if (place->nbytes == 0) {
        *place = (bin){.nbytes = live->nbytes, .stream = live->stream};
        self->bin_count++;
    }
    live->link = place->head;
    place->head = live;
    self->cached += live->nbytes;
}

/* -- questions and the end of uses -- */
size_t ranges_largest(const ranges *self)
{
    size_t largest = 0, run = 0;
    for (const block *at = self->first; at != NULL; at = at->after) {
        run = at->state == BLOCK_LIVE ? 0 : run + at->nbytes;
        largest = run > largest ? run : largest;
    }
    return largest;
}

void ranges_settle(ranges *self, uint64_t clock)
{
    for (block *at = self->first; at != NULL; at = at->after)
        if (at->state != BLOCK_LIVE && at->freed <= clock)
            at->uses = (uses){{0}};
    ranges_join(self);
}

void ranges_forget(ranges *self, int stream)
{
    for (block *at = self->first; at != NULL; at = at->after)
        uses_remove(&at->uses, stream);
    ranges_join(self);
}

uses ranges_users(const ranges *self)
{
    uses all = {{0}};
    for (const block *at = self->first; at != NULL; at = at->after)
        uses_join(&all, &at->uses);
    return all;
}

/* -- life -- */
bool ranges_begin(ranges *self, uint64_t base, size_t nbytes)
{
    *self = (ranges){.random = 0x2545F491u};
    block *all = malloc(sizeof *all);
    if (all == NULL)
        return false;
    *all = (block){.start = base, .nbytes = nbytes, .state = BLOCK_FREE};
    self->first = all;
    tree_insert(self, all);
    return true;
}

void ranges_end(ranges *self)
{
    for (block *at = self->first, *next; at != NULL; at = next) {
        next = at->after;
        free(at);
    }
    for (block *at = self->spare, *next; at != NULL; at = next) {
        next = at->link;
        free(at);
    }
    free(self->bins);
    free(self->live);
    *self = (ranges){0};
}
