/* y = x W^T + b for 1 to 8 TILES rows of x and packed W of 2 to 8 bits on a GPU (sm_80 and later).
 *
 * One block takes 16 rows of W, its warps take runs of columns in turn, tensor cores multiply (mma m16n8k16, float32 sums):
 * each product takes eight rows of x, a tile, and what was decoded serves all of them. Lane 4g + t of a warp decodes rows g
 * and g + 8; any columns may share a k of the product as long as x has the same, so each lane takes a run of neighbours as
 * they lie in memory, and its x beside it: nothing is shuffled between lanes. Tables are rounded once a block.
 *
 * A table of eight 16-bit entries is two byte planes of two registers each, the sources of one byte permute (PRMT); a 3-bit
 * code in a nibble is its selector, so four codes cost two permutes, and two more to pair low with high bytes. With 16
 * entries both halves are looked up and bit 3 selects. Larger tables stay in shared memory.
 *
 * Compiled at run time with BITS, VECTOR (words of one load: 4 or 1), HALF (x, y and products in float16, else in bfloat16),
 * TILES, LEVELS (entries are -2^(BITS-1) and up, and `lut` holds a scale for each row), LUT and BIAS (0 float32, 1 bfloat16,
 * 2 float16; BIAS -1: none) and WARPS. It includes nothing, so that NVRTC needs no headers; tests/cuda_on_cpu.c runs this
 * same text on a CPU.
 */
typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define RUN (32 * VECTOR)    /* neighbouring columns of a lane: whole words of codes, BITS * VECTOR of them */
#define WORDS (BITS * VECTOR)
#define ENTRIES (1 << BITS)
#define NARROW (BITS <= 4)   /* tables in registers */

