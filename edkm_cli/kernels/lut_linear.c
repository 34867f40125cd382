/* y = x W^T + b with W packed: b-bit indices into tables, or signed levels with one scale a row. W is never written out.
 *
 * Few rows of x: each row of W is decoded in registers and multiplied with up to four rows of x at once. More rows: eight
 * rows of W at a time are decoded into the L1 cache, 512 columns of them, and multiplied with panels of 16 rows of x,
 * which lie column by column, so that a lane is a row of x and nothing has to be summed across lanes.
 *
 * Sums are float32 in an order that depends on shapes only. Threads are those of the OpenMP runtime that PyTorch has
 * loaded: they exist already and spin between calls; a second pool would fight with them for the cores.
 */
#include "codes.c"

#include <pthread.h>
#include <stdlib.h>

#define UNIT 16    /* rows of W that a thread takes at a time */
#define STRIP 8    /* rows of W decoded at a time for panels */
#define DEPTH 512  /* columns of W decoded at a time: 16 KiB of weights, 32 KiB of x */
#define PANELS 8   /* panels of x that share a decoded strip */
#define AHEAD 2048 /* bytes of W to fetch ahead: rows follow one another, but computing is too quick for the hardware's own */

/* One packed matrix and what is computed with it. `lut`: (groups, 2^bits) entries, or one float32 scale a row. */
typedef struct {
    const uint8_t *indices;
    const void *lut, *bias;
    void *out;
    int64_t rows, tile_rows, tile_columns, lut_dtype, bias_dtype;
} Part;

typedef struct {
    const Part *parts;
    const void *x;
    int64_t count, tokens, columns, x_stride, out_dtype, threads;
    Meaning meaning;
    int bits, pairs; /* pairs: x is laid out for pairs.c, as words */
} Call;

INLINE int64_t row_bytes(const Call *call) { return (call->columns * call->bits + 7) / 8; }

INLINE int64_t group_at(const Call *call, const Part *part, int64_t row, int64_t column) {
    return row / part->tile_rows * (call->columns / part->tile_columns) + column / part->tile_columns;
}

/* Whether whole vectors of 16 weights have one table: the fast loops need it. */
INLINE int even_tiles(const Call *call, const Part *part) {
    return part->tile_columns == call->columns || part->tile_columns % LANES == 0;
}

INLINE vf load_x(const float *x) { return *(const vf *)x; }
INLINE void put(float *to, vf x) { *(vfu *)to = (vfu)x; }

/* Weights of columns [from, end) of one row, levels unscaled; may write up to 15 floats more. `from` is a multiple of 16. */
INLINE void decode_row(
    Meaning meaning, const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int64_t from,
    int64_t end, float *to
) {
    const uint8_t *bytes = part->indices + row * row_bytes(call);
    int64_t step = call->bits;
    int even = even_tiles(call, part);
    while (from < end) {
        int64_t stop = smaller(end, (from / part->tile_columns + 1) * part->tile_columns), i = from;
        use_table(meaning, table, part->lut, part->lut_dtype, group_at(call, part, row, from), call->bits);
        if (even) {
            const uint8_t *p = bytes + from * step / 8;
            vf w[4];
            for (; i + 64 <= stop; i += 64, p += 8 * step) {
                weights64(meaning, u, table, p, w);
                for (int v = 0; v < 4; v++) put(to + i - from + v * LANES, w[v]);
            }
            for (; i < stop; i += LANES, p += 2 * step) put(to + i - from, weights16(meaning, u, table, p));
        } else {
            for (; i < stop; i++) to[i - from] = weight_at(meaning, table, bytes, i, call->bits);
        }
        to += stop - from;
        from = stop;
    }
}

/* sums[n][i]: lane-wise sums of row `row + i` of W times token n, for `count` rows and up to four tokens; x is padded with
 * zeros to whole vectors. */
