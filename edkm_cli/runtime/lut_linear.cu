/* y = x W^T + b for 1 to 8 rows of x and packed 3- or 4-bit W on a GPU (sm_80 and later), W's tables in registers.
 *
 * One block takes 16 rows of W, its warps take runs of columns in turn, tensor cores multiply (mma m16n8k16, float32 sums).
 * Lane 4g + t of a warp decodes rows g and g + 8; any columns may share a k of the product as long as x has the same, so
 * each lane takes a run of neighbours as they lie in memory, and its x beside it: nothing is shuffled between lanes.
 *
 * A table of eight 16-bit entries is two byte planes of two registers each, the sources of one byte permute (PRMT); a 3-bit
 * code in a nibble is its selector, so four codes cost two permutes, and two more to pair low with high bytes. With 16
 * entries both halves are looked up and bit 3 selects.
 *
 * Compiled at run time with BITS (3, 4), VECTOR (words of one load: 4 or 1), HALF (x, y and products in float16, else in
 * bfloat16), LUT and BIAS (0 float32, 1 bfloat16, 2 float16; BIAS -1: none) and WARPS. It includes nothing, so that NVRTC
 * needs no headers; tests/cuda_on_cpu.c runs this same text on a CPU.
 */
typedef unsigned u32;
typedef unsigned short u16;

#define RUN (32 * VECTOR)    /* neighbouring columns of a lane: whole words of codes, BITS * VECTOR of them */
#define WORDS (BITS * VECTOR)
#define ENTRIES (1 << BITS)

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

#define RAW (ENTRIES / (LUT ? 2 : 1)) /* words of a table in memory */

/* A row's table: low and high bytes of its entries, four to a word. */
typedef struct {
    u32 low[ENTRIES / 4], high[ENTRIES / 4];
} Table;

DEVICE void load_raw(u32 raw[RAW], const void *lut, long long group) {
#pragma unroll
    for (int i = 0; i < RAW / 4; i++) {
        u32x4 four = load4((const u32x4 *)lut + group * (RAW / 4) + i);
        raw[4 * i] = four.x, raw[4 * i + 1] = four.y, raw[4 * i + 2] = four.z, raw[4 * i + 3] = four.w;
    }
}

DEVICE void planes(Table *table, const u32 raw[RAW]) {
#pragma unroll
    for (int i = 0; i < ENTRIES / 4; i++) {
        u32 low = 0, high = 0;
#pragma unroll
        for (int j = 4 * i; j < 4 * i + 4; j++) {
#if LUT == 0
            float entry = __uint_as_float(raw[j]);
#else
            float entry = number(raw[j / 2] >> 16 * (j % 2) & 0xffff, LUT);
#endif
            u32 bits = rounded(entry);
            low |= (bits & 0xff) << 8 * (j - 4 * i);
            high |= (bits >> 8) << 8 * (j - 4 * i);
        }
        table->low[i] = low;
        table->high[i] = high;
    }
}

/* Eight codes of a run, from code 8 i on, each in a nibble. */
DEVICE u32 nibbles(const u32 words[WORDS], int i) {
#if BITS == 4
    return words[i];
#else
    int bit = 24 * i;
    u32 v = words[bit / 32] >> bit % 32;
    if (bit % 32 > 8) v = __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32);
    v = (v & 0xfff) | (v << 4 & 0xffff000); /* twelve bits to a half, six to a byte, three to a nibble */
    v = (v & 0x3f003f) | (v << 2 & ~0x3f003fu);
    v = (v & 0x7070707) | (v << 1 & ~0x7070707u);
    return v & 0x77777777;
#endif
}

/* Weights of four codes in the low nibbles of `codes`: two words of two 16-bit numbers. */
DEVICE void decode(const Table *table, u32 codes, u32 *first, u32 *second) {
    u32 three = BITS == 3 ? codes : codes & 0x7777;
    u32 low = permute(table->low[0], table->low[1], three), high = permute(table->high[0], table->high[1], three);
#if BITS == 4
    u32 four = permute(0, 0x80, (codes >> 1 & 0x4444) | 0x8888); /* bytes of ones where bit 3 of the code is set */
    low = (low & ~four) | (permute(table->low[2], table->low[3], three) & four);
    high = (high & ~four) | (permute(table->high[2], table->high[3], three) & four);
#endif
    *first = permute(low, high, 0x5140);
    *second = permute(low, high, 0x7362);
}

