/* A product with packed matrices as its loops see it: lut_linear.c computes it anywhere, lut_pairs.c where the processor
 * multiplies pairs of bfloat16. */
#ifndef EDKM_LUT_CALL
#define EDKM_LUT_CALL

#include "codes.h"
#include "packed.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif
#if HAS_PAIRS && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
/* Floats of a register where fewer than 16: lut_narrow.c has loops for those. */
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
#define NARROW 8
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define NARROW 4
#else
#define NARROW 0
#endif

#define NOINLINE static __attribute__((noinline)) void
#define UNIT 16    /* rows of W that a thread takes at a time */
/* Where AMX multiplies, panels that share a decoding, and strips that share what is laid out of them: 320 and 512 KiB (their
 * sums) of the L2 cache. Up to SUM_TILES panels, sums are in tiles. */
#define TILED_PANELS 16
#define TILED 32
#define SUM_TILES 4
/* Bytes of W to fetch ahead, into the L1 and the L2 cache: rows follow one another, but computing is too quick for the hardware. */
#define AHEAD 3072
#define FAR_AHEAD 16384
#define PANEL_DEPTH 256              /* columns of W that are decoded at a time for panels: 8 or 16 KiB */
#define PANEL_ROW (PANEL_DEPTH + 32) /* floats: an odd number of cache lines, a power of two would share few sets */
#define TILED_DEPTH 640              /* the same where many panels are multiplied by AMX: sums wait for memory less often */
#define TILED_ROW (TILED_DEPTH + 32) /* words */

/* Rows of W, decoded for panels: words of bfloat16, or floats. */
typedef union {
    uint16_t words[UNIT][TILED_ROW];
    float floats[UNIT][PANEL_ROW];
} Decoded;

/* Columns [from, end) of rows [row, row + count) of a matrix, at most UNIT; `from` is a multiple of 128. `limit`: the first
 * byte that must not be read. */
typedef struct {
    const struct Call *call;
    const Part *part;
    const Unpacker *u;
    Table *table;
    const uint8_t *limit;
    int64_t row, from, end, panel, panels;
    int count, bits;
} Strip;

typedef struct Call {
    const Part *parts;
    void *const *outs;
    const void *given, *x; /* x as it was given, `given_row` numbers from a token to the next one, and as it is laid out */
    int64_t given_row, count, tokens, columns, x_stride, out_dtype, out_stride; /* out_stride 0: each matrix's own rows */
    Meaning meaning;
    int bits, pairs, half; /* pairs: x is laid out for lut_pairs.c, as words; half: of float16, and scaled */
    int exponents[16];     /* of the scales, for each token */
    float unscale[16];     /* what undoes them */
    /* Few tokens: all of them with whole rows. NULL where they are taken by panels, which the others are for. */
    void (*few)(Strip *);
    void (*lay_out_few)(const struct Call *, void *to);
    /* Columns [column, column + 128) of a panel: up to 16 tokens from `token` on, and zeros. */
    void (*lay_out)(const struct Call *, int64_t token, int64_t column, void *to);
    int64_t units, group; /* UNITs of rows of all parts; panels that share a decoding */
    int64_t depth; /* columns that are decoded at a time: in x, too, those of all panels lie together */
    int64_t (*decode)(const Strip *, Decoded *); /* returns the vectors of x that belong to it in a panel */
    /* sums[p][r] += row r of W times panel p, `vectors` vectors of it; panels are `apart` bytes apart. */
    void (*add)(const Decoded *, const char *x, int64_t vectors, int64_t apart, int64_t panels, vf sums[][UNIT]);
    /* By tiles instead: up to TILED strips, as one whose `count` is that of their rows. 0 where memory is short. */
    int (*tiled)(Strip *);
    int *short_of_memory;
} Call;

INLINE int64_t bytes_of_x(const Call *call) { return call->pairs ? 2 : 4; }
INLINE int64_t panels_of(const Call *call) { return (call->tokens + LANES - 1) / LANES; }

/* Bytes of a panel's part, and where it begins; `from` is a multiple of `depth`. */
INLINE int64_t apart_at(const Call *call, int64_t from) {
    return smaller(call->depth, call->x_stride - from) * LANES * bytes_of_x(call);
}
INLINE char *panel_at(const Call *call, int64_t panel, int64_t from) {
    return (char *)call->x + from * panels_of(call) * LANES * bytes_of_x(call) + panel * apart_at(call, from);
}