INLINE void few(
    Meaning meaning, int tokens, const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int count,
    const float *x, vf sums[][UNIT]
) {
    int64_t step = call->bits, stride = call->x_stride, tile = part->tile_columns;
    int even = even_tiles(call, part);
    float decoded[DEPTH + LANES] __attribute__((aligned(64)));
    for (int r = 0; r < count; r++) {
        const uint8_t *bytes = part->indices + (row + r) * row_bytes(call);
        vf acc[4][4] = {}, w[4];
        for (int64_t from = 0; even && from < call->columns; from += tile) {
            const uint8_t *p = bytes + from * step / 8;
            const float *at = x + from, *stop = at + tile;
            use_table(meaning, table, part->lut, part->lut_dtype, group_at(call, part, row + r, from), call->bits);
            for (; at + 64 <= stop; at += 64, p += 8 * step) {
                __builtin_prefetch(p + AHEAD);
                weights64(meaning, u, table, p, w);
                for (int n = 0; n < tokens; n++)
                    for (int v = 0; v < 4; v++) acc[n][v] += w[v] * load_x(at + n * stride + v * LANES);
            }
            for (; at < stop; at += LANES, p += 2 * step) {
                w[0] = weights16(meaning, u, table, p);
                for (int n = 0; n < tokens; n++) acc[n][0] += w[0] * load_x(at + n * stride);
            }
        }
        for (int64_t from = 0; !even && from < call->columns; from += DEPTH) { /* tiles cut vectors: decode first */
            int64_t end = smaller(from + DEPTH, call->columns);
            decode_row(meaning, call, part, u, table, row + r, from, end, decoded);
            for (int64_t i = end - from; i % LANES; i++) decoded[i] = 0;
            for (int64_t i = 0; i < end - from; i += LANES)
                for (int n = 0; n < tokens; n++) acc[n][0] += load_x(decoded + i) * load_x(x + n * stride + from + i);
        }
        for (int n = 0; n < tokens; n++) sums[n][r] = (acc[n][0] + acc[n][1]) + (acc[n][2] + acc[n][3]);
    }
}

/* A function of its own for each meaning and number of tokens, so that accumulators get all registers. */
typedef void Decode(const Call *, const Part *, const Unpacker *, Table *, int64_t row, int64_t from, int64_t end, float *to);
typedef void Few(
    const Call *, const Part *, const Unpacker *, Table *, int64_t row, int count, const float *x, vf sums[][UNIT]
);
#define NOINLINE static __attribute__((noinline)) void
#define FEW_OF(meaning, tokens)                                                                                     \
    NOINLINE few_##meaning##_##tokens(                                                                              \
        const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int count, const float *x, \
        vf sums[][UNIT]                                                                                             \
    ) {                                                                                                             \
        few(meaning, tokens, call, part, u, table, row, count, x, sums);                                            \
    }
#define LOOPS_OF(meaning)                                                                                              \
    NOINLINE decode_##meaning(                                                                                         \
        const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int64_t from, int64_t end,   \
        float *to                                                                                                      \
    ) {                                                                                                                \
        decode_row(meaning, call, part, u, table, row, from, end, to);                                                 \
    }                                                                                                                  \
    FEW_OF(meaning, 1) FEW_OF(meaning, 2) FEW_OF(meaning, 3) FEW_OF(meaning, 4)
#define NAMES_OF(meaning) {few_##meaning##_1, few_##meaning##_2, few_##meaning##_3, few_##meaning##_4}
LOOPS_OF(SMALL) LOOPS_OF(LARGE) LOOPS_OF(LEVEL) LOOPS_OF(BYTE)

static Decode *const DECODE[] = {decode_SMALL, decode_LARGE, decode_LEVEL, decode_BYTE};
static Few *const FEW[][4] = {NAMES_OF(SMALL), NAMES_OF(LARGE), NAMES_OF(LEVEL), NAMES_OF(BYTE)};

/* out[i] = sum of the lanes of vectors[i], for 16 vectors. */
INLINE vf sum_lanes(const vf *vectors) {
#ifdef __AVX512F__
    __m512 a[16];
    for (int i = 0; i < 16; i++) a[i] = (__m512)vectors[i];
    for (int i = 0; i < 8; i++) /* halves: rows i and i + 8 */
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
    for (int i = 0; i < 4; i++) /* quarters: rows i, i + 8; i + 4, i + 12 */
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 2]), _mm512_unpackhi_ps(a[i], a[i + 2]));
    a[0] = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps(order, a[0]);
#else
    vf out = {};
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < LANES; lane++) out[i] += vectors[i][lane];
    return out;
#endif
}

/* Transposes 16 vectors of 16 lanes. */
INLINE void transpose(vf v[16]) {
#ifdef __AVX512F__
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) { /* lane 4q + c of b[i + c] .. b: rows i to i + 3 of column 4q + c */
            __m512d low = (__m512d)a[i + j], high = (__m512d)a[i + 2 + j];
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    for (int c = 0; c < 4; c++) {
        __m512 low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        v[c] = (vf)_mm512_shuffle_f32x4(low, high, 0x88);
        v[8 + c] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd);
        low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd), high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        v[4 + c] = (vf)_mm512_shuffle_f32x4(low, high, 0x88);
        v[12 + c] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd);
    }