/* A run's WORDS words of codes, by the widest loads that its address allows. */
DEVICE void load_codes(u32 words[WORDS], const u32 *p) {
#pragma unroll
    for (int i = 0; i < WORDS / VECTOR; i++) {
#if VECTOR == 4
        u32x4 four = load4((const u32x4 *)p + i);
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
#else
        words[i] = p[i];
#endif
    }
}

/* sums += rows of two tables times a run of x, of which there is one where `there`. */
DEVICE void multiply_run(float sums[2][4], const Table tables[2], const u32 words[2][WORDS], const u16 *x, int there) {
#pragma unroll
    for (int i = 0; i < RUN / 8; i++) {
        u32x4 eight = {0, 0, 0, 0};
        if (there) eight = ((const u32x4 *)x)[i];
        u32 up = nibbles(words[0], i), down = nibbles(words[1], i), a[8];
        decode(&tables[0], up, &a[0], &a[1]);
        decode(&tables[1], down, &a[2], &a[3]);
        decode(&tables[0], up >> 16, &a[4], &a[5]);
        decode(&tables[1], down >> 16, &a[6], &a[7]);
        multiply_add(sums[0], a[0], a[2], a[1], a[3], eight.x, eight.y);
        multiply_add(sums[1], a[4], a[6], a[5], a[7], eight.z, eight.w);
    }
}

/* indices: (rows, columns * BITS / 32) words; x (tokens, columns); out (tokens, rows). A multiple of RUN columns. */
KERNEL lut_linear(
    const u16 *__restrict__ x, const u32 *__restrict__ indices, const void *__restrict__ lut, const void *__restrict__ bias,
    u16 *__restrict__ out, int rows, int columns, int tokens, int tile_rows
) {
    SHARED float sums_of[WARPS][16][8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int runs = columns / RUN, first = blockIdx.x * 16, upper = first + g, lower = first + g + 8;
    if (upper >= rows) upper = rows - 1; /* decoded, and not written */
    if (lower >= rows) lower = rows - 1;
    const u32 *codes[2] = {indices + (long long)upper * runs * WORDS, indices + (long long)lower * runs * WORDS};
    u32 raw[2][RAW], next[2][WORDS], words[2][WORDS];
    Table tables[2];
    float sums[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}; /* two, so that products overlap */
    int run = 4 * warp + t, last = runs - 1;
    for (int i = 0; i < 2; i++) { /* the first codes are on their way while tables are made */
        load_codes(next[i], codes[i] + (run < last ? run : last) * WORDS);
        load_raw(raw[i], lut, (i ? lower : upper) / tile_rows);
    }
    for (int i = 0; i < 2; i++) planes(&tables[i], raw[i]);
    int turns = (runs + 4 * WARPS - 1) / (4 * WARPS); /* one at least, so that nothing keeps the first loads waiting */
    do {
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < WORDS; j++) words[i][j] = next[i][j];
            int then = run + 4 * WARPS;
            if (turns > 1) load_codes(next[i], codes[i] + (then < last ? then : last) * WORDS);
        }
        if (run > last) /* zero times zero, whatever tables hold */
            for (int i = 0; i < ENTRIES / 4; i++)
                tables[0].low[i] = tables[0].high[i] = tables[1].low[i] = tables[1].high[i] = 0;
        multiply_run(sums, tables, words, x + (long long)g * columns + run * RUN, run <= last && g < tokens);
        run += 4 * WARPS;
    } while (--turns > 0);
    for (int i = 0; i < 4; i++) sums_of[warp][g + (i / 2) * 8][2 * t + i % 2] = sums[0][i] + sums[1][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * tokens; i += 32 * WARPS) {
        int row = i % 16, token = i / 16;
        float y = 0;
        for (int w = 0; w < WARPS; w++) y += sums_of[w][row][token]; /* always in this order */
        if (first + row >= rows) continue;
#if BIAS == 0
        y += ((const float *)bias)[first + row];
#elif BIAS > 0
        y += number(((const u16 *)bias)[first + row], BIAS);
#endif
        out[(long long)token * rows + first + row] = rounded(y);
    }
}
