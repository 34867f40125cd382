/* y = x W^T + b with W packed: b-bit indices into tables, or signed levels with one scale a row. W is never written out.
 *
 * Few rows of x: each row of W is decoded in registers and multiplied with up to four rows of x at once. More rows: eight
 * rows of W at a time are decoded into the L1 cache, 512 columns of them, and multiplied with panels of 16 rows of x,
 * which lie column by column, so that a lane is a row of x and nothing has to be summed across lanes.
 *
 * Sums are float32 in an order that depends on shapes only, so that the number of threads changes no result.
 */
#include "lut_call.h"
#include "threads.h"

#define STRIP 8    /* rows of W decoded at a time for panels */
#define DEPTH 512  /* columns of W decoded at a time: 16 KiB of weights, 32 KiB of x */
#define PANELS 8   /* panels of x that share a decoded strip */
#define SHARED_PRODUCTS (1 << 17) /* from so many on, other threads help: below, waking them costs more */
#define SHARED_WEIGHTS (1 << 15)  /* the same for decoding */

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

/* Fetch the part of the strip from `row` on that stands for columns [from, end), while another one is multiplied. */
INLINE void prefetch_strip(const Call *call, const Part *part, int64_t row, int64_t from, int64_t end) {
    const uint8_t *bytes = part->indices + row * row_bytes(call);
    int64_t rows = smaller(STRIP, part->rows - row), size = rows * row_bytes(call);
    for (int64_t at = from * size / call->columns; at < end * size / call->columns; at += 64) __builtin_prefetch(bytes + at);
}

/* From so many tokens on, panels: measured. Gathered entries cost more, so that decoding them once pays sooner. */
INLINE int64_t panels_from(const Call *call) { return call->meaning == LARGE ? 5 : 13; }

/* Rows [row, row + count) of W, at most UNIT, with up to four tokens. */
static void few_tokens(
    int tokens, const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row, int count, int64_t token
) {
    vf sums[4][UNIT];
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
    for (int i = 0; i < count; i += STRIP)
        strip(call, part, u, table, row + i, (int)smaller(STRIP, count - i), token, panels, acc[i / STRIP]);
    for (int p = 0; p < panels; p++, token += LANES) {
        for (int i = 0; i < UNIT; i++) block[i] = acc[i / STRIP][p][i % STRIP];
        transpose(block);
        for (int n = 0; n < LANES && token + n < call->tokens; n++) finish(call, part, row, count, token + n, block[n]);
    }
}