#else
    vf out[16];
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < LANES; lane++) out[lane][i] = v[i][lane];
    memcpy(v, out, sizeof out);
#endif
}

INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    union { float f; uint32_t u; } in = {x}, half = {.u = 0x3f000000u};
    uint32_t sign = in.u & 0x80000000u;
    in.u ^= sign;
    if (in.u >= 0x47800000u) return (uint16_t)(sign >> 16 | (in.u > 0x7f800000u ? 0x7e00 : 0x7c00)); /* too large, NaN */
    if (in.u < 0x38800000u) { /* a denormal half: let an addition round */
        in.f += half.f;
        return (uint16_t)(sign >> 16 | (in.u - half.u));
    }
    in.u += 0xc8000000u + 0xfff + (in.u >> 13 & 1); /* exponent bias 127 to 15 */
    return (uint16_t)(sign >> 16 | in.u >> 13);
#endif
}

/* Rounds 16 floats to nearest even and writes the first `count`. */
INLINE void write_lanes(void *data, int64_t dtype, int64_t at, vf y, int count) {
    typedef uint16_t words __attribute__((vector_size(32)));
    if (dtype == FLOAT32) {
        if (count == LANES) put((float *)data + at, y);
        else memcpy((float *)data + at, &y, count * sizeof(float));
        return;
    }
    words rounded;
    if (dtype == BFLOAT16) {
        typedef uint32_t vu __attribute__((vector_size(64)));
        vu bits = (vu)y, nan = (vu)(y != y);
        rounded = __builtin_convertvector(((bits + 0x7fff + (bits >> 16 & 1)) & ~nan | (bits | 0x400000) & nan) >> 16, words);
    } else {
        for (int i = 0; i < LANES; i++) rounded[i] = to_half(y[i]);
    }
    memcpy((uint16_t *)data + at, &rounded, count * sizeof(uint16_t));
}

/* Scale (of levels), bias, rounding: 16 sums of rows from `row` on for one token, of which `count` are there. */
INLINE void finish(const Call *call, const Part *part, int64_t row, int count, int64_t token, vf y) {
    vf factor, bias;
    if (call->meaning >= LEVEL) {
        memcpy(&factor, (const float *)part->lut + row, count * sizeof(float));
        y *= factor;
    }
    if (part->bias) {
        Matrix matrix = {part->bias, part->bias_dtype};
        load_run(&matrix, row, count, (float *)&bias);
        y += bias;
    }
    write_lanes(part->out, call->out_dtype, token * part->rows + row, y, count);
}

/* Fetch the part of the strip from `row` on that stands for columns [from, end), while another one is multiplied. */
INLINE void prefetch_strip(const Call *call, const Part *part, int64_t row, int64_t from, int64_t end) {
    const uint8_t *bytes = part->indices + row * row_bytes(call);
    int64_t rows = smaller(STRIP, part->rows - row), size = rows * row_bytes(call);
    for (int64_t at = from * size / call->columns; at < end * size / call->columns; at += 64) __builtin_prefetch(bytes + at);
}

#define FEW_TOKENS 8 /* from so many tokens on, panels; measured */
#include "pairs.c"

/* Rows [row, row + count) of W, at most UNIT, with up to four tokens. */
static void few_tokens(
    int tokens, const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int count, int64_t token
) {
    vf sums[4][UNIT];
#if HAS_PAIRS
    if (call->pairs) FEW_PAIRS[tokens - 1](call, part, u, row, count, (const uint16_t *)call->x + token * call->x_stride, sums);
    else
#endif
        FEW[call->meaning][tokens - 1](call, part, u, table, row, count, (const float *)call->x + token * call->x_stride, sums);
    for (int n = 0; n < tokens; n++) {
        for (int i = count; i < UNIT; i++) sums[n][i] = splat(0);
        finish(call, part, row, count, token + n, sum_lanes(sums[n]));
    }
}

/* acc[p][i] += w[i][k] * panel[p][k] for all k: i a row of W, p a panel of 16 tokens. Every 64 columns a sum starts anew,
 * which keeps rounding errors as small as those of sums over lanes. */