#ifndef ON_CPU
struct __align__(16) u32x4 { u32 x, y, z, w; };
#define SHARED __shared__
#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS)
#define DEVICE static __device__ __forceinline__
DEVICE float from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE u16 to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE u16 to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
/* Four words that nobody writes, asked for where the text says: the compiler would put loads off to save registers. */
DEVICE u32x4 load4(const void *p) {
    u32x4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
/* Byte i of the result is the byte of b a that nibble i of `selector` names; with bit 3 set, its sign eight times. */
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 found;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(selector));
    return found;
}
/* The bits of `a` where `mask` has ones, of `b` elsewhere: one instruction, where the compiler finds two. */
DEVICE u32 merge(u32 mask, u32 a, u32 b) {
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(found) : "r"(mask), "r"(a), "r"(b));
    return found;
}
/* sums (16 x 8) += a (16 x 16) b (16 x 8), as PTX lays fragments out over a warp. */
DEVICE void multiply_add(float sums[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

/* A 16-bit number: 1 bfloat16, 2 float16. */
DEVICE float number(u32 bits, int kind) { return kind == 1 ? __uint_as_float(bits << 16) : from_half((u16)bits); }

DEVICE u16 rounded(float value) { return HALF ? to_half(value) : to_bfloat(value); }

/* A table or a bias in memory, at one place. */
DEVICE float read(const void *numbers, long long at, int kind) {
    return kind ? number(((const u16 *)numbers)[at], kind) : ((const float *)numbers)[at];
}

/* A row's table: low and high bytes of its entries, four to a word; or where the entries are, in shared memory. */
#if NARROW
typedef struct {
    u32 low[ENTRIES / 4], high[ENTRIES / 4];
} Table;
#define KEPT (2 * ENTRIES)
#else
typedef const u16 *Table;
#define KEPT (2 * ENTRIES + 4) /* bytes of a row; rows begin in neighbouring banks */
#endif

/* The tables of a block's rows, and after them one of zeros. */
DEVICE void make_tables(u8 tables[17][KEPT], const void *lut, int first, int rows, int tile_rows) {
    for (int i = threadIdx.x; i < 17 * ENTRIES; i += 32 * WARPS) {
        int place = i / ENTRIES, entry = i % ENTRIES, row = first + place < rows ? first + place : rows - 1;
        float value = LEVELS ? entry - ENTRIES / 2 : read(lut, (long long)(row / tile_rows) * ENTRIES + entry, LUT);
        u32 bits = place < 16 ? rounded(value) : 0;
#if NARROW
        tables[place][entry] = (u8)bits;
        tables[place][ENTRIES + entry] = (u8)(bits >> 8);
#else
        ((u16 *)tables[place])[entry] = (u16)bits;
#endif
    }
}

DEVICE void take_table(Table *table, const u8 *kept) {
#if NARROW
#pragma unroll
    for (int i = 0; i < ENTRIES / 4; i++) {
        table->low[i] = ((const u32 *)kept)[i];
        table->high[i] = ((const u32 *)kept)[ENTRIES / 4 + i];
    }
#else
    *table = (const u16 *)kept;
#endif
}

#if NARROW
/* Eight codes of a run, from code 8 i on, each in a nibble. */
DEVICE u32 nibbles(const u32 words[WORDS], int i) {
#if BITS == 4
    return words[i];
#elif BITS == 2
    u32 v = words[i / 2] >> 16 * (i % 2); /* eight bits to a half, four to a byte, two to a nibble */
    v = merge(0xff, v, v << 8);
    v = merge(0xf000f, v, v << 4);
    return merge(0x3030303, v, v << 2) & 0x33333333;
#else
    int bit = 24 * i;
    u32 v = words[bit / 32] >> bit % 32;
    if (bit % 32 > 8) v = __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32);
    v = merge(0xfff, v, v << 4); /* twelve bits to a half, six to a byte, three to a nibble */
    v = merge(0x3f003f, v, v << 2);
    return merge(0x7070707, v, v << 1) & 0x77777777;
#endif
}

/* Weights of four codes in the low nibbles of `codes`: two words of two 16-bit numbers. */
DEVICE void decode(const Table *table, u32 codes, u32 *first, u32 *second) {
    u32 three = BITS < 4 ? codes : codes & 0x7777, more = BITS > 2; /* a table of four is one register */
    u32 low = permute(table->low[0], table->low[more], three), high = permute(table->high[0], table->high[more], three);
#if BITS == 4
    u32 four = permute(0, 0x80, (codes >> 1 & 0x4444) | 0x8888); /* bytes of ones where bit 3 of the code is set */
    low = merge(four, permute(table->low[2], table->low[3], three), low);
    high = merge(four, permute(table->high[2], table->high[3], three), high);
#endif
    *first = permute(low, high, 0x5140);
    *second = permute(low, high, 0x7362);
}

DEVICE void decode_eight(u32 found[4], const Table *table, const u32 words[WORDS], int i) {
    u32 codes = nibbles(words, i);
    decode(table, codes, &found[0], &found[1]);
    decode(table, codes >> 16, &found[2], &found[3]);
}
#else
DEVICE u32 entry_of(Table table, const u32 words[WORDS], int code) {
    int bit = BITS * code, next = bit / 32 + (bit % 32 + BITS > 32);
    return table[__funnelshift_r(words[bit / 32], words[next], bit % 32) & (ENTRIES - 1)];
}

/* Weights of eight codes of a run, from code 8 i on: four words of two 16-bit numbers. */
DEVICE void decode_eight(u32 found[4], const Table *table, const u32 words[WORDS], int i) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        found[j] = entry_of(*table, words, 8 * i + 2 * j) | entry_of(*table, words, 8 * i + 2 * j + 1) << 16;
}
#endif