/* UNIT rows of W, or what is left of them, with all tokens. */
static void unit_of(const Call *call, const Part *part, const Unpacker *u, Table *table, int64_t row) {
    int64_t last = smaller(row + UNIT, part->rows);
    if (call->tokens < panels_from(call)) {
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
static void multiply_units(const void *job, int64_t first, int64_t last) {
    const Call *call = job;
    for (int64_t p = 0, before = 0; p < call->count; p++) {
        const Part *part = call->parts + p;
        int64_t own = (part->rows + UNIT - 1) / UNIT, start = first > before ? first - before : 0;
        int64_t stop = smaller(own, last - before);
        before += own;
#if HAS_PAIRS
        if (call->pairs) {
            if (start < stop) edkm_pairs_units(call, part, start, stop);
            continue;
        }
#endif
        Unpacker u;
        Table table;
        table.group = -1;
        prepare(&u, call->bits, part->indices + part->rows * row_bytes(call));
        for (int64_t i = start; i < stop; i++) unit_of(call, part, &u, &table, i * UNIT);
    }
}

/* x in float32: rows padded with zeros, or panels of 16 tokens, column by column. */
static void lay_out(const Call *call, const Matrix *x, int64_t x_row, float *to) {
    int64_t columns = call->columns, stride = call->x_stride, rounded = (call->tokens + LANES - 1) / LANES * LANES;
    if (call->tokens < panels_from(call)) {
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

/* What this build can do: 0 plain or AVX2 or NEON, 1 AVX-512, 2 AVX-512 with products of bfloat16 pairs. */
int edkm_lut_linear_level(void) {
#ifdef __AVX512F__
    return 1 + HAS_PAIRS;
#else
    return 0;
#endif
}

INLINE Meaning meaning_of(const Packed *packed) {
    return packed->levels ? (packed->bits == 8 ? BYTE : LEVEL) : packed->bits <= 4 ? SMALL : LARGE;
}

int64_t edkm_matrices_of(const void *packed) { return ((const Packed *)packed)->count; }

/* outs[p] (tokens, rows of p) = x (tokens, columns), whose rows are `x_row` apart, times each matrix; rows of outs[p] are
 * `out_row` apart. Returns 1 where memory is short. */
int edkm_lut_linear_into(
    const Packed *packed, const void *x, int64_t dtype, int64_t x_row, int64_t tokens, void *const *outs, int64_t out_row
) {
    Call call = {.parts = packed->parts, .count = packed->count, .outs = outs, .tokens = tokens, .out_dtype = dtype};
    call.out_stride = out_row;
    call.columns = packed->columns, call.bits = (int)packed->bits, call.meaning = meaning_of(packed);
    int64_t padded = (call.columns + 127) / 128 * 128, rounded = (tokens + LANES - 1) / LANES * LANES, rows = 0;
#if HAS_PAIRS
    Part parts[MOST_PARTS];
    int exponents[16];
    call.pairs = edkm_pairs_take(&call, x, x_row, parts, exponents);
#endif
    float *own = scratch((tokens < panels_from(&call) && !call.pairs ? tokens : rounded + LANES) * padded);
    if (!own) return 1;
    call.x = own;
    call.x_stride = padded;
    Matrix from = {x, dtype};
#if HAS_PAIRS
    if (call.pairs) edkm_pairs_lay_out(&call, x, x_row, exponents, own);
    else
#endif
        lay_out(&call, &from, x_row, own);
    for (int64_t p = 0; p < call.count; p++) rows += call.parts[p].rows;
    share(multiply_units, &call, units(&call), rows * call.columns * tokens >= SHARED_PRODUCTS);
    return 0;
}

/* The same where the rows of outs[p] follow one another. */
int edkm_lut_linear(
    const Packed *packed, const void *x, int64_t dtype, int64_t x_row, int64_t tokens, void *const *outs
) {
    return edkm_lut_linear_into(packed, x, dtype, x_row, tokens, outs, 0);
}

/* Dense rows of W: those that `ids` names, or `count` rows from `first` on; columns [from, end), `from` a multiple of 16. */
typedef struct {
    Call call;
    const int64_t *ids;
    void *out;
    int64_t first, count, from, end;
} Rows;

static void decode_units(const void *job, int64_t first, int64_t last) {
    const Rows *rows = job;
    const Call *call = &rows->call;
    const Part *part = call->parts;
    float w[DEPTH + LANES] __attribute__((aligned(64)));
    Unpacker u;
    Table table;
    table.group = -1;
    prepare(&u, call->bits, part->indices + part->rows * row_bytes(call));
    for (int64_t i = first * UNIT; i < smaller(last * UNIT, rows->count); i++) {
        int64_t row = rows->ids ? rows->ids[i] : rows->first + i, width = rows->end - rows->from;
        vf scale = call->meaning >= LEVEL ? splat(((const float *)part->lut)[row]) : splat(1);
        for (int64_t from = rows->from; from < rows->end; from += DEPTH) {
            int64_t end = smaller(from + DEPTH, rows->end);
            DECODE[call->meaning](call, part, &u, &table, row, from, end, w);
            for (int64_t c = from; c < end; c += LANES)
                write_lanes(
                    rows->out, call->out_dtype, i * width + c - rows->from, load_x(w + c - from) * scale,
                    (int)smaller(LANES, end - c)
                );
        }
    }
}

/* Decodes them into `out` (count, end - from). Returns 2 where an id names no row. */
int edkm_packed_rows(
    const Packed *packed, const int64_t *ids, int64_t first, int64_t count, int64_t from, int64_t end, int64_t dtype, void *out
) {
    Rows rows = {.ids = ids, .first = first, .count = count, .from = from, .end = end, .out = out};
    Call call = {.parts = packed->parts, .count = 1, .columns = packed->columns, .out_dtype = dtype};
    call.bits = (int)packed->bits, call.meaning = meaning_of(packed);
    rows.call = call;
    for (int64_t i = 0; ids && i < count; i++)
        if (ids[i] < 0 || ids[i] >= packed->parts->rows) return 2;
    share(decode_units, &rows, (count + UNIT - 1) / UNIT, count * (end - from) >= SHARED_WEIGHTS);
    return 0;
}

/* For each row of W and each of its tiles: sums of `values` over the weights that have the same code. */
typedef struct {
    Call call;
    const float *values; /* (rows, columns), from row `first` of W on */
    float *sums;         /* (rows, tiles of a row, 2^bits) */
    int64_t first, count;
} Sums;

/* Codes of at most four bits: all sums are in registers. `count` columns from byte `p` on. */
INLINE void sum_small(int bits, const Unpacker *u, const uint8_t *p, const float *values, int64_t count, float *sums) {
    vf acc[16] = {}, part;
    for (int64_t i = 0; i < count; i += LANES, p += 2 * bits) {
        vi codes = codes16(u, p) & splat_int((1 << bits) - 1);
        if (count - i >= LANES) part = (vf)*(const vfu *)(values + i);
        else part = splat(0), memcpy(&part, values + i, (size_t)(count - i) * sizeof(float));
        for (int j = 0; j < 1 << bits; j++) acc[j] = add_if_equal(acc[j], codes, splat_int(j), part);
    }
    for (int j = 0; j < 1 << bits; j++) sums[j] = (float)total(acc[j]);
}

static void sum_rows(const void *job, int64_t first, int64_t last) {
    const Sums *job_of = job;
    const Call *call = &job_of->call;
    const Part *part = call->parts;
    int bits = call->bits, k = 1 << bits;
    int64_t tile = part->tile_columns, across = call->columns / tile;
    Unpacker u;
    prepare(&u, bits, part->indices + part->rows * row_bytes(call));
    for (int64_t row = first * UNIT; row < smaller(last * UNIT, job_of->count); row++) {
        const uint8_t *bytes = part->indices + (job_of->first + row) * row_bytes(call);
        const float *values = job_of->values + row * call->columns;
        float *sums = job_of->sums + row * across * k;
        for (int64_t from = 0; from < call->columns; from += tile, values += tile, sums += k) {
            const uint8_t *p = bytes + from * bits / 8;
            if (bits <= 4 && even_tiles(call, part)) {
                if (bits == 1) sum_small(1, &u, p, values, tile, sums);
                else if (bits == 2) sum_small(2, &u, p, values, tile, sums);
                else if (bits == 3) sum_small(3, &u, p, values, tile, sums);
                else sum_small(4, &u, p, values, tile, sums);
                continue;
            }
            memset(sums, 0, (size_t)k * sizeof *sums);
            for (int64_t i = 0; i < tile; i++) sums[code_at(bytes, from + i, bits)] += values[i];
        }
    }
}

void edkm_sum_by_code(const Packed *packed, const float *values, int64_t first, int64_t count, float *sums) {
    Sums job = {.values = values, .sums = sums, .first = first, .count = count};
    Call call = {.parts = packed->parts, .count = 1, .columns = packed->columns, .bits = (int)packed->bits};
    job.call = call;
    share(sum_rows, &job, (count + UNIT - 1) / UNIT, count * call.columns >= SHARED_WEIGHTS);
}