INLINE void multiply(int panels, const float *w, const float *x, int64_t depth, int64_t panel_stride, vf acc[][STRIP]) {
    for (int64_t from = 0; from < depth; from += 64) {
        int64_t end = smaller(from + 64, depth);
        vf sums[2][STRIP] = {};
        for (int64_t k = from; k < end; k++) {
            vf first = load_x(x + k * LANES), second = panels > 1 ? load_x(x + panel_stride + k * LANES) : first;
            for (int i = 0; i < STRIP; i++) {
                vf weight = splat(w[i * (DEPTH + LANES) + k]);
                sums[0][i] += weight * first;
                if (panels > 1) sums[1][i] += weight * second;
            }
        }
        for (int p = 0; p < panels; p++)
            for (int i = 0; i < STRIP; i++) acc[p][i] += sums[p][i];
    }
}

NOINLINE multiply_1(const float *w, const float *x, int64_t depth, vf acc[][STRIP]) { multiply(1, w, x, depth, 0, acc); }
NOINLINE multiply_2(const float *w, const float *x, int64_t depth, int64_t panel_stride, vf acc[][STRIP]) {
    multiply(2, w, x, depth, panel_stride, acc);
}

/* Sums of rows [row, row + count) of W, at most STRIP, with panels of 16 tokens from `token` on. */
static void strip(
    const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int count, int64_t token, int panels,
    vf acc[][STRIP]
) {
    float w[STRIP * (DEPTH + LANES)] __attribute__((aligned(64)));
    if (count < STRIP) memset(w, 0, sizeof w);
    for (int64_t from = 0; from < call->columns; from += DEPTH) {
        int64_t end = smaller(from + DEPTH, call->columns);
        for (int i = 0; i < count; i++)
            DECODE[call->meaning](call, part, u, table, row + i, from, end, w + i * (DEPTH + LANES));
        prefetch_strip(call, part, row + STRIP, from, end);
        const float *x = (const float *)call->x + token * call->x_stride + from * LANES;
        int p = 0;
        for (; p + 2 <= panels; p += 2)
            multiply_2(w, x + p * LANES * call->x_stride, end - from, LANES * call->x_stride, acc + p);
        if (p < panels) multiply_1(w, x + p * LANES * call->x_stride, end - from, acc + p);
    }
}

/* Rows [row, row + count) of W, at most UNIT, with panels of 16 tokens from `token` on. */
static void many_tokens(
    const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int count, int64_t token, int panels
) {
    vf acc[UNIT / STRIP][PANELS][STRIP], block[UNIT];
    memset(acc, 0, sizeof acc);
    for (int i = 0; i < count; i += STRIP) {
#if HAS_PAIRS
        if (call->pairs) strip_pairs(call, part, u, row + i, (int)smaller(STRIP, count - i), token, panels, acc[i / STRIP]);
        else
#endif
            strip(call, part, u, table, row + i, (int)smaller(STRIP, count - i), token, panels, acc[i / STRIP]);
    }
    for (int p = 0; p < panels; p++, token += LANES) {
        for (int i = 0; i < UNIT; i++) block[i] = acc[i / STRIP][p][i % STRIP];
        transpose(block);
        for (int n = 0; n < LANES && token + n < call->tokens; n++) finish(call, part, row, count, token + n, block[n]);
    }
}

/* UNIT rows of W, or what is left of them, with all tokens. */
static void unit_of(const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row) {
    int64_t last = smaller(row + UNIT, part->rows);
    if (call->tokens < FEW_TOKENS) {
        for (int64_t token = 0; token < call->tokens; token += 4)
            few_tokens((int)smaller(4, call->tokens - token), call, part, u, table, row, (int)(last - row), token);
        return;
    }
    for (int64_t token = 0; token < call->tokens; token += PANELS * LANES) {
        int panels = (int)((smaller(call->tokens - token, PANELS * LANES) + LANES - 1) / LANES);
        many_tokens(call, part, u, table, row, (int)(last - row), token, panels);
    }
}

static int64_t units(const Call *call) {
    int64_t all = 0;
    for (int64_t p = 0; p < call->count; p++) all += (call->parts[p].rows + UNIT - 1) / UNIT;
    return all;
}

/* Units [first, last) of all parts, one after the other. */
static void work(const Call *call, int64_t first, int64_t last) {
    for (int64_t p = 0, before = 0; p < call->count; p++) {
        const Part *part = call->parts + p;
        int64_t own = (part->rows + UNIT - 1) / UNIT;
        Unpacker u;
        Table table;
        table.group = -1;
        prepare(&u, call->bits, part->indices + part->rows * row_bytes(call));
        for (int64_t i = first > before ? first - before : 0; i < own && before + i < last; i++)
            unit_of(call, part, &u, &table, i * UNIT);
        before += own;
    }
}