/* A run's WORDS words of codes, by the widest loads that its address allows. */
DEVICE void load_codes(u32 words[WORDS], const u32 *p) {
#pragma unroll
#if WORDS % 4 == 0
    for (int i = 0; i < WORDS / 4; i++) {
        u32x4 four = load4((const u32x4 *)p + i);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
#else
    for (int i = 0; i < WORDS; i++) words[i] = p[i];
#endif
}

/* sums += rows of two tables times a run of x, of whose rows, every eighth, those below `tokens` are there. */
DEVICE void multiply_run(
    float sums[TILES][2][4], const Table tables[2], const u32 words[2][WORDS], const u16 *x, int columns, int tokens
) {
#pragma unroll
    for (int i = 0; i < RUN / 8; i++) {
        u32 up[4], down[4];
        decode_eight(up, &tables[0], words[0], i);
        decode_eight(down, &tables[1], words[1], i);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32x4 eight = {0, 0, 0, 0};
            if (8 * tile < tokens) eight = ((const u32x4 *)(x + 8LL * tile * columns))[i];
            multiply_add(sums[tile][0], up[0], down[0], up[1], down[1], eight.x, eight.y);
            multiply_add(sums[tile][1], up[2], down[2], up[3], down[3], eight.z, eight.w);
        }
    }
}

/* indices: (rows, columns * BITS / 32) words; x (tokens, columns); out (tokens, rows). A multiple of RUN columns. */
KERNEL lut_linear(
    const u16 *__restrict__ x, const u32 *__restrict__ indices, const void *__restrict__ lut, const void *__restrict__ bias,
    u16 *__restrict__ out, int rows, int columns, int tokens, int tile_rows
) {
    SHARED float sums_of[WARPS][16][8 * TILES];
    SHARED __align__(4) u8 kept[17][KEPT];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int runs = columns / RUN, first = blockIdx.x * 16, upper = first + g, lower = first + g + 8;
    if (upper >= rows) upper = rows - 1; /* decoded, and not written */
    if (lower >= rows) lower = rows - 1;
    const u32 *codes[2] = {indices + (long long)upper * runs * WORDS, indices + (long long)lower * runs * WORDS};
    u32 next[2][WORDS], words[2][WORDS];
    Table tables[2];
    float sums[TILES][2][4] = {0}; /* two of a tile, so that products overlap */
    int run = 4 * warp + t, last = runs - 1;
    for (int i = 0; i < 2; i++) /* the first codes are on their way while tables are made */
        load_codes(next[i], codes[i] + (run < last ? run : last) * WORDS);
    make_tables(kept, lut, first, rows, tile_rows);
    __syncthreads();
    for (int i = 0; i < 2; i++) take_table(&tables[i], kept[g + 8 * i]);
    int turns = (runs + 4 * WARPS - 1) / (4 * WARPS); /* one at least, so that nothing keeps the first loads waiting */
    do {
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < WORDS; j++) words[i][j] = next[i][j];
            int then = run + 4 * WARPS;
            if (turns > 1) load_codes(next[i], codes[i] + (then < last ? then : last) * WORDS);
        }
        if (run > last) /* zero times zero, whatever tables hold */
            for (int i = 0; i < 2; i++) take_table(&tables[i], kept[16]);
        multiply_run(sums, tables, words, x + (long long)g * columns + run * RUN, columns, run <= last ? tokens - g : 0);
        run += 4 * WARPS;
    } while (--turns > 0);
    #pragma unroll
    for (int i = 0; i < 4 * TILES; i++)
        sums_of[warp][g + (i % 4 / 2) * 8][i / 4 * 8 + 2 * t + i % 2] = sums[i / 4][0][i % 4] + sums[i / 4][1][i % 4];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * tokens; i += 32 * WARPS) {
        int row = i % 16, token = i / 16;
        float y = 0;
        for (int w = 0; w < WARPS; w++) y += sums_of[w][row][token]; /* always in this order */
        if (first + row >= rows) continue;
        if (LEVELS) y *= read(lut, first + row, LUT);
        if (BIAS >= 0) y += read(bias, first + row, BIAS);
        out[(long long)token * rows + first + row] = rounded(y);
    }
}