INLINE int64_t row_bytes(const Call *call) { return (call->columns * call->bits + 7) / 8; }

/* The row of tiles that a row is in; divisions would be a tenth of a small product. */
INLINE int64_t tile_of(const Part *part, int64_t row) { return part->tile_rows == 1 ? row : row / part->tile_rows; }

INLINE int64_t group_at(const Call *call, const Part *part, int64_t row, int64_t column) {
    if (part->tile_columns == call->columns) return tile_of(part, row);
    return tile_of(part, row) * (call->columns / part->tile_columns) + column / part->tile_columns;
}

/* Whether tiles begin at whole bytes: what is decoded behind the end of one is overwritten by the next. */
INLINE int whole_bytes(const Call *call, const Part *part) {
    return part->tile_columns == call->columns || part->tile_columns * call->bits % 8 == 0;
}

/* Whether whole vectors of 16 weights have one table: products in registers need it. */
INLINE int even_tiles(const Call *call, const Part *part) {
    return part->tile_columns == call->columns || part->tile_columns % LANES == 0;
}

/* Scale (of levels), bias, rounding: 16 sums of rows from `row` on for one token, of which `count` are there. */
INLINE void finish(const Call *call, const Part *part, int64_t row, int count, int64_t token, vf y) {
    vf factor, bias;
    if (call->meaning >= LEVEL) {
        memcpy(&factor, (const float *)part->lut + row, count * sizeof(float));
        y *= factor;
    }
    if (part->bias) {
        load_run(part->bias, part->bias_dtype, row, count, (float *)&bias);
        y += bias;
    }
    int64_t stride = call->out_stride ? call->out_stride : part->rows;
    write_lanes(call->outs[part - call->parts], call->out_dtype, token * stride + row, y, count);
}

/* Fetch the part of the next strip that stands for the columns of this one, which is multiplied meanwhile. */
INLINE void prefetch_next(const Strip *s) {
    const uint8_t *bytes = s->part->indices + (s->row + UNIT) * row_bytes(s->call);
    int64_t rows = smaller(UNIT, s->part->rows - s->row - UNIT), size = rows * row_bytes(s->call);
    for (int64_t at = s->from * size / s->call->columns; at < s->end * size / s->call->columns; at += 64)
        __builtin_prefetch(bytes + at);
}

/* Whether this product goes by pairs; then what else the call has to know is in it, and `parts` stay. */
int edkm_pairs_take(Call *call, Part parts[MOST_PARTS]);
/* Whether the processor has tiles of bfloat16 and the system lets this process use them; `Call.tiled`. */
int edkm_may_use_tiles(void);
int edkm_tiles_multiply(Strip *s);

/* What a kind of codes has: `decode_row`, and `few` with each number of tokens, as functions of their own, so that accumulators
 * get all registers. */
typedef void Decode(const Strip *, int64_t row, float *to);
typedef void Few(const Strip *, const float *x, vf y[]);
#define DECODE_OF(kind) NOINLINE decode_##kind(const Strip *s, int64_t row, float *to) { decode_row(kind, s, row, to); }
#define FEW_TOKENS_OF(kind, n) NOINLINE few_##kind##_##n(const Strip *s, const float *x, vf y[]) { few(kind, n, s, x, y); }
#define FEW_OF(kind) FEW_TOKENS_OF(kind, 1) FEW_TOKENS_OF(kind, 2) FEW_TOKENS_OF(kind, 3) FEW_TOKENS_OF(kind, 4)
#define FEW_NAMES(kind) {few_##kind##_1, few_##kind##_2, few_##kind##_3, few_##kind##_4}

/* `decode_row`, `few` and `add_floats` of lut_linear.c; the first for tiles of whole bytes, the second of whole vectors. */
void edkm_narrow_decode(const Strip *s, int64_t row, float *to);
void edkm_narrow_few(const Strip *s, int tokens, const float *x, vf y[4]);
void edkm_narrow_add(const Decoded *w, const char *x, int64_t vectors, int64_t apart, int64_t panels, vf sums[][UNIT]);

#endif