/* The OpenMP runtime that is in the process already, if any (libgomp's interface; LLVM's and Intel's have it too). */
#ifdef __linux__
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
extern int omp_in_parallel(void) __attribute__((weak));
#define HAS_THREADS (GOMP_parallel && omp_get_thread_num && omp_get_num_threads && omp_in_parallel)
#else
#define HAS_THREADS 0
#endif

static int forked; /* a child has none of its parent's threads, and libgomp waits for them forever */
static void in_child(void) { forked = 1; }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

static void of_thread(void *argument) {
#ifdef __linux__
    const Call *call = argument;
    int64_t all = units(call), t = omp_get_thread_num(), threads = omp_get_num_threads();
    work(call, all * t / threads, all * (t + 1) / threads);
#else
    (void)argument;
#endif
}

static void run(Call *call) {
    int64_t all = units(call);
#ifdef __linux__
    if (HAS_THREADS && call->threads > 1 && all > 1 && !forked && !omp_in_parallel()) {
        GOMP_parallel(of_thread, call, (unsigned)call->threads, 0);
        return;
    }
#endif
    work(call, 0, all);
}

/* A thread's scratch memory, kept from call to call: fresh pages would cost more than small products. */
typedef struct {
    size_t bytes;
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void make_key(void) { pthread_key_create(&scratch_key, free); }

static float *scratch(size_t floats) {
    size_t bytes = floats * sizeof(float);
    pthread_once(&scratch_once, make_key);
    Scratch *kept = pthread_getspecific(scratch_key);
    if (!kept || kept->bytes < bytes) {
        free(kept);
        pthread_setspecific(scratch_key, NULL);
        if (posix_memalign((void **)&kept, 64, 64 + bytes)) return NULL;
        kept->bytes = bytes;
        pthread_setspecific(scratch_key, kept);
    }
    return (float *)((char *)kept + 64);
}

/* x in float32: rows padded with zeros, or panels of 16 tokens, column by column. */
static void lay_out(const Call *call, const Matrix *x, int64_t x_row, float *to) {
    int64_t columns = call->columns, stride = call->x_stride, rounded = (call->tokens + LANES - 1) / LANES * LANES;
    if (call->tokens < FEW_TOKENS) {
        for (int64_t n = 0; n < call->tokens; n++) {
            load_run(x, n * x_row, columns, to + n * stride);
            memset(to + n * stride + columns, 0, (stride - columns) * sizeof(float));
        }
        return;
    }
    float *rows = to + rounded * stride;
    for (int64_t token = 0; token < rounded; token += LANES) {
        float *panel = to + token * stride;
        for (int64_t n = 0; n < LANES; n++) {
            if (token + n < call->tokens) load_run(x, (token + n) * x_row, columns, rows + n * stride);
            else memset(rows + n * stride, 0, columns * sizeof(float));
        }
        for (int64_t k = 0; k < columns; k += LANES) {
            vf block[LANES];
            for (int n = 0; n < LANES; n++) block[n] = load_x(rows + n * stride + k);
            transpose(block);
            memcpy(panel + k * LANES, block, sizeof block);
        }
    }
}

/* x (tokens, columns) times all parts; `levels`: the parts' luts are row scales. Returns 1 where memory is short. */
int edkm_lut_linear(
    const Part *parts, int64_t count, const Matrix *x, int64_t x_row, int64_t tokens, int64_t columns, int64_t bits,
    int64_t levels, int64_t threads
) {
    Call call = {.parts = parts, .count = count, .tokens = tokens, .columns = columns, .out_dtype = x->dtype};
    call.threads = threads, call.bits = (int)bits;
    call.meaning = levels ? (bits == 8 ? BYTE : LEVEL) : bits <= 4 ? SMALL : LARGE;
    int64_t padded = (columns + 63) / 64 * 64, rounded = (tokens + LANES - 1) / LANES * LANES;
    float *own = scratch((tokens < FEW_TOKENS ? tokens : rounded + LANES) * padded);
    if (!own) return 1;
    call.x = own;
    call.x_stride = padded;
#if HAS_PAIRS
    call.pairs = takes_pairs(&call);
    if (call.pairs) lay_out_pairs(&call, x->data, x_row, (uint16_t *)own);
    else
#endif
        lay_out(&call, x, x_row, own);
    run(&call);
    return 0;
}
