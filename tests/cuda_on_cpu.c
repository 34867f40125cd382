/* What lut_linear.cu needs of CUDA, on a CPU: a block's threads take turns, and wait for each other where a GPU's would.
 *
 * Each thread has a stack of its own (ucontext). At a product of a warp, and at __syncthreads, it yields until all the
 * others have come as far. Blocks run one after the other.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define ON_CPU
#define SHARED static
#define DEVICE static inline
#define KERNEL static void
#define __align__(bytes) __attribute__((aligned(bytes)))

typedef struct {
    unsigned x, y, z, w;
} u32x4;
static u32x4 load4(const void *p) {
    u32x4 found;
    if ((uintptr_t)p % 16) abort(); /* as a GPU would refuse it */
    memcpy(&found, p, 16);
    return found;
}

static struct {
    int x;
} threadIdx, blockIdx;

enum { THREADS = 32 * WARPS, STACK = 1 << 16 };
static ucontext_t scheduler, threads[THREADS];
static int done[THREADS];

static void yield(void) {
    int me = threadIdx.x;
    swapcontext(&threads[me], &scheduler);
    threadIdx.x = me;
}

typedef struct {
    int arrived, generation;
} Barrier;
static Barrier of_warp[WARPS], of_block;

static void wait_for(Barrier *barrier, int threads) {
    int generation = barrier->generation;
    if (++barrier->arrived == threads) {
        barrier->arrived = 0;
        barrier->generation++;
    }
    while (barrier->generation == generation) yield();
}

static void __syncthreads(void) { wait_for(&of_block, THREADS); }

static float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static unsigned merge(unsigned mask, unsigned a, unsigned b) { return (mask & a) | (~mask & b); }
/* PTX prmt.b32, its mode of signs included. */
static unsigned permute(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        found |= byte << 8 * i;
    }
    return found;
}
static float from_half(unsigned short bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return value;
}
static unsigned short to_half(float value) {
    _Float16 rounded = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &rounded, 2);
    return bits;
}
static unsigned short to_bfloat(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (unsigned short)(bits >> 16 | 64);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* mma.sync.m16n8k16: the PTX manual's fragments. Lane 4g + t holds a(g, 2t), a(g + 8, 2t), a(g, 2t + 8), a(g + 8, 2t + 8) and
 * their right neighbours; b(2t, g), b(2t + 8, g) and those below; sums (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). */
static float a_of[WARPS][16][16], b_of[WARPS][16][8];
static float half_of(unsigned word, int high) {
    unsigned short bits = (unsigned short)(word >> 16 * high);
    return HALF ? from_half(bits) : __uint_as_float((unsigned)bits << 16);
}
static void multiply_add(float sums[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 2; i++) {
        a_of[warp][g][2 * t + i] = half_of(a0, i), a_of[warp][g + 8][2 * t + i] = half_of(a1, i);
        a_of[warp][g][2 * t + 8 + i] = half_of(a2, i), a_of[warp][g + 8][2 * t + 8 + i] = half_of(a3, i);
        b_of[warp][2 * t + i][g] = half_of(b0, i), b_of[warp][2 * t + 8 + i][g] = half_of(b1, i);
    }
    wait_for(&of_warp[warp], 32);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) sums[i] += a_of[warp][g + i / 2 * 8][k] * b_of[warp][k][2 * t + i % 2];
    wait_for(&of_warp[warp], 32);
}

/* Runs `body` as every thread of `blocks` blocks. */
static void run_blocks(int blocks, void (*body)(void)) {
    char *stacks = malloc((size_t)THREADS * STACK);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (int i = 0; i < THREADS; i++) {
            done[i] = 0;
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
            threads[i].uc_stack.ss_size = STACK;
            threads[i].uc_link = &scheduler;
            makecontext(&threads[i], body, 0);
        }
        for (int left = THREADS; left;)
            for (int i = 0; i < THREADS; i++) {
                if (done[i]) continue;
                threadIdx.x = i;
                swapcontext(&scheduler, &threads[i]);
                if (done[i]) left--;
            }
    }
    free(stacks);
}

#include "lut_linear.cu"

static struct {
    const void *x, *indices, *lut, *bias;
    void *out;
    int rows, columns, tokens, tile_rows;
} given;

static void body(void) {
    int me = threadIdx.x;
    lut_linear(
        given.x, given.indices, given.lut, given.bias, given.out, given.rows, given.columns, given.tokens, given.tile_rows
    );
    done[me] = 1;
}

void launch(
    int blocks, const void *x, const void *indices, const void *lut, const void *bias, void *out, int rows, int columns,
    int tokens, int tile_rows
) {
    given.x = x, given.indices = indices, given.lut = lut, given.bias = bias, given.out = out;
    given.rows = rows, given.columns = columns, given.tokens = tokens, given.tile_rows = tile_rows;
    run_blocks(blocks, body);
}
